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
def lane_sums(values, LANE: tl.constexpr):
    """Sums of LANE neighbours, which one thread holds; the rest is added over tiles, and over threads at the end."""
    return tl.sum(tl.reshape(values, (values.shape[0] // LANE, LANE)), axis=1)


@triton.jit
def block_sumsq_kernel(flat, out, numel, LANE: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    start = block.to(tl.int64) * BLOCK
    squares = tl.zeros((TILE // LANE,), tl.float32)
    for at in range(0, BLOCK, TILE):
        index = start + at + tl.arange(0, TILE)
        value = tl.load(flat + index, mask=index < numel, other=0.0).to(tl.float32)
        squares += lane_sums(value * value, LANE)
    tl.store(out + block, tl.sum(squares, axis=0))


@triton.jit
def sum_partials_kernel(partials, out, numel, WIDTH: tl.constexpr):
    """One program a row: few values, and one place where the order is decided."""
    row = tl.program_id(0)
    partials += row.to(tl.int64) * numel
    index = tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), dtype=tl.float64)
    start = tl.zeros((), dtype=tl.int32)
    while start < numel:
        total += tl.load(partials + start + index, mask=start + index < numel, other=0.0).to(tl.float64)
        start += WIDTH
    tl.store(out + row, tl.sum(total, axis=0))


def tile_size(itemsize: int) -> int:
    """Elements that one 128-bit access a thread covers."""
    return THREADS * 16 // itemsize


def block_sumsq(flat: Tensor, out: Tensor) -> None:
    if flat.numel() == 0:
        return
    tile = tile_size(flat.element_size())
    block_sumsq_kernel[(num_blocks(flat.numel()),)](
        flat, out, flat.numel(), LANE=tile // THREADS, TILE=tile, BLOCK=BLOCK, **launch.options(THREADS)
    )


def sum_partials(partials: Tensor, out: Tensor) -> None:
    if out.numel():
        sum_partials_kernel[(out.numel(),)](partials, out, partials.shape[-1], WIDTH=WIDTH, **launch.options(THREADS))
