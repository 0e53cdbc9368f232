# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment,misc"
"""Triton `reduce`: contributions added in the order of a merge program, which is compiled into the kernel."""

from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from kfuse.kernels import launch

BLOCK = 2048
THREADS = 256
ADD = -1


@triton.jit
def reduce_kernel(rows, out, numel, stride, scale, PROGRAM: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < numel
    stride = tl.zeros((), tl.int64) + stride
    stack = ()  # unpacking is not in Triton's language
    for i in tl.static_range(len(PROGRAM)):
        if PROGRAM[i] < 0:
            stack = stack[:-2] + (stack[-2] + stack[-1],)  # noqa: RUF005
        else:
            row = tl.load(rows + PROGRAM[i] * stride + index, mask=mask)
            stack = stack + (row.to(tl.float32),)  # noqa: RUF005
    total = stack[0]
    if SCALED:
        total = total * scale
    tl.store(out + index, total.to(out.dtype.element_ty), mask=mask)


@cache
def postfix(count: int, merges: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    """What the merges leave in row 0, as a postfix expression: row numbers, and ADD for the two values before it."""
    rows: list[tuple[int, ...]] = [(row,) for row in range(count)]
    for dst, src in merges:
        rows[dst] = (*rows[dst], *rows[src], ADD)
    return rows[0]


def block_size(count: int, itemsize: int) -> int:
    """Elements a program reduces: fewer where many rows would not fit in registers. It does not affect bits."""
    halvings = max(0, (count * itemsize - 1).bit_length() - 5)
    return max(THREADS, BLOCK >> halvings)


def reduce(rows: Tensor, merges: tuple[tuple[int, int], ...], out: Tensor, *, scale: float) -> None:
    if out.numel() == 0:
        return
    block = block_size(len(rows), rows.element_size())
    reduce_kernel[(triton.cdiv(out.numel(), block),)](
        rows,
        out,
        out.numel(),
        rows.stride(0),
        float(scale),
        PROGRAM=postfix(len(rows), merges),
        SCALED=scale != 1.0,
        BLOCK=block,
        **launch.options(THREADS),
    )
