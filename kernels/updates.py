"""The optimizers' updates on flat buffers, dispatched as in `dispatch`."""

from __future__ import annotations

import torch
from torch import Tensor

from kfuse.kernels import reference
from kfuse.kernels.dispatch import DTYPES, use_triton
from kfuse.kernels.merges import check_merges
from kfuse.kernels.options import AdamOptions, SGDOptions
from kfuse.kernels.table import PackTable


@torch.no_grad()
def adamw(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    options: AdamOptions,
    *,
    step: Tensor,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    master: Tensor | None = None,
    merges: tuple[tuple[int, int], ...] = (),
) -> None:
    """One AdamW step on flat buffers, in place, as torch.optim.AdamW (Loshchilov and Hutter 2019, algorithm 2).

    An element's bits do not depend on how the buffers are sliced, where slices start at multiples of 16 elements and
    end there or at the buffers' end.

    Args:
        param, grad, exp_avg, exp_avg_sq: 1-D, contiguous, of one length. Without `master`, on the CPU parameters and
            states have one dtype; on a GPU each may be fp32, bf16 or fp16, and the arithmetic is fp32. After the call
            the gradient's content is unspecified.
        step: 0-dim fp32 on the same device, the number of this step (1 for the first), already increased by the caller.
        grad_scale: 0-dim fp32 on the same device that multiplies the gradient (clip coefficient, inverse loss scale),
            or None.
        found_inf: 0-dim fp32 on the same device; nonzero leaves parameters and states untouched. Or None.
        master: fp32 weights that are updated in the parameters' stead; `param`, 16-bit, is then only written, with
            their rounded values, and the states are fp32.
        merges: with them `grad` is [K, n], the contributions of `reduce`, which are added in its order and applied in
            the same pass: the bits are those of `reduce` into fp32 and then an update, and no gradient is written.

    Raises ValueError when shapes or merges do not fit, TypeError when `master` is not fp32.
    """
    _check("adamw", param, grad, master, merges)
    if use_triton(param):
        from kfuse.kernels import triton_adamw

        update = triton_adamw.adamw
    else:
        update = reference.adamw
    update(param, grad, exp_avg, exp_avg_sq, options, step, grad_scale, found_inf, master, merges)


@torch.no_grad()
def sgd(
    param: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor | None,
    options: SGDOptions,
    *,
    first_step: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    master: Tensor | None = None,
    merges: tuple[tuple[int, int], ...] = (),
) -> None:
    """One SGD step on flat buffers, in place, as torch.optim.SGD.

    Args:
        param, grad, momentum_buffer: 1-D, contiguous, of one length; dtypes, slices, and the gradient's fate as for
            `adamw`. `momentum_buffer` is None exactly when `momentum` is 0.
        first_step: the buffer becomes the gradient itself, undamped, and its old content is not read. A first step
            that `found_inf` skips leaves it as it was: start from zeros, and without dampening the next step is right.
        grad_scale, found_inf, master, merges: as for `adamw`.

    Raises ValueError when `momentum_buffer` and `momentum` disagree, and as `adamw` does.
    """
    if (momentum_buffer is None) != (options.momentum == 0):
        forbidden = "not " * (options.momentum == 0)
        raise ValueError(f"sgd: momentum is {options.momentum}, so momentum_buffer must {forbidden}be given")
    _check("sgd", param, grad, master, merges)
    if use_triton(param):
        from kfuse.kernels import triton_sgd

        update = triton_sgd.sgd
    else:
        update = reference.sgd
    update(param, grad, momentum_buffer, options, first_step, grad_scale, found_inf, master, merges)


def _check(name: str, param: Tensor, grad: Tensor, master: Tensor | None, merges: tuple[tuple[int, int], ...]) -> None:
    if grad.shape[-1:] != param.shape or grad.dim() > 2 or (grad.dim() == 1 and merges):
        raise ValueError(
            f"{name}: grad must be [n], or [K, n] with merges, where param is [n]; "
            f"got {list(grad.shape)}, {list(param.shape)} and {len(merges)} merges"
        )
    check_merges(name, merges, len(grad) if grad.dim() == 2 else 1)
    if master is not None:
        if master.shape != param.shape:
            raise ValueError(f"{name}: master is {list(master.shape)}, param {list(param.shape)}: must be the same")
        if master.dtype != torch.float32:
            raise TypeError(f"{name}: master is {master.dtype}, must be torch.float32")


@torch.no_grad()
def lamb(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    table: PackTable,
    options: AdamOptions,
    *,
    step: Tensor,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """One LAMB step (You et al. 2020, algorithm 2, phi the identity) on a bucket's flat buffers, in place.

    For each tensor p of the table, u = Adam's bias-corrected update + weight_decay * p, then p -= lr * |p| / |u| * u;
    the ratio is 1 where either norm is 0. Norms are summed from chunks of the tensor: with offsets that are multiples
    of 16, as a bucket's are, its bits depend on it alone.

    Args:
        param, exp_avg, exp_avg_sq: fp32, 1-D, contiguous, at least `table.end` elements; what lies between tensors is
            not touched.
        grad: the same in fp32, bf16 or fp16; its content after the call is unspecified.
        table: where each tensor lies in them.
        step, grad_scale, found_inf: as for `adamw`.

    Raises ValueError when a buffer is too short, TypeError when a dtype does not fit.
    """
    for name, flat in (("param", param), ("grad", grad), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        if flat.dim() != 1 or flat.numel() < table.end:
            raise ValueError(f"lamb: {name} is {list(flat.shape)}, the table needs [{table.end}] or more")
        if flat.dtype != torch.float32 and (name != "grad" or flat.dtype not in DTYPES):
            raise TypeError(f"lamb: {name} is {flat.dtype}, must be torch.float32{' or 16-bit' * (name == 'grad')}")
    if use_triton(param):
        from kfuse.kernels import triton_lamb

        update = triton_lamb.lamb
    else:
        update = reference.lamb
    update(param, grad, exp_avg, exp_avg_sq, table, options, step, grad_scale, found_inf)
