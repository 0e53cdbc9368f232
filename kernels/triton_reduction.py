# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment"
"""Triton `pack`, `reduce`, `block_sumsq` and `sum_partials`: sums in an order that never changes.

`reduce` reads the order of its merges from a table. Another batch size or number of workers, which is another order,
needs no binary but the two that are compiled at its first launch: nothing is compiled in mid-step. The table may give
the rows' addresses too, in other GPUs' memory: they are read over the links between the GPUs.
"""

import functools
from operator import attrgetter, or_
from types import NoneType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kfuse.kernels.dispatch import Launch, Launches
from kfuse.kernels.private_names import need
from kfuse.kernels.reduction import (
    ADD,
    BlockSumsqArguments,
    Merges,
    PackArguments,
    ReduceArguments,
    SumPartialsArguments,
    postfix,
)
from kfuse.kernels.table import BLOCK, CHUNK, num_blocks, upload
from kfuse.kernels.triton_wire import GROUP, in_groups, magnitude, rounded, scale_of, scale_place, value_place

need("triton.runtime.JITFunction.run triton.runtime.driver" + ".active.get_current_stream" * torch.cuda.is_available())

THREADS = 256
WIDTH = 1024  # partials that `sum_partials` adds at a time
# On an H200 two rows ahead and four sums reach a copy's speed for 2 to 8 rows; four and eight half of it for 2 rows.
AHEAD = 2  # rows that `sum_rows_kernel` loads before it adds any of them
DEPTH = 4  # unfinished sums that `sum_rows_kernel` has registers for: enough for the tree over 31 micro-batches
DEEPER = 8  # of the second binary: up to 511 micro-batches


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


@triton.jit
def sum_of_rows(
    matrix, scales, program, count, stride, index, group, mask, AHEAD: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    """The sum of the rows' elements at `index`, added in fp32 as the lines of `program` say (see `adding_program`).

    Lines name rows of the matrix; without one they have the addresses of fp32 rows, 0 for none. scales: None, or the
    rows are messages of eight bits, and these are the same memory as fp32. group: the first of each group at `index`.
    """
    stack = (tl.zeros((index.shape[0],), tl.float32),) * DEPTH
    for at in range(0, count, AHEAD):
        values = ()  # unpacking is not in Triton's language
        for k in tl.static_range(AHEAD):
            row = tl.load(program + (at + k) * 4)
            # Not `mask & (row != 0)`, which is a mask of integers in the interpreter: Triton 3.9 refuses it there.
            if matrix is None:
                # The compiler cannot see through the table that addresses are aligned; `reduce` has made sure.
                place = tl.multiple_of(row.to(tl.pointer_type(tl.float32)), 16)
                value = tl.load(place + index, mask=tl.where(row != 0, mask, False), other=0.0)
            else:
                readable = tl.where(row >= 0, mask, False)
                if scales is None:
                    value = tl.load(matrix + row * stride + index, mask=readable, other=0.0).to(tl.float32)
                else:
                    start = tl.where(row >= 0, row, 0) * stride
                    value = tl.load(matrix + start + value_place(index), mask=readable, other=0).to(tl.float32)
                    scale = tl.load(scales + start // 4 + scale_place(group))
                    value = tl.reshape(in_groups(value) * scale[:, None], value.shape)
            values = values + (value,)  # noqa: RUF005
        for k in tl.static_range(AHEAD):
            low = tl.load(program + (at + k) * 4 + 1).to(tl.int32)
            high = tl.load(program + (at + k) * 4 + 2).to(tl.int32)
            stack = placed(stack, values[k], low, high, DEPTH)
    return stack[0]


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["sumsq"])
def sum_rows_kernel(
    matrix, scales, out, sumsq, wire, wire_scales, program,
    count, numel, stride,
    AHEAD: tl.constexpr, DEPTH: tl.constexpr, LANE: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of the sum, a tile at a time; its squares are added in the order of `block_sumsq`."""
    tl.assume(count > 0)  # no second copy of the loop that writes zeros
    block = tl.program_id(0)
    stride = tl.zeros((), tl.int64) + stride
    squares = tl.zeros((TILE // LANE,), tl.float32)
    for at in range(0, BLOCK, TILE):
        index = block.to(tl.int64) * BLOCK + at + tl.arange(0, TILE)
        mask = index < numel
        group = block.to(tl.int64) * BLOCK + at + tl.arange(0, TILE // GROUP) * GROUP
        total = sum_of_rows(matrix, scales, program, count, stride, index, group, mask, AHEAD, DEPTH)
        stored = total.to(out.dtype.element_ty)
        if sumsq is not None:
            mean = stored.to(tl.float32)
            squares += lane_sums(mean * mean, LANE)
        tl.store(out + index, stored, mask=mask)
        if wire is not None:
            groups = in_groups(total)
            scale, inverse = scale_of(tl.max(magnitude(groups), axis=1))
            tl.store(wire + value_place(index), tl.reshape(rounded(groups, inverse[:, None]), total.shape), mask=mask)
            tl.store(wire_scales + scale_place(group), scale, mask=group < numel)
    if sumsq is not None:
        tl.store(sumsq + block, tl.sum(squares, axis=0))


@triton.jit(do_not_specialize_on_alignment=["out"])
def block_sumsq_kernel(flat, out, visible, numel, LANE: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of squares of one block, a tile at a time; and its rounded values."""
    block = tl.program_id(0)
    start = block.to(tl.int64) * BLOCK
    squares = tl.zeros((TILE // LANE,), tl.float32)
    for at in range(0, BLOCK, TILE):
        index = start + at + tl.arange(0, TILE)
        value = tl.load(flat + index, mask=index < numel, other=0.0).to(tl.float32)
        squares += lane_sums(value * value, LANE)
        if visible is not None:
            tl.store(visible + index, value.to(visible.dtype.element_ty), mask=index < numel)
    tl.store(out + block, tl.sum(squares, axis=0))


@triton.jit(do_not_specialize_on_alignment=["out"])
def sum_partials_kernel(partials, out, numel, WIDTH: tl.constexpr):
    """One program: few values, and one place where the order is decided."""
    index = tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), dtype=tl.float64)
    start = tl.zeros((), dtype=tl.int32)
    while start < numel:
        total += tl.load(partials + start + index, mask=start + index < numel, other=0.0).to(tl.float64)
        start += WIDTH
    tl.store(out, tl.sum(total, axis=0))


def reduce(given: ReduceArguments) -> Launches:
    """As `kfuse.kernels.reduce`. Squares are summed in an order that neither row count nor merges change.

    Without them a program adds up one tile of a matrix, and no bits depend on the tile; else one block.
    """
    rows, (device, numel) = given.rows, (given.out.device, given.out.numel())
    tile = tile_size(4 if given.of_messages else rows[0].element_size())
    # Other workers have other shards of the bucket: one may end between multiples of 16 elements.
    later: list[dict[str, Any]] = [{"numel": tile}, {"numel": tile - 1}]
    matrix, scales, block = None, None, BLOCK
    if not isinstance(rows, Tensor) and all(map(_readable, rows)):
        places = tuple(row.data_ptr() for row in rows)
    else:
        matrix, places = rows if isinstance(rows, Tensor) else torch.stack(list(rows)), tuple(range(len(rows)))
        if given.of_messages:
            matrix = matrix if matrix.data_ptr() % 16 == 0 else matrix.clone()
            scales = matrix.view(torch.float32)
        elif given.sumsq is None and given.wire is None:
            block, later = tile, [each | {"stride": each["numel"]} for each in later]
        else:
            matrix = _aligned(matrix)
    program, depth = _uploaded_program(places, given.merges, matrix is None, device, _stream(device))
    depth = max(DEPTH, triton.next_power_of_2(depth))
    other = DEPTH if depth > DEPTH else DEEPER  # a job that grows or shrinks has more rows, or fewer
    later += [each | {"DEPTH": other} for each in ({}, *later)]
    values = vars(given) | {"matrix": matrix, "program": program, "count": len(program), "numel": numel}
    values |= {"stride": 0 if matrix is None else matrix.stride(0), "scales": scales}
    values["wire_scales"] = None if given.wire is None else given.wire.view(torch.float32)
    constants = {"AHEAD": AHEAD, "DEPTH": depth, "LANE": tile // THREADS, "TILE": tile, "BLOCK": block}
    yield Launch(sum_rows_kernel, (triton.cdiv(numel, block),), values, constants, later=tuple(later))


def _stream(device: torch.device) -> int:
    """The current stream's handle, as Triton's launches ask for it: torch would make a Stream of it. 0 on a CPU."""
    return triton.runtime.driver.active.get_current_stream(device.index) if device.type == "cuda" else 0


def _readable(row: Tensor) -> bool:
    """Whether the kernel reads the row by its address."""
    return row.dtype == torch.float32 and row.is_contiguous() and row.data_ptr() % 16 == 0


@functools.lru_cache(maxsize=1024)
def _uploaded_program(
    rows: tuple[int, ...], merges: Merges, by_address: bool, device: torch.device, stream: int
) -> tuple[Tensor, int]:
    """`adding_program` on the device, with these numbers of the rows, and the stack's depth.

    A stream uses what was copied there on the same stream.
    """
    program = adding_program(len(rows), merges)
    none, dtype = (0, torch.int64) if by_address else (-1, torch.int32)
    lines = [(rows[row] if row >= 0 else none, low, high, 0) for row, low, high, _ in program]
    depth = 1 + max(low for row, low, *_ in program if row >= 0)
    return upload(torch.tensor(lines, dtype=dtype), device), depth


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


def tile_size(itemsize: int) -> int:
    """Elements that one 128-bit access a thread covers."""
    return THREADS * 16 // itemsize


def _aligned(rows: Tensor) -> Tensor:
    """The rows, 16-byte aligned. Others, which are rare, are copied: another layout would add in another order."""
    if rows.stride(0) % 16 == 0 and rows.data_ptr() % 16 == 0:
        return rows
    count, numel = rows.shape
    copies = torch.empty(count, triton.cdiv(numel, 16) * 16, dtype=rows.dtype, device=rows.device)
    return copies[:, :numel].copy_(rows)


def block_sumsq(given: BlockSumsqArguments) -> Launches:
    numel, tile = given.flat.numel(), tile_size(given.flat.element_size())
    constants = {"LANE": tile // THREADS, "TILE": tile, "BLOCK": BLOCK}
    values = vars(given) | {"numel": numel}
    yield Launch(block_sumsq_kernel, (num_blocks(numel),), values, constants, varying=lambda given: {})


def sum_partials(given: SumPartialsArguments) -> Launches:
    values = vars(given) | {"numel": given.partials.numel()}
    yield Launch(sum_partials_kernel, (1,), values, {"WIDTH": WIDTH}, varying=lambda given: {})


# -- pack -------------------------------------------------------------------------------------------------------------

_TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_DTYPE = attrgetter("dtype")


@triton.jit
def _pack_span(source, target, index, read, mask, scale, ACCUMULATE: tl.constexpr):
    raw = tl.load(source + index, mask=read, other=0.0).to(tl.float32)
    value = (raw * scale).to(target.dtype.element_ty)  # a scale of 1 changes no bits
    if ACCUMULATE:
        old = tl.load(target + index, mask=mask, other=0.0)
        value = (old.to(tl.float32) + value.to(tl.float32)).to(target.dtype.element_ty)
    tl.store(target + index, value, mask=read if ACCUMULATE else mask)
    stored = value.to(tl.float32)
    return stored, tl.sum(raw * raw, axis=0), tl.sum(stored * stored, axis=0)


@triton.jit
def _send_span(wire, offset, index, values, scale, inverse, mask):
    """Writes values to the message, and returns what rounding adds to their squares."""
    sent = rounded(values, inverse)
    tl.store(wire + value_place(offset + index), tl.reshape(sent, index.shape), mask=mask)
    read = sent.to(tl.float32) * scale
    return (read - values) * (read + values)


@triton.jit(do_not_specialize_on_alignment=["sumsq", "stored", "added"])
def pack_kernel(
    pointers, chunks, flat, sumsq, stored, wire, wire_scales, added, scale,
    GRAD: tl.constexpr, OFFSET_ALIGNMENT: tl.constexpr, ACCUMULATE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Pack one chunk. The chunk table says which tensor it is of, and the pointer table where that tensor lies."""
    chunk = tl.program_id(0)
    row = chunks + chunk.to(tl.int64) * 4
    address = tl.load(pointers + tl.load(row))
    start = tl.multiple_of(tl.load(row + 1), CHUNK)
    length = tl.load(row + 2).to(tl.int32)
    offset = tl.multiple_of(tl.load(row + 3), OFFSET_ALIGNMENT)
    # The compiler cannot see through the table that addresses are aligned; the launcher has made sure.
    source = tl.multiple_of(address.to(tl.pointer_type(GRAD)), 16) + start
    target = flat + offset
    readable = tl.where(address == 0, 0, length)

    # A mask that changes only at multiples of 16 elements keeps 128-bit accesses; the few elements after it go apart.
    whole = length // 16 * 16
    index = tl.arange(0, CHUNK)
    read = index < readable // 16 * 16
    values, total, total_stored = _pack_span(source, target, index, read, index < whole, scale, ACCUMULATE)
    rest, ragged = whole + tl.arange(0, 16), tl.zeros((16,), tl.float32)
    if whole < length:
        ragged, squares, of_stored = _pack_span(source, target, rest, rest < readable, rest < length, scale, ACCUMULATE)
        total, total_stored = total + squares, total_stored + of_stored
    if sumsq is not None:  # else nothing uses the sums, and the compiler leaves them out
        tl.store(sumsq + chunk, total)
    if stored is not None:
        tl.store(stored + chunk, total_stored)
    if wire is not None:
        groups, group = in_groups(values), tl.arange(0, CHUNK // GROUP)
        is_ragged = group == whole // GROUP
        most = tl.max(magnitude(groups), axis=1)
        most = tl.where(is_ragged, tl.maximum(most, tl.max(magnitude(ragged), axis=0)), most)
        factor, inverse = scale_of(most)
        tl.store(wire_scales + scale_place(offset + group * GROUP), factor, mask=group * GROUP < length)
        more = _send_span(wire, offset, index, groups, factor[:, None], inverse[:, None], index < whole)
        total_added = tl.sum(tl.sum(more, axis=1), axis=0)
        if whole < length:
            of_ragged = scale_of(tl.max(tl.where(is_ragged, most, 0), axis=0))
            of_rest = _send_span(wire, offset, rest, ragged, of_ragged[0], of_ragged[1], rest < length)
            total_added += tl.sum(of_rest, axis=0)
        tl.store(added + chunk, total_added)


def pack(given: PackArguments) -> Launches:
    table = given.table
    dtypes = {grad.dtype for grad in given.grads if grad is not None}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    sources = [None if grad is None else _loadable(grad, dtype) for grad in given.grads]  # kept until the launch
    addresses = tuple(0 if grad is None else grad.data_ptr() for grad in sources)
    pointers = table.pointers(addresses, _stream(table.device))
    constants = {
        "GRAD": _TRITON_DTYPES[dtype],
        "OFFSET_ALIGNMENT": table.offset_alignment,
        "ACCUMULATE": given.accumulate,
        "CHUNK": CHUNK,
    }
    values = vars(given) | {"pointers": pointers, "chunks": table.chunks, "scale": float(given.scale)}
    values["wire_scales"] = None if given.wire is None else given.wire.view(torch.float32)
    # A step of more micro-batches accumulates where the steps before it did not, and its last one makes the message.
    later: tuple[dict[str, Any], ...] = ({"ACCUMULATE": not given.accumulate},)
    if given.wire is not None:
        none = {"wire": None, "wire_scales": None, "added": None}
        later += (none, none | later[0])
    yield Launch(pack_kernel, (table.num_chunks,), values, constants, later=later, varying=_varying_of_pack)


def _varying_of_pack(given: PackArguments) -> dict[str, Any] | None:
    """None where a gradient is absent, or would be copied."""
    grads, table = list[Any](given.grads), given.table
    if NoneType in map(type, grads) or not all(map(Tensor.is_contiguous, grads)):
        return None
    dtypes, addresses = {*map(_DTYPE, grads)}, tuple(map(Tensor.data_ptr, grads))
    if len(dtypes) > 1 or functools.reduce(or_, addresses) % 16:
        return None
    pointers = table.pointers(addresses, _stream(table.device))
    grad = _TRITON_DTYPES[dtypes.pop()]
    varying = {"pointers": pointers, "stored": given.stored, "scale": float(given.scale)}
    return varying | {"GRAD": grad, "ACCUMULATE": given.accumulate}


def _loadable(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient as the kernel reads it: one dtype for the launch, contiguous, 16-byte aligned.

    A gradient that is not so, which is rare, is copied. A second kernel for it would sum squares in another order, and
    bits would depend on where the allocator happened to put a tensor.
    """
    if grad.dtype != dtype or not grad.is_contiguous():
        grad = grad.to(dtype).contiguous()
    return grad if grad.data_ptr() % 16 == 0 else grad.clone()
