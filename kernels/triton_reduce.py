# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment,misc,var-annotated"
"""Triton `reduce`, `block_sumsq` and `sum_partials`: sums in an order that never changes.

`reduce` reads the order of its merges from a table. Another batch size or number of workers, which is another order,
needs no other binary: nothing is compiled in mid-step. Where it measures, the merges are compiled into the kernel,
since the rows stay in registers. So is what is measured: an output that is not given costs nothing.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kfuse.kernels.launch import BF16, F32, NAMES, Case, Launch, Launches, like_memory
from kfuse.kernels.reduction import (
    ADD,
    BlockSumsqArguments,
    Measures,
    Merges,
    ReduceArguments,
    SumPartialsArguments,
    balanced,
    postfix,
)
from kfuse.kernels.table import BLOCK, num_blocks, upload

THREADS = 256
WIDTH = 1024
"""Partials that `sum_partials` adds at a time."""
AHEAD = 4
"""Rows that `sum_rows_kernel` loads before it adds any of them."""
DEPTH = 8
"""Unfinished sums that `sum_rows_kernel` has registers for: enough for the tree over 2**DEPTH micro-batches."""
HELD_ROWS = 8
"""Most contributions that `reduce` holds in registers while it measures them."""


@triton.jit
def lane_sums(values, LANE: tl.constexpr):
    """Sums of LANE neighbours, which one thread holds; the rest is added over tiles, and over threads at the end."""
    return tl.sum(tl.reshape(values, (values.shape[0] // LANE, LANE)), axis=1)


@triton.jit
def placed(stack, value, low, high, DEPTH: tl.constexpr):
    """The stack after one line of `adding_program`: positions high - 1 down to `low` are added to the value.

    A register cannot be chosen by a number that is known at run time only. So each position of the stack is tried.
    """
    total = value
    for position in tl.static_range(DEPTH - 1, -1, -1):
        if (low <= position) & (position < high):
            total = stack[position] + total
    for position in tl.static_range(DEPTH):
        if low == position:
            stack = stack[:position] + (total,) + stack[position + 1 :]  # noqa: RUF005
    return stack


@triton.jit(do_not_specialize=["count"])
def sum_rows_kernel(
    rows, out, program,
    count, numel, stride,
    AHEAD: tl.constexpr, DEPTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add up one tile of the rows in the order of `program` (see `adding_program`), which is data."""
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = index < numel
    stride = tl.zeros((), tl.int64) + stride
    stack = (tl.zeros((TILE,), tl.float32),) * DEPTH
    for at in range(0, count, AHEAD):
        values = ()  # unpacking is not in Triton's language
        for k in tl.static_range(AHEAD):
            row = tl.load(program + (at + k) * 4)
            value = tl.load(rows + row * stride + index, mask=mask & (row >= 0), other=0.0)
            values = values + (value.to(tl.float32),)  # noqa: RUF005
        for k in tl.static_range(AHEAD):
            low, high = tl.load(program + (at + k) * 4 + 1), tl.load(program + (at + k) * 4 + 2)
            stack = placed(stack, values[k], low, high, DEPTH)
    tl.store(out + index, stack[0].to(out.dtype.element_ty), mask=mask)


@triton.jit
def merged(rows, index, mask, stride, PROGRAM: tl.constexpr):
    """The rows' elements at `index`, added in fp32 in the order of PROGRAM."""
    stack = ()
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


@triton.jit(do_not_specialize_on_alignment=["out"])
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


@triton.jit(do_not_specialize_on_alignment=["out"])
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
    if not measures.any:
        yield _plain_reduce(given)
        return
    rows = _aligned(_as_matrix(given.rows))
    count, itemsize = len(rows), rows.element_size()
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
        "TILE": tile_size(itemsize),
        "BLOCK": BLOCK,
    }
    yield Launch(reduce_kernel, (num_blocks(numel),), values, constants, THREADS, _registers(count, itemsize, measures))


def _plain_reduce(given: ReduceArguments) -> Launch:
    """Without measures: no bits depend on the tile."""
    rows, numel = _as_matrix(given.rows), given.out.numel()
    on_gpu = rows.device.type == "cuda"
    stream = torch.cuda.current_stream(rows.device).cuda_stream if on_gpu else 0
    program, depth = _uploaded_program(len(rows), given.merges, rows.device, stream)
    values = vars(given) | {"rows": rows, "program": program, "count": len(program), "numel": numel}
    values["stride"] = rows.stride(0)
    tile = tile_size(rows.element_size())
    constants = {"AHEAD": AHEAD, "DEPTH": max(DEPTH, triton.next_power_of_2(depth)), "TILE": tile}
    # Other workers have other shards of the bucket: one may end between multiples of 16 elements.
    later = tuple({"numel": length, "stride": length} for length in (tile, tile - 1))
    return Launch(sum_rows_kernel, (triton.cdiv(numel, tile),), values, constants, THREADS, 128, later)


@lru_cache(maxsize=256)
def _uploaded_program(count: int, merges: Merges, device: torch.device, stream: int) -> tuple[Tensor, int]:
    """`adding_program` on the device, and the stack's depth. A stream uses what was copied there on the same stream."""
    program = adding_program(count, merges)
    return upload(torch.tensor(program, dtype=torch.int32), device), stack_depth(program)


def adding_program(count: int, merges: Merges) -> list[tuple[int, int, int, int]]:
    """The merges of `count` rows as lines (row, low, high, 0), a multiple of AHEAD of them.

    The row's value is added to the stack's values at positions high - 1 down to low, one after another, and stays at
    position low. A row of -1 is none. The last sum is at position 0.
    """
    lines: list[tuple[int, int, int, int]] = []
    size = 0
    for item in postfix(count, merges):
        if item == ADD:
            row, low, high, _ = lines[-1]
            lines[-1], size = (row, low - 1, high, 0), size - 1
        else:
            lines.append((item, size, size, 0))
            size += 1
    none = (-1, -1, -1, 0)
    return lines + [none] * (-len(lines) % AHEAD)


def stack_depth(program: list[tuple[int, int, int, int]]) -> int:
    """Unfinished sums that an `adding_program` has at a time, at most."""
    return 1 + max(low for row, low, *_ in program if row >= 0)


def tile_size(itemsize: int) -> int:
    """Elements that one 128-bit access a thread covers."""
    return THREADS * 16 // itemsize


def _registers(count: int, itemsize: int, measures: Measures) -> int:
    """Registers a thread may have: the sums, or the addresses, of many rows need more than other kernels."""
    if measures.of_rows and count * 16 // itemsize > 32:
        return 168
    return 255 if count > 16 else 128


def _as_matrix(rows: Tensor | Sequence[Tensor]) -> Tensor:
    """[K, n]. Several tensors, which only the interpreter gets, are copied."""
    return rows if isinstance(rows, Tensor) else torch.stack(list(rows))


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

    for of_rows, of_out in ((F32, F32), (BF16, BF16), (BF16, F32)):
        yield _reduce_case("", AHEAD, of_rows, of_out, Measures(), everywhere=of_out == F32)

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
    rows_a_turn = f"{count} rows" if measures.any else f"any rows, {AHEAD} a turn,"
    return Case(
        f"reduce {rows_a_turn} {NAMES[of_rows]}->{NAMES[of_out]}{what}",
        launch,
        launch.constants["TILE"],
        (of_rows,) * count + (F32,) * (measures.noise is not None),
        (of_out,),
        cached=(of_rows,) * ((count if measures.of_rows else 1) * again),
        everywhere=everywhere,
    )
