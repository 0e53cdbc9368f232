"""`pack`: a bucket's gradients to its flat buffer, measured on the way. Arguments and PyTorch implementation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from kfuse.kernels.dispatch import DTYPES, Arguments, kernel
from kfuse.kernels.reduction import PIECE, row_norms
from kfuse.kernels.table import CHUNK, PackTable

SMALL = 2**16
"""Elements of a bucket, 256 KiB of fp32, up to which calls over all of its tensors are faster than some for each."""


@dataclass(frozen=True)
class PackArguments(Arguments):
    """Write all gradients of a bucket to its flat buffer, and measure them, in one pass over memory.

    For each tensor, `flat[offset : offset + numel]` becomes, or with `accumulate` is increased by, `scale * g` rounded
    to the buffer's dtype. The product is rounded before it is added (no fused multiply-add), so accumulating gives the
    same bits as packing into a fresh buffer and adding the two. Elements outside the segments are not touched.

    Args:
        grads: one gradient per tensor of the table, fp32, bf16 or fp16, on the buffer's device, of any shape and
            strides (read in logical order). None stands for zeros. They are left as they are: autograd may hand the
            same memory to several parameters.
        flat: 1-D, contiguous, fp32, bf16 or fp16, at least `table.end` elements.
        scale: factor on every gradient, applied in fp32; 1 is a plain copy or addition.
        sumsq: fp32 [table.num_chunks]; receives the sum of squares of each chunk of the raw, unscaled gradients.
            Its bits do not depend on `accumulate` or `scale`.

    Raises ValueError or TypeError when a shape, dtype or device does not fit.
    """

    grads: Sequence[Tensor | None]
    flat: Tensor
    table: PackTable
    _: KW_ONLY
    scale: float
    accumulate: bool
    sumsq: Tensor

    def check(self) -> None:
        """Raises ValueError or TypeError where an argument does not fit the class's description."""
        flat, table, sumsq = self.flat, self.table, self.sumsq
        if len(self.grads) != len(table.numels):
            raise ValueError(f"pack: the table has {len(table.numels)} tensors, got {len(self.grads)} gradients")
        for index, (grad, numel) in enumerate(zip(self.grads, table.numels, strict=True)):
            if grad is None:
                continue
            if grad.numel() != numel:
                raise ValueError(f"pack: gradient {index} has {grad.numel()} elements, the table says {numel}")
            if grad.dtype not in DTYPES:
                raise TypeError(f"pack: gradient {index} is {grad.dtype}, must be one of {DTYPES}")
            if grad.device != flat.device:
                raise ValueError(f"pack: gradient {index} is on {grad.device}, the flat buffer on {flat.device}")
        if flat.dtype not in DTYPES:
            raise TypeError(f"pack: flat is {flat.dtype}, must be one of {DTYPES}")
        if flat.numel() < table.end:
            raise ValueError(f"pack: flat has {flat.numel()} elements, the table needs {table.end}")
        if sumsq.shape != (table.num_chunks,) or sumsq.dtype != torch.float32:
            raise ValueError(f"pack: sumsq must be float32 [{table.num_chunks}], got {sumsq.dtype} {list(sumsq.shape)}")


def pack_by_torch(given: PackArguments) -> None:
    """`pack` in PyTorch."""
    flat, table, scale, accumulate = given.flat, given.table, given.scale, given.accumulate
    segments = table.segments(flat)
    present = [grad for grad in given.grads if grad is not None and grad.dtype == flat.dtype == torch.float32]
    several = len(given.grads) > 1  # one alone would not be copied by `_pack_together`, and is not ours to change
    few = table.end <= SMALL and 0 < table.num_chunks <= 2 * len(present)
    if several and few and len(present) == len(given.grads):
        _pack_together(given, present, segments)
        return
    norms = given.sumsq.split_with_sizes(table.sumsq_sizes)
    scratch = torch.empty(min(PIECE, table.end), dtype=torch.float32, device=flat.device)
    by_scratch = accumulate and scale != 1.0  # rounded before it is added: `add_(alpha=)` rounds once
    for grad, segment, full, ragged in zip(given.grads, segments, norms[::2], norms[1::2], strict=True):
        if grad is None:
            full.zero_(), ragged.zero_()
            if not accumulate:
                segment.zero_()
            continue
        values = grad.reshape(-1)
        whole = not by_scratch or values.numel() <= PIECE
        if whole and values.dtype == flat.dtype == torch.float32:
            row_norms(values, CHUNK, full, ragged)
            if by_scratch:
                segment.add_(torch.mul(values, scale, out=scratch[: values.numel()]))
            elif accumulate:
                segment.add_(values)
            else:
                torch.mul(values, scale, out=segment)
            continue
        for part, target, norm in _pieces(values, segment, full, ragged):
            _pack_piece(part, target, scale, accumulate, norm, scratch[: part.numel()].view(part.shape))
    given.sumsq.square_()


def _pack_together(given: PackArguments, grads: list[Tensor], segments: tuple[Tensor, ...]) -> None:
    """The same bits as tensor by tensor, in a number of calls that does not grow with the number of tensors."""
    table = given.table
    values: Tensor = torch._utils._flatten_dense_tensors(grads)  # type: ignore[no-untyped-call]
    parts = values.split_with_sizes(table.numels)
    chunks = parts if table.chunk_sizes == table.numels else values.split_with_sizes(table.chunk_sizes)
    torch.stack(torch._foreach_norm(chunks), out=given.sumsq)
    given.sumsq.square_()
    if given.scale != 1.0:
        values.mul_(given.scale)
    if given.accumulate:
        torch._foreach_add_(segments, parts)
    else:
        torch._foreach_copy_(segments, parts)


def _pieces(values: Tensor, segment: Tensor, full: Tensor, ragged: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Cuts a tensor, its place in the flat buffer, and its norms: rows of CHUNK elements, then the ragged one."""
    whole = full.numel() * CHUNK
    if whole:
        rows = PIECE // CHUNK
        yield from zip(
            torch.split(values[:whole].view(-1, CHUNK), rows),
            torch.split(segment[:whole].view(-1, CHUNK), rows),
            torch.split(full, rows),
            strict=True,
        )
    if ragged.numel():
        yield values[whole:].view(1, -1), segment[whole:].view(1, -1), ragged


def _pack_piece(values: Tensor, target: Tensor, scale: float, accumulate: bool, norm: Tensor, scratch: Tensor) -> None:
    if values.dtype != torch.float32:
        values = scratch.copy_(values)
    torch.linalg.vector_norm(values, dim=1, out=norm)
    if scale != 1.0:
        values = torch.mul(values, scale, out=scratch)
    if accumulate:
        # Rounded to the buffer's type before the addition, as if it had been packed and added later.
        target.add_(values.to(target.dtype))
    else:
        target.copy_(values)


pack = kernel("pack", PackArguments, "flat", pack_by_torch, "triton_pack")
