# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment,misc"
"""Triton `reduce`, `block_sumsq` and `sum_partials`: sums in an order that never changes.

The merges of `reduce` are compiled into the kernel, and so is what is measured on the way: an output that is not given
costs nothing.
"""

from collections.abc import Iterator
from itertools import product

import torch
import triton
import triton.language as tl
from torch import Tensor

from kfuse.kernels.launch import BF16, F32, NAMES, Case, Launch, Launches, like_memory
from kfuse.kernels.reduction import (
    BlockSumsqArguments,
    Measures,
    ReduceArguments,
    SumPartialsArguments,
    balanced,
    postfix,
)
from kfuse.kernels.table import BLOCK, num_blocks

THREADS = 256
WIDTH = 1024
"""Partials that `sum_partials` adds at a time."""
PLAIN_TILE = 2048
HELD_ROWS = 8
"""Most contributions that `reduce` holds in registers while it measures them."""


@triton.jit
def lane_sums(values, LANE: tl.constexpr):
    """Sums of LANE neighbours, which one thread holds; the rest is added over tiles, and over threads at the end."""
    return tl.sum(tl.reshape(values, (values.shape[0] // LANE, LANE)), axis=1)


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
def _weighted_square(row, mean, share):
    """share * (g - mean)^2, where the row is g * share."""
    s = tl.load(share)
    difference = row * tl.where(s == 0.0, 0.0, 1.0 / s) - mean
    return s * (difference * difference)


@triton.jit
def _added(sums, k, value, LANE: tl.constexpr):
    """The tuple with `value` added to its k-th sum."""
    return sums[:k] + (sums[k] + lane_sums(value, LANE),) + sums[k + 1 :]  # noqa: RUF005


@triton.jit
def reduce_kernel(
    rows, out,
    sumsq, variance, noise, row_sumsq, row_dot, shares, exp_avg_sq,
    numel, stride, eps,
    PROGRAM: tl.constexpr, COUNT: tl.constexpr, HELD: tl.constexpr, UNROLLED: tl.constexpr,
    LANE: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up one block of the rows, a tile at a time, and measure it. What is not given is not compiled in."""
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
                        spread += _weighted_square(row, mean, shares + k)
                    if row_sumsq is not None:
                        row_squares = _added(row_squares, k, row * row, LANE)
                    if row_dot is not None:
                        row_dots = _added(row_dots, k, row * mean, LANE)
            else:
                for k in range(COUNT):
                    spread += _weighted_square(_again(rows, index, mask, stride, k, HELD), mean, shares + k)
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


@triton.jit
def block_sumsq_kernel(flat, out, numel, LANE: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of squares of one block, a tile at a time."""
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


def reduce(given: ReduceArguments) -> Launches:
    """As `kfuse.kernels.reduce`. What is measured is summed in an order that neither row count nor merges change."""
    measures, numel = given.measures, given.out.numel()
    rows = _aligned(given.rows) if measures.any else given.rows
    count, itemsize = len(rows), rows.element_size()
    if measures.any:
        tile, block = tile_size(itemsize), BLOCK
    else:
        # Fewer elements where many rows would not fit in registers: no bits depend on it.
        halvings = max(0, (count * itemsize - 1).bit_length() - 5)
        tile = block = max(tile_size(itemsize), PLAIN_TILE >> halvings)  # 128 bits of each row at the least
    values = {"rows": rows, "out": given.out, "numel": numel, "stride": rows.stride(0)} | vars(measures)
    values["eps"] = float(measures.eps)
    if not measures.centred:
        values["shares"] = None
    if measures.noise is None:
        values["exp_avg_sq"] = None
    constants = {
        "PROGRAM": postfix(count, given.merges),
        "COUNT": count,
        "HELD": count <= HELD_ROWS,
        "UNROLLED": count <= HELD_ROWS or measures.of_rows,
        "LANE": tile_size(itemsize) // THREADS,
        "TILE": tile,
        "BLOCK": block,
    }
    grid = (triton.cdiv(numel, block),)
    yield Launch(reduce_kernel, grid, values, constants, THREADS, _registers(count, itemsize, measures))


def tile_size(itemsize: int) -> int:
    """Elements that one 128-bit access a thread covers."""
    return THREADS * 16 // itemsize


def _registers(count: int, itemsize: int, measures: Measures) -> int:
    """Registers a thread may have: the sums, or the addresses, of many rows need more than other kernels."""
    if measures.of_rows and count * 16 // itemsize > 32:
        return 168
    return 255 if count > (16 if measures.any else 32) else 128


def _aligned(rows: Tensor) -> Tensor:
    """The rows, 16-byte aligned. Others, which are rare, are copied: another layout would add in another order."""
    if rows.stride(0) % 16 == 0 and rows.data_ptr() % 16 == 0:
        return rows
    count, numel = rows.shape
    copies = torch.empty(count, triton.cdiv(numel, 16) * 16, dtype=rows.dtype, device=rows.device)
    return copies[:, :numel].copy_(rows)


def block_sumsq(given: BlockSumsqArguments) -> Launches:
    """As `kfuse.kernels.block_sumsq`, a program a block."""
    numel, tile = given.flat.numel(), tile_size(given.flat.element_size())
    constants = {"LANE": tile // THREADS, "TILE": tile, "BLOCK": BLOCK}
    yield Launch(block_sumsq_kernel, (num_blocks(numel),), vars(given) | {"numel": numel}, constants, THREADS)


def sum_partials(given: SumPartialsArguments) -> Launches:
    """As `kfuse.kernels.sum_partials`, a program a row."""
    values = vars(given) | {"numel": given.partials.shape[-1]}
    yield Launch(sum_partials_kernel, (given.out.numel(),), values, {"WIDTH": WIDTH}, THREADS)


def cases() -> Iterator[Case]:
    """The types, row counts and measures that training uses."""
    for dtype in (F32, BF16):
        (launch,) = block_sumsq(BlockSumsqArguments(like_memory(BLOCK, dtype=dtype), like_memory(1)))
        yield Case(f"block_sumsq {NAMES[dtype]}", launch, BLOCK, (dtype,), everywhere=dtype == F32)
    (launch,) = sum_partials(SumPartialsArguments(like_memory(16), like_memory(dtype=torch.float64)))
    yield Case("sum_partials", launch, everywhere=True)

    dtypes = [(F32, F32), (BF16, BF16), (BF16, F32)]
    for count, (of_rows, of_out) in [*product((2, 8, 16), dtypes), (32, dtypes[0]), (64, dtypes[0])]:
        yield _reduce_case("", count, of_rows, of_out, Measures(), everywhere=count == 8 and of_out == F32)

    one = like_memory(1)
    norm = Measures(sumsq=one)
    variance = Measures(sumsq=one, variance=one, shares=one)
    cosines = Measures(sumsq=one, row_sumsq=one, row_dot=one)
    everything = Measures(one, one, one, one, one, one, one)
    yield _reduce_case(" cosines", 8, F32, F32, cosines)
    yield _reduce_case(" variance", 32, F32, F32, variance)
    for what, measures in ((" norm", norm), (" variance", variance), (" everything", everything)):
        yield _reduce_case(what, 8, F32, F32, measures, everywhere=measures is everything)
        yield _reduce_case(what, 8, BF16, F32, measures)
        yield _reduce_case(what, 16 if measures is everything else 2, F32, F32, measures)
    yield _reduce_case(" variance", 16, F32, F32, variance)


def _reduce_case(
    what: str, count: int, of_rows: torch.dtype, of_out: torch.dtype, measures: Measures, *, everywhere: bool = False
) -> Case:
    rows, out = like_memory(count, BLOCK, dtype=of_rows), like_memory(BLOCK, dtype=of_out)
    (launch,) = reduce(ReduceArguments(rows, balanced(count), out, measures=measures))
    again = count > HELD_ROWS and (measures.of_rows or measures.centred)
    return Case(
        f"reduce {count} rows {NAMES[of_rows]}->{NAMES[of_out]}{what}",
        launch,
        launch.constants["TILE"],
        (of_rows,) * count + (F32,) * (measures.noise is not None),
        (of_out,),
        cached=(of_rows,) * ((count if measures.of_rows else 1) * again),
        everywhere=everywhere,
    )
