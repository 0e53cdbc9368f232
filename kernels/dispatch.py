"""One rule chooses the implementation: Triton for GPU tensors, the PyTorch reference for all others.

`TRITON_INTERPRET=1` sends CPU tensors to the Triton code as well, which then runs in Triton's interpreter.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from kfuse.kernels import reference
from kfuse.kernels.measure import NOTHING, Measures
from kfuse.kernels.merges import check_merges
from kfuse.kernels.table import PackTable, num_blocks

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def use_triton(tensor: Tensor) -> bool:
    """Whether the Triton code runs on this tensor."""
    return tensor.is_cuda or _INTERPRETED


@torch.no_grad()
def pack(
    grads: Sequence[Tensor | None],
    flat: Tensor,
    table: PackTable,
    *,
    scale: float,
    accumulate: bool,
    sumsq: Tensor,
) -> None:
    """Write all gradients of a bucket to its flat buffer, and measure them, in one pass over memory.

    For each tensor, `flat[offset : offset + numel]` becomes, or with `accumulate` is increased by, `scale * g` rounded
    to the buffer's dtype. The product is rounded before it is added (no fused multiply-add), so accumulating gives the
    same bits as packing into a fresh buffer and adding the two. Elements outside the segments are not touched.

    Args:
        grads: one gradient per tensor of the table, fp32, bf16 or fp16, on the buffer's device, of any shape and
            strides (read in logical order). None stands for zeros. They may be overwritten.
        flat: 1-D, contiguous, fp32, bf16 or fp16, at least `table.end` elements.
        scale: factor on every gradient, applied in fp32; 1 is a plain copy or addition.
        sumsq: fp32 [table.num_chunks]; receives the sum of squares of each chunk of the raw, unscaled gradients.
            Its bits do not depend on `accumulate` or `scale`.

    Raises ValueError or TypeError when a shape, dtype or device does not fit.
    """
    if len(grads) != len(table.numels):
        raise ValueError(f"pack: the table has {len(table.numels)} tensors, got {len(grads)} gradients")
    for index, (grad, numel) in enumerate(zip(grads, table.numels, strict=True)):
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
    if use_triton(flat):
        from kfuse.kernels import triton_pack

        triton_pack.pack(grads, flat, table, scale=scale, accumulate=accumulate, sumsq=sumsq)
    else:
        reference.pack(grads, flat, table, scale=scale, accumulate=accumulate, sumsq=sumsq)


@torch.no_grad()
def block_sumsq(flat: Tensor, out: Tensor) -> None:
    """`out[b]` = sum of squares of `flat[b * BLOCK : (b + 1) * BLOCK]`, in fp32.

    A block's bits depend on the block alone: a shard that starts at a multiple of BLOCK yields its part of the whole
    buffer's partials.

    Args:
        flat: 1-D, contiguous, fp32, bf16 or fp16; on a GPU its address is a multiple of 16 bytes.
        out: fp32 [num_blocks(flat.numel())].
    """
    if out.shape != (num_blocks(flat.numel()),) or out.dtype != torch.float32:
        raise ValueError(
            f"block_sumsq: out must be float32 [{num_blocks(flat.numel())}], got {out.dtype} {list(out.shape)}"
        )
    if use_triton(flat):
        from kfuse.kernels import triton_partials

        triton_partials.block_sumsq(flat, out)
    else:
        reference.block_sumsq(flat, out)


@torch.no_grad()
def sum_partials(partials: Tensor, out: Tensor) -> None:
    """Sum fp32 or fp64 `partials` [b] into `out` (0-dim float64), or each row of [r, b] into `out` [r].

    In fp64, and in an order fixed by b alone. Raises ValueError when the shapes do not fit or are not contiguous.
    """
    if partials.dim() not in (1, 2) or out.shape != partials.shape[:-1] or out.dtype != torch.float64:
        raise ValueError(
            f"sum_partials: partials must be [b] or [r, b] and out float64 of the same shape without b, "
            f"got {list(partials.shape)} and {out.dtype} {list(out.shape)}"
        )
    if not (partials.is_contiguous() and out.is_contiguous()):
        raise ValueError("sum_partials: partials and out must be contiguous")
    if use_triton(partials):
        from kfuse.kernels import triton_partials

        triton_partials.sum_partials(partials, out)
    else:
        reference.sum_partials(partials, out)


@torch.no_grad()
def reduce(
    rows: Tensor,
    merges: tuple[tuple[int, int], ...],
    out: Tensor,
    *,
    scale: float = 1.0,
    measures: Measures = NOTHING,
) -> None:
    """Add contributions in a given order: `x[dst] = x[dst] + x[src]` for each merge, then `out = scale * x[0]`.

    Every addition is rounded once, to fp32, in exactly that order: the bits are those of the merge program alone.

    Args:
        rows: [K, n] contributions, fp32, bf16 or fp16 (added in fp32), each row contiguous. They may be overwritten.
        merges: pairs (dst, src) of different row numbers.
        out: [n], contiguous, fp32, bf16 or fp16; may be `rows[0]`.
        measures: what to measure in the same pass, from the rows as they came in and from `out` as it is stored. An
            output's bits depend on its block alone: a shard that starts at a multiple of BLOCK yields its part.

    Raises ValueError when a merge names no row, or adds a row to itself, or shapes or dtypes differ.
    """
    if rows.dim() != 2 or len(rows) == 0 or out.shape != rows.shape[1:]:
        raise ValueError(f"reduce: rows must be [K >= 1, n] and out [n], got {list(rows.shape)} and {list(out.shape)}")
    check_merges("reduce", merges, len(rows))
    measures.check(rows)
    if use_triton(rows):
        from kfuse.kernels import triton_reduce

        triton_reduce.reduce(rows, merges, out, scale=scale, measures=measures)
    else:
        reference.reduce(rows, merges, out, scale=scale, measures=measures)
