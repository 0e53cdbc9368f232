# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton `adamw`: one pass over parameter, gradient (or the contributions it is the sum of) and both moments."""

import triton
import triton.language as tl
from torch import Tensor

from kfuse.kernels import launch
from kfuse.kernels.options import AdamOptions
from kfuse.kernels.triton_reduce import fused_constants, merged

THREADS = 256


@triton.jit
def adamw_kernel(
    param,
    master,
    grad,
    exp_avg,
    exp_avg_sq,
    step,
    grad_scale,
    found_inf,
    numel,
    stride,
    lr,
    decay,
    beta1,
    beta2,
    one_minus_beta1,
    one_minus_beta2,
    log_beta1,
    log_beta2,
    eps,
    MAXIMIZE: tl.constexpr,
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
    m = tl.load(exp_avg + index, mask=mask).to(tl.float32)
    v = tl.load(exp_avg_sq + index, mask=mask).to(tl.float32)

    if grad_scale is not None:
        g = g * tl.load(grad_scale)
    if MAXIMIZE:
        g = -g
    p = p * decay
    m = m * beta1 + g * one_minus_beta1
    v = v * beta2 + g * g * one_minus_beta2

    # 1 - beta^t cancels for small t, so in fp64; from the logarithm, whose fp32 error is relative to it.
    t = tl.load(step).to(tl.float64)
    correction1 = (1.0 - tl.exp(t * log_beta1)).to(tl.float32)
    correction2 = (1.0 - tl.exp(t * log_beta2)).to(tl.float32)
    denominator = tl.div_rn(tl.sqrt_rn(v), tl.sqrt_rn(correction2)) + eps
    p = p - tl.div_rn(lr, correction1) * tl.div_rn(m, denominator)

    if master is not None:
        tl.store(master + index, p, mask=mask)
    tl.store(param + index, p.to(param.dtype.element_ty), mask=mask)
    tl.store(exp_avg + index, m.to(exp_avg.dtype.element_ty), mask=mask)
    tl.store(exp_avg_sq + index, v.to(exp_avg_sq.dtype.element_ty), mask=mask)


def adamw(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    options: AdamOptions,
    step: Tensor,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    master: Tensor | None,
    merges: tuple[tuple[int, int], ...],
) -> None:
    if param.numel() == 0:
        return
    rows = grad if grad.dim() == 2 else grad[None]
    shape = fused_constants(len(rows), min(rows.element_size(), param.element_size()), merges)
    adamw_kernel[(triton.cdiv(param.numel(), shape["BLOCK"]),)](
        param,
        master,
        rows,
        exp_avg,
        exp_avg_sq,
        step,
        grad_scale,
        found_inf,
        param.numel(),
        rows.stride(0),
        float(options.lr),
        1.0 - options.lr * options.weight_decay,
        float(options.beta1),
        float(options.beta2),
        1.0 - options.beta1,
        1.0 - options.beta2,
        *options.log_betas,
        float(options.eps),
        MAXIMIZE=options.maximize,
        **shape,
        **launch.options(THREADS),
    )
