# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment,misc"
"""Triton `reduce`: contributions added in the order of a merge program, which is compiled into the kernel.

What is measured on the way is compiled in as well: an output that is not given costs nothing.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kfuse.kernels import launch
from kfuse.kernels.measure import Measures
from kfuse.kernels.merges import postfix
from kfuse.kernels.table import BLOCK
from kfuse.kernels.triton_partials import THREADS, lane_sums, tile_size

PLAIN_TILE = 2048
HELD_ROWS = 8


@triton.jit
def merged(rows, index, mask, stride, PROGRAM: tl.constexpr):
    """The rows' elements at `index`, added in fp32 in the order of PROGRAM."""
    stack = ()  # unpacking is not in Triton's language
    for i in tl.static_range(len(PROGRAM)):
        if PROGRAM[i] < 0:
            stack = stack[:-2] + (stack[-2] + stack[-1],)  # noqa: RUF005
        else:
            row = tl.load(rows + PROGRAM[i] * stride + index, mask=mask, other=0.0)
            stack = stack + (row.to(tl.float32),)  # noqa: RUF005
    return stack[0]


@triton.jit
def _again(rows, index, mask, stride, k, HELD: tl.constexpr):
    """Row k, which `merged` has read: the very same load where rows are few and held in registers, else the cache's."""
    if HELD:
        row = tl.load(rows + k * stride + index, mask=mask, other=0.0)
    else:
        row = tl.load(rows + k * stride + index, mask=mask, other=0.0, eviction_policy="evict_first")
    return row.to(tl.float32)


@triton.jit
def _weighted_square(row, mean, share, scale):
    """share * (g - mean)^2, where the row is g * share / scale."""
    s = tl.load(share)
    difference = row * tl.where(s == 0.0, 0.0, scale / s) - mean
    return s * (difference * difference)


@triton.jit
def _added(sums, k, value, LANE: tl.constexpr):
    """The tuple with `value` added to its k-th sum."""
    return sums[:k] + (sums[k] + lane_sums(value, LANE),) + sums[k + 1 :]  # noqa: RUF005


@triton.jit
def reduce_kernel(
    rows,
    out,
    sumsq,
    variance,
    noise,
    row_sumsq,
    row_dot,
    shares,
    exp_avg_sq,
    numel,
    stride,
    scale,
    eps,
    PROGRAM: tl.constexpr,
    SCALED: tl.constexpr,
    COUNT: tl.constexpr,
    HELD: tl.constexpr,
    UNROLLED: tl.constexpr,
    LANE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    start = block.to(tl.int64) * BLOCK
    stride = tl.zeros((), tl.int64) + stride
    none = tl.zeros((TILE // LANE,), tl.float32)
    squares, spreads, noises = none, none, none
    row_squares, row_dots = (none,) * COUNT, (none,) * COUNT

    for at in range(0, BLOCK, TILE):
        index = start + at + tl.arange(0, TILE)
        mask = index < numel
        total = merged(rows, index, mask, stride, PROGRAM)
        if SCALED:
            total = total * scale
        stored = total.to(out.dtype.element_ty)
        mean = stored.to(tl.float32)
        if sumsq is not None:
            squares += lane_sums(mean * mean, LANE)
        if shares is not None or row_sumsq is not None or row_dot is not None:
            spread = tl.zeros((TILE,), tl.float32)
            if UNROLLED:
                for k in tl.static_range(COUNT):
                    row = _again(rows, index, mask, stride, k, HELD)
                    if shares is not None:
                        spread += _weighted_square(row, mean, shares + k, scale)
                    if row_sumsq is not None:
                        row_squares = _added(row_squares, k, row * row, LANE)
                    if row_dot is not None:
                        row_dots = _added(row_dots, k, row * mean, LANE)
            else:
                for k in range(COUNT):
                    spread += _weighted_square(_again(rows, index, mask, stride, k, HELD), mean, shares + k, scale)
            if variance is not None:
                spreads += lane_sums(spread, LANE)
            if noise is not None:
                v = tl.load(exp_avg_sq + index, mask=mask, other=1.0)
                denominator = tl.sqrt(v) + eps
                noises += lane_sums(spread / denominator / denominator, LANE)
        tl.store(out + index, stored, mask=mask)

    if sumsq is not None:
        tl.store(sumsq + block, tl.sum(squares, axis=0))
    if variance is not None:
        tl.store(variance + block, tl.sum(spreads, axis=0))
    if noise is not None:
        tl.store(noise + block, tl.sum(noises, axis=0))
    for k in tl.static_range(COUNT):
        if row_sumsq is not None:
            tl.store(row_sumsq + k * tl.num_programs(0) + block, tl.sum(row_squares[k], axis=0))
        if row_dot is not None:
            tl.store(row_dot + k * tl.num_programs(0) + block, tl.sum(row_dots[k], axis=0))


def constants(
    count: int, itemsize: int, merges: tuple[tuple[int, int], ...], measured: bool, of_rows: bool
) -> dict[str, Any]:
    """The kernel's shape. What is measured is summed in an order that neither the row count nor the merges change."""
    if measured:
        tile, block = tile_size(itemsize), BLOCK
    else:
        # Fewer elements where many rows would not fit in registers: no bits depend on it.
        halvings = max(0, (count * itemsize - 1).bit_length() - 5)
        tile = block = max(THREADS * 16 // itemsize, PLAIN_TILE >> halvings)  # 128 bits of each row at the least
    return {
        "PROGRAM": postfix(count, merges),
        "COUNT": count,
        "HELD": count <= HELD_ROWS,
        "UNROLLED": count <= HELD_ROWS or of_rows,
        "LANE": tile_size(itemsize) // THREADS,
        "TILE": tile,
        "BLOCK": block,
    }


def fused_constants(count: int, itemsize: int, merges: tuple[tuple[int, int], ...]) -> dict[str, Any]:
    """The shape of an update that adds `count` contributions itself. No bits depend on the block.

    itemsize: of the gradient's or the parameter's type, whichever is smaller: a thread moves 128 bits of it or more.
    """
    return {"PROGRAM": postfix(count, merges), "BLOCK": 2048 if itemsize == 2 or count <= 4 else 1024}


def reduce(rows: Tensor, merges: tuple[tuple[int, int], ...], out: Tensor, *, scale: float, measures: Measures) -> None:
    if out.numel() == 0:
        return
    if measures.any:
        rows = _aligned(rows)
    shape = constants(len(rows), rows.element_size(), merges, measures.any, measures.of_rows)
    reduce_kernel[(triton.cdiv(out.numel(), shape["BLOCK"]),)](
        rows,
        out,
        measures.sumsq,
        measures.variance,
        measures.noise,
        measures.row_sumsq,
        measures.row_dot,
        measures.shares if measures.centred else None,
        measures.exp_avg_sq if measures.noise is not None else None,
        out.numel(),
        rows.stride(0),
        float(scale),
        float(measures.eps),
        SCALED=scale != 1.0,
        **shape,
        **launch.options(THREADS, registers=registers(len(rows), rows.element_size(), measures.any, measures.of_rows)),
    )


def registers(count: int, itemsize: int, measured: bool, of_rows: bool) -> int:
    """Registers a thread may have: the sums, or the addresses, of many rows need more than other kernels."""
    if of_rows and count * 16 // itemsize > 32:
        return 168
    return 255 if count > (16 if measured else 32) else 128


def _aligned(rows: Tensor) -> Tensor:
    """The rows, 16-byte aligned. Rare ones that are not so are copied: another layout would add in another order."""
    if rows.stride(0) % 16 == 0 and rows.data_ptr() % 16 == 0:
        return rows
    count, numel = rows.shape
    room = torch.empty(count, triton.cdiv(numel, 16) * 16, dtype=rows.dtype, device=rows.device)
    return room[:, :numel].copy_(rows)
