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

MAX_MEASURED_ROWS = 16
"""Most contributions whose own norms and dot products are kept: two sums each, in registers."""

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
class Measures:
    """Where `reduce` writes partial sums, one per BLOCK of the output; `sum_partials` adds them up. None: not measured.

    Contribution k is taken as `rows[k] = shares[k] * g_k`, a weighted gradient, so that `out` is the mean gbar of the
    g_k. All tensors are fp32 and on the rows' device; with n elements and K rows there are b = num_blocks(n) blocks.

    Args:
        sumsq: [b]: |gbar|^2. With fp32 rows the bits are those of `block_sumsq(out)`.
        variance: [b]: sum_k shares[k] |g_k - gbar|^2, each difference taken before it is squared: nothing cancels.
        noise: [b]: the same, each element divided by (sqrt(exp_avg_sq) + eps)^2: the noise that Adam's preconditioner
            leaves. To correct exp_avg_sq by c = 1 - beta2^t, give eps * sqrt(c) and multiply the sum by c.
        row_sumsq: [K, b]: |rows[k]|^2.
        row_dot: [K, b]: rows[k] . gbar; divided by both norms it is the cosine between a contribution and the mean.
        shares: [K], for variance and noise: each contribution's part of the samples; 0 for a row of zeros without any.
        exp_avg_sq: [n], for noise.
    """

    sumsq: Tensor | None = None
    variance: Tensor | None = None
    noise: Tensor | None = None
    row_sumsq: Tensor | None = None
    row_dot: Tensor | None = None
    shares: Tensor | None = None
    exp_avg_sq: Tensor | None = None
    eps: float = 0.0

    @property
    def centred(self) -> bool:
        """Whether differences from the mean are measured."""
        return self.variance is not None or self.noise is not None

    @property
    def of_rows(self) -> bool:
        """Whether each contribution has sums of its own."""
        return self.row_sumsq is not None or self.row_dot is not None

    @property
    def any(self) -> bool:
        """Whether anything is measured."""
        return self.sumsq is not None or self.centred or self.of_rows

    def check(self, rows: Tensor | Sequence[Tensor]) -> None:
        """Raises ValueError where a tensor is missing, does not fit `rows` ([K, n]), or K is too large."""
        count, numel, device = len(rows), rows[0].numel(), rows[0].device
        of_blocks = dict.fromkeys(("sumsq", "variance", "noise"), (num_blocks(numel),))
        of_rows = dict.fromkeys(("row_sumsq", "row_dot"), (count, num_blocks(numel)))
        for name, shape in (of_blocks | of_rows | {"shares": (count,), "exp_avg_sq": (numel,)}).items():
            tensor: Tensor | None = getattr(self, name)
            if tensor is None:
                continue
            if tensor.shape != shape or tensor.dtype != torch.float32 or not tensor.is_contiguous():
                raise ValueError(
                    f"reduce: {name} must be contiguous float32 {list(shape)}, got {tensor.dtype} {list(tensor.shape)}"
                )
            if tensor.device != device:
                raise ValueError(f"reduce: {name} is on {tensor.device}, the rows on {device}")
        if self.centred and self.shares is None:
            raise ValueError("reduce: variance and noise need shares")
        if self.noise is not None and self.exp_avg_sq is None:
            raise ValueError("reduce: noise needs exp_avg_sq")
        if self.of_rows and count > MAX_MEASURED_ROWS:
            raise ValueError(f"reduce: row_sumsq and row_dot take at most {MAX_MEASURED_ROWS} rows, got {count}")


@dataclass(frozen=True)
class ReduceArguments(Arguments):
    """Add contributions in a given order: `x[dst] = x[dst] + x[src]` for each merge, then `out = x[0]`.

    Every addition is rounded once, to fp32, in exactly that order: the bits are those of the merges alone.

    Args:
        rows: [K, n] contributions, fp32, bf16 or fp16 (added in fp32), each row contiguous. They may be overwritten.
            On the CPU they may be K tensors [n] of one dtype, wherever they lie.
        merges: pairs (dst, src) of different row numbers.
        out: [n], contiguous, fp32, bf16 or fp16; may be one of the rows: of several tensors any, of [K, n] the first.
        measures: what to measure in the same pass, from the rows as they came in and from `out` as it is stored. An
            output's bits depend on its block alone: a shard that starts at a multiple of BLOCK yields its part.

    Raises ValueError when a merge names no row, or adds a row to itself, or shapes or dtypes differ.
    """

    rows: Tensor | Sequence[Tensor]
    merges: Merges
    out: Tensor
    _: KW_ONLY
    measures: Measures = Measures()

    def check(self) -> None:
        """Raises ValueError or TypeError where an argument does not fit the class's description."""
        rows, out = self.rows, self.out
        if out.dim() != 1 or {row.shape for row in rows} != {out.shape}:
            shape = list(rows.shape) if isinstance(rows, Tensor) else [list(row.shape) for row in rows]
            raise ValueError(f"reduce: rows must be [K >= 1, n] and out [n], got {shape} and {list(out.shape)}")
        if len({row.dtype for row in rows}) > 1:
            raise ValueError(f"reduce: rows must have one dtype, got {[row.dtype for row in rows]}")
        check_merges("reduce", self.merges, len(rows))
        self.measures.check(rows)


@dataclass(frozen=True)
class PullArguments(Arguments):
    """Add contributions that lie in the memory of several workers, which this worker's device can read.

    The bits are those of `reduce` with the same rows and merges. Nothing is copied before it is added.

    Args:
        rows: K >= 1 fp32 tensors [n], each contiguous, 16-byte aligned and mapped into this device's address space
            (`.device` is that of `out`). They stay as they are, but for one that is `out`.
        merges: the order of additions, as `reduce` takes it.
        out: fp32 [n], contiguous, on this worker's device; may be one of the rows.
        sumsq: fp32 [num_blocks(n)], where the sum's squares are written as `Measures.sumsq` has them; n elements must
            start at a multiple of BLOCK of the bucket. None: not measured.

    Raises ValueError where they do not fit each other.
    """

    rows: Sequence[Tensor]
    merges: Merges
    out: Tensor
    sumsq: Tensor | None = None

    def check(self) -> None:
        """Raises ValueError where an argument does not fit the class's description."""
        out, blocks = self.out, num_blocks(self.out.numel())
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
        if (sumsq := self.sumsq) is not None and (sumsq.shape != (blocks,) or sumsq.dtype != torch.float32):
            raise ValueError(f"pull: sumsq must be float32 [{blocks}], got {sumsq.dtype} {list(sumsq.shape)}")


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
    rows, merges, out, measures = given.rows, given.merges, given.out, given.measures
    if not measures.any:
        _add_rows(list(rows), merges, out)
        return
    needs_rows = measures.centred or measures.of_rows
    for at in range(0, out.numel(), REDUCE_PIECE):  # what has just been added is measured while it is in the cache
        elements = slice(at, min(at + REDUCE_PIECE, out.numel()))
        parts = [row[elements] for row in rows]
        contributions = [part.float() for part in parts] if needs_rows else []
        # One of them may be about to be overwritten.
        contributions = [c.clone() if c.data_ptr() == out[elements].data_ptr() else c for c in contributions]
        _add_rows(parts, merges, out[elements])
        _measure(contributions, out[elements], measures, elements)


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


def _measure(rows: Sequence[Tensor], out: Tensor, measures: Measures, elements: slice) -> None:
    """Fill the partial sums of these elements' blocks. `rows` are the contributions in fp32."""
    blocks = slice(elements.start // BLOCK, num_blocks(elements.stop))
    mean = out.float()
    if measures.sumsq is not None:
        block_sumsq(out, measures.sumsq[blocks])
    if measures.shares is not None and measures.centred:
        spread = torch.zeros_like(mean)
        for row, share in zip(rows, measures.shares, strict=True):
            factor = torch.where(share == 0, 0, 1.0 / share)
            spread.add_((row * factor).sub_(mean).square_().mul_(share))
        if measures.variance is not None:
            _block_sums(spread, measures.variance[blocks])
        if measures.noise is not None and measures.exp_avg_sq is not None:
            denominator = measures.exp_avg_sq[elements].sqrt().add_(measures.eps)
            _block_sums(spread.div_(denominator).div_(denominator), measures.noise[blocks])
    for k, row in enumerate(rows):
        if measures.row_sumsq is not None:
            block_sumsq(row, measures.row_sumsq[k, blocks])
        if measures.row_dot is not None:
            _block_sums(row * mean, measures.row_dot[k, blocks])


def _block_sums(values: Tensor, out: Tensor) -> None:
    """Write the sum of each BLOCK elements of `values` (1-D, fp32), the last one perhaps ragged, to `out`."""
    full = values.numel() // BLOCK
    torch.sum(values[: full * BLOCK].view(full, BLOCK), dim=1, out=out[:full])
    if full < out.numel():
        torch.sum(values[full * BLOCK :], dim=0, keepdim=True, out=out[full:])


def pull_by_torch(given: PullArguments) -> None:
    """`pull` in PyTorch."""
    out, sumsq = given.out, given.sumsq
    for at in range(0, out.numel(), REDUCE_PIECE):
        elements = slice(at, min(at + REDUCE_PIECE, out.numel()))
        squares = None if sumsq is None else sumsq[at // BLOCK : num_blocks(elements.stop)]
        rows = torch.stack([row[elements] for row in given.rows])
        reduce(rows, given.merges, out[elements], measures=Measures(sumsq=squares))


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
