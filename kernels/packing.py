"""`pack`: a bucket's gradients to its flat buffer, measured on the way. Arguments and PyTorch implementation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from kfuse.kernels.dispatch import DTYPES, kernel, require
from kfuse.kernels.reduction import PIECE, row_norms
from kfuse.kernels.table import CHUNK, PackTable

SMALL = 2**16
"""Elements of a bucket, 256 KiB of fp32, up to which calls over all of its tensors are faster than some for each."""


@dataclass(frozen=True)
class PackArguments:
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

    Raises ValueError where a shape, dtype or device does not fit.
    """

    grads: Sequence[Tensor | None]
    flat: Tensor
    table: PackTable
    _: KW_ONLY
    scale: float
    accumulate: bool
    sumsq: Tensor

    def __post_init__(self) -> None:
        flat, table = self.flat, self.table
        if len(self.grads) != len(table.numels):
            raise ValueError(f"pack: the table has {len(table.numels)} tensors, got {len(self.grads)} gradients")
        for index, (grad, numel) in enumerate(zip(self.grads, table.numels, strict=True)):
            if grad is not None and (grad.numel() != numel or grad.dtype not in DTYPES or grad.device != flat.device):
                raise ValueError(
                    f"pack: gradient {index} has {grad.numel()} elements of {grad.dtype} on {grad.device}, must have "
                    f"{numel} of one of {DTYPES} on {flat.device}, where the flat buffer is"
                )
        if flat.numel() < table.end:
            raise ValueError(f"pack: flat has {flat.numel()} elements, the table needs {table.end}")
        require("pack: flat", flat, (flat.numel(),), *DTYPES)
        require("pack: sumsq", self.sumsq, (table.num_chunks,), torch.float32)


def pack_by_torch(given: PackArguments) -> None:
    """`pack` in PyTorch."""
    flat, table, accumulate = given.flat, given.table, given.accumulate
    segments = table.segments(flat)
    present = [grad for grad in given.grads if grad is not None and grad.dtype == flat.dtype == torch.float32]
    several = len(given.grads) > 1  # one alone would not be copied by `_pack_together`, and is not ours to change
    few = table.end <= SMALL and 0 < table.num_chunks <= 2 * len(present)
    if several and few and len(present) == len(given.grads):
        _pack_together(given, present, segments)
        return
    scratch = torch.empty(min(PIECE, table.end), dtype=torch.float32, device=flat.device)
    for grad, segment, norms in zip(
        given.grads, segments, given.sumsq.split_with_sizes(table.chunk_counts), strict=True
    ):
        if grad is None:
            norms.zero_()
            if not accumulate:
                segment.zero_()
            continue
        values = grad.reshape(-1)
        needs_scratch = (accumulate and given.scale != 1.0) or not values.dtype == flat.dtype == torch.float32
        if not needs_scratch or values.numel() <= PIECE:
            _pack_piece(values, segment, norms, given.scale, accumulate, scratch)
            continue
        targets, sums = torch.split(segment, PIECE), torch.split(norms, PIECE // CHUNK)
        for part, target, norm in zip(torch.split(values, PIECE), targets, sums, strict=True):
            _pack_piece(part, target, norm, given.scale, accumulate, scratch)
    given.sumsq.square_()


def _pack_piece(values: Tensor, target: Tensor, norms: Tensor, scale: float, accumulate: bool, scratch: Tensor) -> None:
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


pack = kernel("pack", PackArguments, "flat", pack_by_torch, "triton_pack")
