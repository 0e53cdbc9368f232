# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton `sgd`: one pass over parameter, gradient and momentum."""

import triton
import triton.language as tl
from torch import Tensor

from kfuse.kernels import launch

BLOCK = 2048
THREADS = 256


@triton.jit
def sgd_kernel(
    param,
    grad,
    momentum_buffer,
    grad_scale,
    found_inf,
    numel,
    lr,
    momentum,
    one_minus_dampening,
    weight_decay,
    NESTEROV: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    FIRST_STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if found_inf is not None:
        if tl.load(found_inf) != 0.0:
            return
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < numel
    p = tl.load(param + index, mask=mask).to(tl.float32)
    g = tl.load(grad + index, mask=mask).to(tl.float32)

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
    tl.store(param + index, (p - lr * g).to(param.dtype.element_ty), mask=mask)


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
    if param.numel() == 0:
        return
    sgd_kernel[(triton.cdiv(param.numel(), BLOCK),)](
        param,
        grad,
        momentum_buffer,
        grad_scale,
        found_inf,
        param.numel(),
        float(lr),
        float(momentum),
        1.0 - dampening,
        float(weight_decay),
        NESTEROV=nesterov,
        MAXIMIZE=maximize,
        FIRST_STEP=first_step,
        BLOCK=BLOCK,
        **launch.options(THREADS),
    )
