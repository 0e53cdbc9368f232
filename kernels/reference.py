"""The kernels in PyTorch: the CPU path, and what the Triton kernels are tested against.

Every sum here has an order fixed by the data's shape, whatever the thread count or the memory alignment: that is why
squares are summed with `vector_norm` over short rows and not with `torch.dot`, whose bits depend on both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kfuse.kernels.table import BLOCK, CHUNK, PackTable


def pack(
    grads: Sequence[Tensor | None],
    flat: Tensor,
    table: PackTable,
    *,
    scale: float,
    accumulate: bool,
    sumsq: Tensor,
) -> None:
    segments = flat[: table.end].split_with_sizes(table.flat_sizes)[1::2]
    norms = sumsq.split_with_sizes(table.sumsq_sizes)
    sumsq.zero_()
    for grad, segment, full, ragged in zip(grads, segments, norms[::2], norms[1::2], strict=True):
        if grad is None:
            if not accumulate:
                segment.zero_()
            continue
        values = grad.reshape(-1)
        if values.dtype != torch.float32:
            values = values.float()
        _row_norms(values, CHUNK, full, ragged)
        if scale == 1.0:
            pass
        elif segment.dtype == torch.float32 and not accumulate:
            torch.mul(values, scale, out=segment)
            continue
        else:
            values.mul_(scale)
        if accumulate:
            # Rounded to the buffer's type before the addition, as if it had been packed and added later.
            segment.add_(values.to(segment.dtype))
        else:
            segment.copy_(values)
    sumsq.square_()


def block_sumsq(flat: Tensor, out: Tensor) -> None:
    full = flat.numel() // BLOCK
    _row_norms(flat.float(), BLOCK, out[:full], out[full:])
    out.square_()


def _row_norms(values: Tensor, width: int, full: Tensor, ragged: Tensor) -> None:
    """Write the 2-norm of each `width` elements of `values` (1-D, fp32) to `full`, and of the rest to `ragged`."""
    rows = full.numel()
    if rows:
        torch.linalg.vector_norm(values[: rows * width].view(rows, width), dim=1, out=full)
        values = values[rows * width :]
    if ragged.numel():
        torch.linalg.vector_norm(values, dim=0, keepdim=True, out=ragged)


def sum_partials(partials: Tensor, out: Tensor) -> None:
    if partials.numel() == 0:
        out.zero_()
        return
    # torch.sum may split the work between threads; a running sum goes from left to right.
    out.copy_(partials.cumsum(0, dtype=torch.float64)[-1])


def reduce(rows: Tensor, merges: tuple[tuple[int, int], ...], out: Tensor, *, scale: float) -> None:
    values = list((rows if rows.dtype == torch.float32 else rows.float()).unbind(0))
    for dst, src in merges[:-1]:
        values[dst].add_(values[src])
    total = values[0]
    if merges:
        # The last merge is the only one whose result is wanted elsewhere: write it there and save a pass.
        dst, src = merges[-1]
        if dst == 0:
            in_place = out.dtype == torch.float32 and scale == 1.0
            total = torch.add(values[0], values[src], out=out if in_place else values[0])
    if scale != 1.0:
        total = total.mul_(scale)
    if total is not out:
        out.copy_(total)


def adamw(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    if _skipped(found_inf):
        return
    torch._fused_adamw_(
        [param],
        [grad.to(param.dtype)],
        [exp_avg],
        [exp_avg_sq],
        [],
        [step],
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=maximize,
        grad_scale=_divisor(grad_scale),
        found_inf=None,
    )


def sgd(
    param: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor | None,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    first_step: bool,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    if _skipped(found_inf):
        return
    torch._fused_sgd_(
        [param],
        [grad.to(param.dtype)],
        [] if momentum_buffer is None else [momentum_buffer],
        weight_decay=weight_decay,
        momentum=momentum,
        lr=lr,
        dampening=dampening,
        nesterov=nesterov,
        maximize=maximize,
        is_first_step=first_step,
        grad_scale=_divisor(grad_scale),
        found_inf=None,
    )


def _skipped(found_inf: Tensor | None) -> bool:
    # PyTorch's fused kernels skip for exactly 1.0; here any nonzero count of bad values skips.
    return found_inf is not None and found_inf.item() != 0


def _divisor(grad_scale: Tensor | None) -> Tensor | None:
    """PyTorch's fused optimizers divide by the scale, and write the quotient back to the gradient."""
    if grad_scale is None or grad_scale.item() == 1.0:
        return None
    return grad_scale.reciprocal()
