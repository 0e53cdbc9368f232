# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton `sgd`: one pass over parameter, gradient (or the contributions it is the sum of) and momentum."""

import triton
import triton.language as tl
from torch import Tensor

from kfuse.kernels import launch
from kfuse.kernels.options import SGDOptions
from kfuse.kernels.triton_reduce import fused_constants, merged

THREADS = 256


@triton.jit
def sgd_kernel(
    param,
    master,
    grad,
    momentum_buffer,
    grad_scale,
    found_inf,
    numel,
    stride,
    lr,
    momentum,
    one_minus_dampening,
    weight_decay,
    NESTEROV: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    FIRST_STEP: tl.constexpr,
    PROGRAM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if found_inf is not None:
        if tl.load(found_inf) != 0.0:
            return
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < numel
    if master is not None:
        p = tl.load(master + index, mask=mask)
    else:
        p = tl.load(param + index, mask=mask).to(tl.float32)
    g = merged(grad, index, mask, tl.zeros((), tl.int64) + stride, PROGRAM)

    if grad_scale is not None:
        g = g * tl.load(grad_scale)
    if MAXIMIZE:
        g = -g
    g = g + p * weight_decay
    if momentum_buffer is not None:
        if FIRST_STEP:
            b = g
        else:
            b = tl.load(momentum_buffer + index, mask=mask).to(tl.float32)
            b = b * momentum + g * one_minus_dampening
        tl.store(momentum_buffer + index, b.to(momentum_buffer.dtype.element_ty), mask=mask)
        if NESTEROV:
            g = g + b * momentum
        else:
            g = b
    p = p - lr * g
    if master is not None:
        tl.store(master + index, p, mask=mask)
    tl.store(param + index, p.to(param.dtype.element_ty), mask=mask)


def sgd(
    param: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor | None,
    options: SGDOptions,
    first_step: bool,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    master: Tensor | None,
    merges: tuple[tuple[int, int], ...],
) -> None:
    if param.numel() == 0:
        return
    rows = grad if grad.dim() == 2 else grad[None]
    shape = fused_constants(len(rows), min(rows.element_size(), param.element_size()), merges)
    sgd_kernel[(triton.cdiv(param.numel(), shape["BLOCK"]),)](
        param,
        master,
        rows,
        momentum_buffer,
        grad_scale,
        found_inf,
        param.numel(),
        rows.stride(0),
        float(options.lr),
        float(options.momentum),
        1.0 - options.dampening,
        float(options.weight_decay),
        NESTEROV=options.nesterov,
        MAXIMIZE=options.maximize,
        FIRST_STEP=first_step,
        **shape,
        **launch.options(THREADS),
    )
