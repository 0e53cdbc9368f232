# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton `block_sumsq` and `sum_partials`: a sum of squares in two kernels, in an order that never changes."""

import triton
import triton.language as tl
from torch import Tensor

from kfuse.kernels import launch
from kfuse.kernels.table import BLOCK, num_blocks

THREADS = 256
WIDTH = 1024


@triton.jit
def block_sumsq_kernel(flat, out, numel, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    start = block.to(tl.int64) * BLOCK
    length = tl.minimum(numel - start, BLOCK).to(tl.int32)
    # Split at a multiple of 16 as in `pack`, so that the layout, and with it the order, is the same for every length.
    whole = length // 16 * 16
    index = tl.arange(0, BLOCK)
    value = tl.load(flat + start + index, mask=index < whole, other=0.0).to(tl.float32)
    total = tl.sum(value * value, axis=0)
    if whole < length:
        rest = whole + tl.arange(0, 16)
        last = tl.load(flat + start + rest, mask=rest < length, other=0.0).to(tl.float32)
        total += tl.sum(last * last, axis=0)
    tl.store(out + block, total)


@triton.jit
def sum_partials_kernel(partials, out, numel, WIDTH: tl.constexpr):
    """One program: few values, and one place where the order is decided."""
    index = tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), dtype=tl.float64)
    start = tl.zeros((), dtype=tl.int32)
    while start < numel:
        total += tl.load(partials + start + index, mask=start + index < numel, other=0.0).to(tl.float64)
        start += WIDTH
    tl.store(out, tl.sum(total, axis=0))


def block_sumsq(flat: Tensor, out: Tensor) -> None:
    if flat.numel():
        block_sumsq_kernel[(num_blocks(flat.numel()),)](flat, out, flat.numel(), BLOCK=BLOCK, **launch.options(THREADS))


def sum_partials(partials: Tensor, out: Tensor) -> None:
    sum_partials_kernel[(1,)](partials, out, partials.numel(), WIDTH=WIDTH, **launch.options(THREADS))
