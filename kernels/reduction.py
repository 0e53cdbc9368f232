"""`pack`, `reduce`, `block_sumsq` and `sum_partials`: a bucket's gradients are laid side by side, added up and
measured, in an order that never changes. Arguments, and PyTorch implementations.

Every sum here has an order fixed by the data's shape, whatever the number of threads or the memory alignment. That is
why squares are summed with `vector_norm` over short rows and not with `torch.dot`, whose bits depend on both.

Where intermediate values need memory, a piece of the data is worked on at a time, so that they stay in the cache. A
piece is a whole number of chunks and blocks: its size changes no bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate as running_sums
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from kfuse.kernels.dispatch import DTYPES, Kernel, require
from kfuse.kernels.table import BLOCK, CHUNK, PackTable, num_blocks
from kfuse.kernels.wire import GROUP, in_wire, read_by_torch, round_by_torch, wire_numel

Merges = tuple[tuple[int, int], ...]  # additions of rows, in order: row[destination] += row[source]

ADD = -1  # the operator in a postfix expression of row numbers

# Elements, 2 MiB of fp32. Smaller pieces fit a second-level cache and are slower all the same: each operation has a
# fixed cost of a few microseconds, and below 2**15 elements torch uses one thread.
PIECE = 2**19

REDUCE_PIECE = 64 * BLOCK  # elements of each row that are added up, and measured, at a time: 1 MiB of fp32

# Elements that torch adds up in one thread, in an order of their number. It shares out work from twice as many on.
ONE_THREAD = 2**14


@cache
def postfix(count: int, merges: Merges) -> tuple[int, ...]:
    """What the merges leave in row 0, as a postfix expression: row numbers, and ADD for the two values before it.

    In this order few sums are unfinished at a time. Raises ValueError where a merge does not name two rows of `count`.
    """
    rows: list[tuple[int, ...]] = [(row,) for row in range(count)]
    for dst, src in merges:
        if not (0 <= dst < count and 0 <= src < count and dst != src):
            raise ValueError(f"merge ({dst}, {src}) must name two different rows of {count}")
        rows[dst] = (*rows[dst], *rows[src], ADD)
    return rows[0]


def balanced(count: int) -> Merges:
    """The merges of the binary tree over `count` rows."""
    steps = [1 << level for level in range(count.bit_length()) if 1 << level < count]
    return tuple((dst, dst + step) for step in steps for dst in range(0, count - step, 2 * step))


@dataclass(frozen=True)
class ReduceArguments:
    """Add contributions in a given order: `x[dst] = x[dst] + x[src]` for each merge, then `out = x[0]`.

    Every addition is rounded once, to fp32, in exactly that order: the bits are those of the merges alone.

    Args:
        rows: [K, n] contributions, fp32, bf16 or fp16 (added in fp32), each row contiguous. They may be overwritten.
            On a CPU also float64, added in float64, with `out` in float64.
            Or int8 [K, wire_numel(n)], messages as `kfuse.kernels.wire` has them, with `out` in fp32.
            Or K tensors [n] of one dtype, which stay as they are. On a GPU fp32 ones that are 16-byte aligned are read
            where they lie, be it in another GPU's memory that this device can read; others are copied first.
        merges: pairs (dst, src) of different row numbers.
        out: [n], contiguous, fp32, bf16 or fp16; may be one of the rows: of several tensors any, of [K, n] the first.
        sumsq: fp32 [num_blocks(n)]: the squares of `out` as it is stored, summed in the same pass, one sum per BLOCK.
            With fp32 rows its bits are those of `block_sumsq(out)`. None: not measured.
        wire: int8 [wire_numel(n)], receives `out`, fp32, as a message of eight bits; may be one of the rows. Or None.

    Raises ValueError when a merge names no row, or adds a row to itself, or shapes, dtypes or devices differ.
    """

    rows: Tensor | Sequence[Tensor]
    merges: Merges
    out: Tensor
    sumsq: Tensor | None = None
    wire: Tensor | None = None

    def __post_init__(self) -> None:
        rows, out = self.rows, self.out
        length = wire_numel(out.numel()) if self.of_messages else out.numel()
        if (
            out.dim() != 1
            or {(*row.shape, row.device) for row in rows} != {(length, out.device)}
            or len({row.dtype for row in rows}) > 1
            or ((self.of_messages or self.wire is not None) and (out.dtype != torch.float32 or out.numel() % GROUP))
        ):
            shapes = [f"{row.dtype} {list(row.shape)} on {row.device}" for row in rows]
            wanted = f"{list(out.shape)} on {out.device}, or messages of an fp32 one"
            raise ValueError(f"reduce: rows must be K >= 1, of one dtype, like out {wanted}, got {shapes}")
        postfix(len(rows), self.merges)
        require("reduce: sumsq", self.sumsq, (num_blocks(out.numel()),), torch.float32)
        require("reduce: wire", self.wire, (wire_numel(out.numel()),), torch.int8)

    @property
    def of_messages(self) -> bool:
        """Whether the rows are messages of eight bits."""
        return any(row.dtype == torch.int8 for row in self.rows)


@dataclass(frozen=True)
class BlockSumsqArguments:
    """`out[b]` = sum of squares of `flat[b * BLOCK : (b + 1) * BLOCK]`, in fp32.

    A block's bits depend on the block alone: a shard that starts at a multiple of BLOCK yields its part of the whole
    buffer's partials.

    Args:
        flat: 1-D, contiguous, fp32, bf16 or fp16; on a GPU its address is a multiple of 16 bytes.
        out: fp32 [num_blocks(flat.numel())].
        visible: bf16 or fp16, as long as `flat`, whose rounded values it gets in the same pass. Or None.

    Raises ValueError when `out` or `visible` does not fit.
    """

    flat: Tensor
    out: Tensor
    visible: Tensor | None = None

    def __post_init__(self) -> None:
        require("block_sumsq: out", self.out, (num_blocks(self.flat.numel()),), torch.float32)
        require("block_sumsq: visible", self.visible, self.flat.shape, *DTYPES[1:])

    @cached_property
    def rows(self) -> list[Rows]:
        return rows_of(self.flat, BLOCK, self.out)


@dataclass(frozen=True)
class SumPartialsArguments:
    """Sum fp32 or fp64 `partials` [b] into `out` (0-dim float64), in fp64 and in an order fixed by b alone.

    Raises ValueError when the shapes do not fit or are not contiguous.
    """

    partials: Tensor
    out: Tensor

    def __post_init__(self) -> None:
        require("sum_partials: partials", self.partials, (self.partials.numel(),), torch.float32, torch.float64)
        require("sum_partials: out", self.out, (), torch.float64)


def reduce_by_torch(given: ReduceArguments) -> None:
    rows, merges, out, sumsq, wire = given.rows, given.merges, given.out, given.sumsq, given.wire
    if sumsq is None and wire is None:
        _add_rows(list(rows), merges, out)
        return
    for at in range(0, out.numel(), REDUCE_PIECE):  # what has just been added is measured while it is in the cache
        elements = slice(at, min(at + REDUCE_PIECE, out.numel()))
        read = in_wire(elements) if given.of_messages else elements
        _add_rows([row[read] for row in rows], merges, out[elements])
        if sumsq is not None:
            block_sumsq(out[elements], sumsq[at // BLOCK : num_blocks(elements.stop)])
        if wire is not None:
            round_by_torch(out[elements], wire[in_wire(elements)])


def _add_rows(rows: Sequence[Tensor], merges: Merges, out: Tensor) -> None:
    """Adds up the rows in the order of `merges` and writes the sum. `out` may be one of the rows; the others stay.

    So only the last addition writes there.
    """
    if tuple(merges) == ((0, 1),) and all(row.dtype == out.dtype == torch.float32 for row in rows):
        torch.add(rows[0], rows[1], out=out)
        return
    program = postfix(len(rows), merges)
    additions, dtype = program.count(ADD), rows[0].dtype
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    depth = max(running_sums(-1 if item == ADD else 1 for item in program))
    one_pass = additions <= 1 and dtype == out.dtype == kind
    piece = max(1, out.numel()) if one_pass else REDUCE_PIECE
    scratch = torch.empty(depth, 0 if one_pass else min(piece, out.numel()), dtype=kind, device=out.device)
    of_rows = wire_numel(piece) if dtype == torch.int8 else piece
    for target, *parts in zip(torch.split(out, piece), *(torch.split(row, of_rows) for row in rows), strict=True):
        slots = list(scratch[:, : target.numel()].unbind(0))  # for the sum at each place of the stack
        stack: list[Tensor] = []
        left = additions
        for item in program:
            if item == ADD:
                left -= 1
                right = stack.pop()
                sum_at = target if left == 0 and out.dtype == kind else slots[len(stack) - 1]
                stack[-1] = torch.add(stack[-1], right, out=sum_at)
            else:
                part = parts[item]
                stack.append(part if dtype == kind else slots[len(stack)])
                if dtype == torch.int8:
                    read_by_torch(part, stack[-1])
                elif dtype != kind:
                    stack[-1].copy_(part)
        if stack[0] is not target:
            target.copy_(stack[0])


def block_sumsq_by_torch(given: BlockSumsqArguments) -> None:
    flat, out = given.flat, given.out
    if flat.dtype == torch.float32:
        norms_of_rows(given.rows)
    else:
        for values, norms in zip(torch.split(flat, PIECE), torch.split(out, num_blocks(PIECE)), strict=True):
            row_norms(values.float(), BLOCK, norms)
    out.square_()
    if given.visible is not None:
        given.visible.copy_(flat)


Rows = tuple[Tensor, int, Tensor]  # values, along which dimension their norms are taken, and where they are written


def row_norms(values: Tensor, width: int, out: Tensor | None) -> None:
    """Write the 2-norm of each `width` elements of `values` (1-D, fp32), and of the rest, to `out`, if it is given."""
    if out is not None:
        norms_of_rows(rows_of(values, width, out))


def rows_of(values: Tensor, width: int, out: Tensor) -> list[Rows]:
    whole = values.numel() // width * width
    if whole == values.numel():
        return [(values.view(-1, width), 1, out)]
    rows: list[Rows] = [(values[:whole].view(-1, width), 1, out[:-1])] if whole else []
    return [*rows, (values[whole:], 0, out[-1:])]


def norms_of_rows(rows: Sequence[Rows]) -> None:
    for values, dim, out in rows:
        torch.linalg.vector_norm(values, dim=dim, keepdim=dim == 0, out=out)


def sum_partials_by_torch(given: SumPartialsArguments) -> None:
    partials, out = given.partials, given.out
    if partials.numel() <= ONE_THREAD:
        torch.sum(partials, 0, dtype=torch.float64, out=out)
    else:  # torch.sum may split the work between threads; a running sum goes from left to right
        out.copy_(partials.cumsum(0, dtype=torch.float64)[-1])


reduce = Kernel("reduce", ReduceArguments, "out", reduce_by_torch)
block_sumsq = Kernel("block_sumsq", BlockSumsqArguments, "flat", block_sumsq_by_torch)
sum_partials = Kernel("sum_partials", SumPartialsArguments, "partials", sum_partials_by_torch)


SMALL = 2**16  # elements of a bucket up to which calls over all of its tensors are faster than some for each


@dataclass
class PackArguments:
    """Write all gradients of a bucket to its flat buffer, and measure them, in one pass over memory.

    For each tensor, `flat[offset : offset + numel]` becomes, or with `accumulate` is increased by, `scale * g` rounded
    to the buffer's dtype. The product is rounded before it is added (no fused multiply-add), so accumulating gives the
    same bits as packing into a fresh buffer and adding the two. Elements outside the segments are not touched.

    Args:
        grads: one gradient per tensor of the table, fp32, bf16 or fp16, on the buffer's device, of any shape and
            strides (read in logical order). None stands for zeros. They are left as they are: autograd may hand the
            same memory to several parameters. On a CPU also float64, with `flat` in float64.
        flat: 1-D, contiguous, fp32, bf16 or fp16, at least `table.end` elements.
        scale: factor on every gradient, applied in fp32 (of float64 in float64); 1 is a plain copy or addition.
        sumsq: fp32 [table.num_chunks]; receives the sum of squares of each chunk of the raw, unscaled gradients.
            Its bits do not depend on `accumulate` or `scale`; on a GPU with `wire` they may be others. None: not
            measured.
        stored: the same of what lies in the flat buffer afterwards, or None.
        wire: int8 [wire_numel(flat.numel())]; receives the fp32 flat buffer as a message of eight bits (see
            `kfuse.kernels.wire`). Offsets are multiples of GROUP then. Elements of no tensor are left as they are
            there, and must be zeros in both. None: no message.
        added: with `wire`, fp32 [table.num_chunks], whose sum becomes what rounding has added to the sum of squares.

    A step keeps the arguments, and gives them other gradients of the same shapes, scale and `accumulate`, which are not
    checked again. Raises ValueError where a shape, dtype or device does not fit.
    """

    grads: Sequence[Tensor | None]
    flat: Tensor
    table: PackTable
    scale: float
    accumulate: bool
    sumsq: Tensor | None
    stored: Tensor | None = None
    wire: Tensor | None = None
    added: Tensor | None = None

    def __post_init__(self) -> None:
        flat, table = self.flat, self.table
        kinds = (torch.float64,) if flat.dtype == torch.float64 and flat.device.type == "cpu" else DTYPES
        if len(self.grads) != len(table.numels):
            raise ValueError(f"pack: the table has {len(table.numels)} tensors, got {len(self.grads)} gradients")
        for index, (grad, numel) in enumerate(zip(self.grads, table.numels, strict=True)):
            if grad is not None and (grad.numel() != numel or grad.dtype not in kinds or grad.device != flat.device):
                raise ValueError(
                    f"pack: gradient {index} has {grad.numel()} elements of {grad.dtype} on {grad.device}, must have "
                    f"{numel} of one of {kinds} on {flat.device}, where the flat buffer is"
                )
        if flat.numel() < table.end:
            raise ValueError(f"pack: flat has {flat.numel()} elements, the table needs {table.end}")
        require("pack: flat", flat, (flat.numel(),), *kinds)
        require("pack: sumsq", self.sumsq, (table.num_chunks,), torch.float32)
        require("pack: stored", self.stored, (table.num_chunks,), torch.float32)
        require("pack: wire", self.wire, (wire_numel(flat.numel()),), torch.int8)
        require("pack: added", self.added, (table.num_chunks,), torch.float32)
        in_groups = flat.dtype == torch.float32 and not any(each % GROUP for each in (flat.numel(), *table.offsets))
        if (self.wire is None) != (self.added is None) or (self.wire is not None and not in_groups):
            raise ValueError(f"pack: wire needs added, flat in fp32, and its length and offsets multiples of {GROUP}")

    @cached_property
    def segments(self) -> tuple[Tensor, ...]:
        """Each tensor's place in the flat buffer, 1-D."""
        return self.table.split(self.flat)

    @cached_property
    def copies(self) -> _Copies:
        """Made at the first call, for gradients of these shapes, none of them None."""
        flat = torch.zeros(self.table.end, dtype=torch.float32, device=self.flat.device)
        parts = self.table.split(flat)
        shaped = [part.view(grad.shape) for part, grad in zip(parts, self.grads, strict=True) if grad is not None]
        cuts = zip(parts, self.table.edges, strict=True)
        chunks = [part[start:stop] for part, edges in cuts for start, stop in pairwise(edges)]
        return _Copies(flat, parts, shaped, chunks, self.flat[: self.table.end])


class _Copies(NamedTuple):
    """Memory for a copy of a bucket's small gradients, laid out as the bucket is; and views of it."""

    flat: Tensor  # fp32 [table.end]
    parts: tuple[Tensor, ...]  # each gradient's place, 1-D
    shaped: list[Tensor]  # the same, of the gradient's shape
    chunks: list[Tensor]
    bucket: Tensor  # as much of the bucket's flat buffer


def pack_by_torch(given: PackArguments) -> None:
    _pack(given)
    if given.stored is not None:
        sums = given.stored.split_with_sizes(given.table.chunk_counts)
        for segment, norms in zip(given.segments, sums, strict=True):
            row_norms(segment.float(), CHUNK, norms)
        given.stored.square_()
    if given.wire is not None:
        round_by_torch(given.flat, given.wire, given.added)


def _pack(given: PackArguments) -> None:
    flat, table, accumulate = given.flat, given.table, given.accumulate
    present = [grad for grad in given.grads if grad is not None and grad.dtype == flat.dtype == torch.float32]
    several = len(given.grads) > 1  # one alone would not be copied by `_pack_together`, and is not ours to change
    few = table.numel <= SMALL and 0 < table.num_chunks <= 2 * len(present)
    if several and few and len(present) == len(given.grads):
        _pack_together(given, present)
        return
    sums: Sequence[Tensor | None] = [None] * len(given.grads)
    if given.sumsq is not None:
        sums = given.sumsq.split_with_sizes(table.chunk_counts)
    for grad, segment, norms in zip(given.grads, given.segments, sums, strict=True):
        if grad is None:
            if norms is not None:
                norms.zero_()
            if not accumulate:
                segment.zero_()
            continue
        values = grad.reshape(-1)
        if values.dtype == torch.float64:
            row_norms(values.float(), CHUNK, norms)
            values = values * given.scale
            segment.add_(values) if accumulate else segment.copy_(values)
            continue
        needs_scratch = (accumulate and given.scale != 1.0) or not values.dtype == flat.dtype == torch.float32
        scratch = values
        if needs_scratch:
            scratch = torch.empty(min(PIECE, values.numel()), dtype=torch.float32, device=flat.device)
        if not needs_scratch or values.numel() <= PIECE:
            _pack_piece(values, segment, norms, given.scale, accumulate, scratch)
            continue
        for start in range(0, values.numel(), PIECE):
            place, chunks = slice(start, start + PIECE), slice(start // CHUNK, (start + PIECE) // CHUNK)
            norm = None if norms is None else norms[chunks]
            _pack_piece(values[place], segment[place], norm, given.scale, accumulate, scratch)
    if given.sumsq is not None:
        given.sumsq.square_()


def _pack_piece(
    values: Tensor, target: Tensor, norms: Tensor | None, scale: float, accumulate: bool, scratch: Tensor
) -> None:
    if values.dtype != torch.float32:
        values = scratch[: values.numel()].copy_(values)
    row_norms(values, CHUNK, norms)
    if target.dtype == torch.float32 and not accumulate:
        torch.mul(values, scale, out=target)
        return
    if scale != 1.0:
        values = torch.mul(values, scale, out=scratch[: values.numel()])
    if accumulate:
        # Rounded to the buffer's type before the addition, as if it had been packed and added later.
        target.add_(values.to(target.dtype))
    else:
        target.copy_(values)


def _pack_together(given: PackArguments, grads: list[Tensor]) -> None:
    """The same bits as tensor by tensor, in a number of calls that does not grow with the number of tensors."""
    copies = given.copies
    torch._foreach_copy_(copies.shaped, grads)
    if given.sumsq is not None:
        torch.stack(torch._foreach_norm(copies.chunks), out=given.sumsq)
        given.sumsq.square_()
    if given.scale != 1.0:
        copies.flat.mul_(given.scale)
    if given.accumulate:
        copies.bucket.add_(copies.flat)
    else:
        torch._foreach_copy_(given.segments, copies.parts)


pack = Kernel("pack", PackArguments, "flat", pack_by_torch)
