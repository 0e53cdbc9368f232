"""`reduce`, `pull`, `block_sumsq` and `sum_partials`: sums whose order never changes. Arguments, and PyTorch
implementations.

Every sum here has an order fixed by the data's shape, whatever the number of threads or the memory alignment. That is
why squares are summed with `vector_norm` over short rows and not with `torch.dot`, whose bits depend on both.

Where intermediate values need memory, a piece of the data is worked on at a time, so that they stay in the cache. A
piece is a whole number of chunks and blocks: its size changes no bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cache
from itertools import accumulate as running_sums

import torch
from torch import Tensor

from kfuse.kernels.dispatch import Arguments, kernel
from kfuse.kernels.table import BLOCK, num_blocks

Merges = tuple[tuple[int, int], ...]
"""The order in which rows are added up, as (destination, source) pairs: row[destination] += row[source]."""

ADD = -1
"""The operator in a postfix expression of row numbers."""

PIECE = 2**19
"""Elements, 2 MiB of fp32. Smaller pieces fit a second-level cache and are slower all the same: each operation has a
fixed cost of a few microseconds, and below 2**15 elements torch uses one thread."""

REDUCE_PIECE = 64 * BLOCK
"""Elements of each row that are added up, and measured, at a time: 1 MiB of fp32."""

ONE_THREAD = 2**14
"""Elements that torch adds up in one thread, in an order of their number. It shares out work from twice as many on."""


def check_merges(name: str, merges: Merges, count: int) -> None:
    """Raises ValueError where a merge does not name two different rows of `count`."""
    for dst, src in merges:
        if not (0 <= dst < count and 0 <= src < count and dst != src):
            raise ValueError(f"{name}: merge ({dst}, {src}) must name two different rows of {count}")


def check_sumsq(name: str, sumsq: Tensor | None, out: Tensor) -> None:
    """Raises ValueError where `sumsq` is given and is not what the sums of squares of `out` are written to."""
    blocks = num_blocks(out.numel())
    if sumsq is not None and (sumsq.shape != (blocks,) or sumsq.dtype != torch.float32):
        raise ValueError(f"{name}: sumsq must be float32 [{blocks}], got {sumsq.dtype} {list(sumsq.shape)}")


@cache
def postfix(count: int, merges: Merges) -> tuple[int, ...]:
    """What the merges leave in row 0, as a postfix expression: row numbers, and ADD for the two values before it.

    In this order few sums are unfinished at a time.
    """
    rows: list[tuple[int, ...]] = [(row,) for row in range(count)]
    for dst, src in merges:
        rows[dst] = (*rows[dst], *rows[src], ADD)
    return rows[0]


def balanced(count: int) -> Merges:
    """The merges of the binary tree over `count` rows."""
    steps = [1 << level for level in range(count.bit_length()) if 1 << level < count]
    return tuple((dst, dst + step) for step in steps for dst in range(0, count - step, 2 * step))


@dataclass(frozen=True)
class ReduceArguments(Arguments):
    """Add contributions in a given order: `x[dst] = x[dst] + x[src]` for each merge, then `out = x[0]`.

    Every addition is rounded once, to fp32, in exactly that order: the bits are those of the merges alone.

    Args:
        rows: [K, n] contributions, fp32, bf16 or fp16 (added in fp32), each row contiguous. They may be overwritten.
            On the CPU they may be K tensors [n] of one dtype, wherever they lie.
        merges: pairs (dst, src) of different row numbers.
        out: [n], contiguous, fp32, bf16 or fp16; may be one of the rows: of several tensors any, of [K, n] the first.
        sumsq: fp32 [num_blocks(n)]: the squares of `out` as it is stored, summed in the same pass, one sum per BLOCK.
            With fp32 rows its bits are those of `block_sumsq(out)`. None: not measured.

    Raises ValueError when a merge names no row, or adds a row to itself, or shapes or dtypes differ.
    """

    rows: Tensor | Sequence[Tensor]
    merges: Merges
    out: Tensor
    _: KW_ONLY
    sumsq: Tensor | None = None

    def check(self) -> None:
        """Raises ValueError or TypeError where an argument does not fit the class's description."""
        rows, out = self.rows, self.out
        if out.dim() != 1 or {row.shape for row in rows} != {out.shape}:
            shape = list(rows.shape) if isinstance(rows, Tensor) else [list(row.shape) for row in rows]
            raise ValueError(f"reduce: rows must be [K >= 1, n] and out [n], got {shape} and {list(out.shape)}")
        if len({row.dtype for row in rows}) > 1:
            raise ValueError(f"reduce: rows must have one dtype, got {[row.dtype for row in rows]}")
        check_merges("reduce", self.merges, len(rows))
        check_sumsq("reduce", self.sumsq, out)


@dataclass(frozen=True)
class PullArguments(Arguments):
    """Add contributions that lie in the memory of several workers, which this worker's device can read.

    The bits are those of `reduce` with the same rows and merges. Nothing is copied before it is added.

    Args:
        rows: K >= 1 fp32 tensors [n], each contiguous, 16-byte aligned and mapped into this device's address space
            (`.device` is that of `out`). They stay as they are, but for one that is `out`.
        merges: the order of additions, as `reduce` takes it.
        out: fp32 [n], contiguous, on this worker's device; may be one of the rows.
        sumsq: as `reduce` takes it; n elements must start at a multiple of BLOCK of the bucket.

    Raises ValueError where they do not fit each other.
    """

    rows: Sequence[Tensor]
    merges: Merges
    out: Tensor
    sumsq: Tensor | None = None

    def check(self) -> None:
        """Raises ValueError where an argument does not fit the class's description."""
        out = self.out
        if not self.rows:
            raise ValueError("pull: there must be at least one contribution")
        for row in (*self.rows, out):
            if row.shape != (out.numel(),) or row.dtype != torch.float32 or not row.is_contiguous():
                raise ValueError(
                    f"pull: each contribution and out must be contiguous float32 [{out.numel()}], got {row.dtype} "
                    f"{list(row.shape)}"
                )
            if row.device != out.device:
                raise ValueError(f"pull: contributions must lie on {out.device}, got {row.device}")
        if out.device.type != "meta" and any(row.numel() and row.data_ptr() % 16 for row in self.rows):
            raise ValueError("pull: each contribution must be 16-byte aligned")
        check_merges("pull", self.merges, len(self.rows))
        check_sumsq("pull", self.sumsq, out)


@dataclass(frozen=True)
class BlockSumsqArguments(Arguments):
    """`out[b]` = sum of squares of `flat[b * BLOCK : (b + 1) * BLOCK]`, in fp32.

    A block's bits depend on the block alone: a shard that starts at a multiple of BLOCK yields its part of the whole
    buffer's partials.

    Args:
        flat: 1-D, contiguous, fp32, bf16 or fp16; on a GPU its address is a multiple of 16 bytes.
        out: fp32 [num_blocks(flat.numel())].

    Raises ValueError when `out` does not fit.
    """

    flat: Tensor
    out: Tensor

    def check(self) -> None:
        """Raises ValueError or TypeError where an argument does not fit the class's description."""
        blocks, out = num_blocks(self.flat.numel()), self.out
        if out.shape != (blocks,) or out.dtype != torch.float32:
            raise ValueError(f"block_sumsq: out must be float32 [{blocks}], got {out.dtype} {list(out.shape)}")


@dataclass(frozen=True)
class SumPartialsArguments(Arguments):
    """Sum fp32 or fp64 `partials` [b] into `out` (0-dim float64), or each row of [r, b] into `out` [r].

    In fp64, and in an order fixed by b alone. Raises ValueError when the shapes do not fit or are not contiguous.
    """

    partials: Tensor
    out: Tensor

    def check(self) -> None:
        """Raises ValueError or TypeError where an argument does not fit the class's description."""
        partials, out = self.partials, self.out
        if partials.dim() not in (1, 2) or out.shape != partials.shape[:-1] or out.dtype != torch.float64:
            raise ValueError(
                f"sum_partials: partials must be [b] or [r, b] and out float64 of the same shape without b, "
                f"got {list(partials.shape)} and {out.dtype} {list(out.shape)}"
            )
        if not (partials.is_contiguous() and out.is_contiguous()):
            raise ValueError("sum_partials: partials and out must be contiguous")


def reduce_by_torch(given: ReduceArguments) -> None:
    """`reduce` in PyTorch."""
    rows, merges, out, sumsq = given.rows, given.merges, given.out, given.sumsq
    if sumsq is None:
        _add_rows(list(rows), merges, out)
        return
    for at in range(0, out.numel(), REDUCE_PIECE):  # what has just been added is measured while it is in the cache
        elements = slice(at, min(at + REDUCE_PIECE, out.numel()))
        _add_rows([row[elements] for row in rows], merges, out[elements])
        block_sumsq(out[elements], sumsq[at // BLOCK : num_blocks(elements.stop)])


def _add_rows(rows: Sequence[Tensor], merges: Merges, out: Tensor) -> None:
    """Adds up the rows in the order of `merges` and writes the sum. `out` may be one of the rows; the others stay.

    So only the last addition writes there.
    """
    program = postfix(len(rows), merges)
    additions, dtype = program.count(ADD), rows[0].dtype
    depth = max(running_sums(-1 if item == ADD else 1 for item in program))
    one_pass = additions <= 1 and dtype == out.dtype == torch.float32
    piece = max(1, out.numel()) if one_pass else REDUCE_PIECE
    scratch = torch.empty(depth, 0 if one_pass else min(piece, out.numel()), dtype=torch.float32, device=out.device)
    for target, *parts in zip(*(torch.split(row, piece) for row in (out, *rows)), strict=True):
        slots = list(scratch[:, : target.numel()].unbind(0))  # for the sum at each place of the stack
        stack: list[Tensor] = []
        left = additions
        for item in program:
            if item == ADD:
                left -= 1
                right = stack.pop()
                sum_at = target if left == 0 and out.dtype == torch.float32 else slots[len(stack) - 1]
                stack[-1] = torch.add(stack[-1], right, out=sum_at)
            else:
                part = parts[item]
                stack.append(part if part.dtype == torch.float32 else slots[len(stack)].copy_(part))
        if stack[0] is not target:
            target.copy_(stack[0])


def pull_by_torch(given: PullArguments) -> None:
    """`pull` in PyTorch."""
    reduce_by_torch(ReduceArguments(given.rows, given.merges, given.out, sumsq=given.sumsq))


def block_sumsq_by_torch(given: BlockSumsqArguments) -> None:
    """`block_sumsq` in PyTorch."""
    flat, out = given.flat, given.out
    pieces = [(flat, out)]
    if flat.dtype != torch.float32:
        pieces = list(zip(torch.split(flat, PIECE), torch.split(out, num_blocks(PIECE)), strict=True))
    for values, norms in pieces:
        full = values.numel() // BLOCK
        row_norms(values.float(), BLOCK, norms[:full], norms[full:])
    out.square_()


def row_norms(values: Tensor, width: int, full: Tensor, ragged: Tensor) -> None:
    """Write the 2-norm of each `width` elements of `values` (1-D, fp32) to `full`, and of the rest to `ragged`."""
    whole = full.numel() * width
    if whole:
        rows = values if whole == values.numel() else values[:whole]
        torch.linalg.vector_norm(rows.view(-1, width), dim=1, out=full)
    if whole < values.numel():
        torch.linalg.vector_norm(values[whole:], dim=0, keepdim=True, out=ragged)


def sum_partials_by_torch(given: SumPartialsArguments) -> None:
    """`sum_partials` in PyTorch."""
    partials, out = given.partials, given.out
    if partials.dim() == 1 and partials.numel() <= ONE_THREAD:
        torch.sum(partials, 0, dtype=torch.float64, out=out)
    elif partials.shape[-1] == 0:
        out.zero_()
    else:  # torch.sum may split the work between threads; a running sum goes from left to right
        out.copy_(partials.cumsum(-1, dtype=torch.float64)[..., -1])


reduce = kernel("reduce", ReduceArguments, "out", reduce_by_torch, "triton_reduce")
pull = kernel("pull", PullArguments, "out", pull_by_torch, "triton_pull")
block_sumsq = kernel("block_sumsq", BlockSumsqArguments, "flat", block_sumsq_by_torch, "triton_reduce")
sum_partials = kernel("sum_partials", SumPartialsArguments, "partials", sum_partials_by_torch, "triton_reduce")
