# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton `adamw` and `sgd`: one pass over parameter, gradient and states."""

import math
from dataclasses import replace
from typing import Any

import triton
import triton.language as tl

from kfuse.kernels.launch import Launch, Launches
from kfuse.kernels.updates import AdamOptions, AdamWArguments, SGDArguments, UpdateArguments

SCALARS = ["step", "grad_scale", "found_inf"]  # pointers to one number: where it lies is no reason for another binary

TILE = 2048  # elements that a program updates


@triton.jit
def bias_correction(step, log_beta):
    """1 - beta^t cancels for small t, so in fp64; from the logarithm, whose fp32 error is relative to it."""
    return (1.0 - tl.exp(tl.load(step).to(tl.float64) * log_beta)).to(tl.float32)


@triton.jit
def weights(param, master, at, mask):
    """What is updated, fp32: the master weights, but for parameters that are not their rounded values any more."""
    p = tl.load(param + at, mask=mask, other=0.0)
    if master is not None:
        kept = tl.load(master + at, mask=mask, other=0.0)
        rounded = kept.to(param.dtype.element_ty).to(tl.float32)
        p = tl.where(p.to(tl.float32) == rounded, kept, p.to(tl.float32))
    return p.to(tl.float32)


@triton.jit(do_not_specialize_on_alignment=SCALARS)
def adamw_kernel(
    param, master, grad, exp_avg, exp_avg_sq, step, grad_scale, found_inf,
    numel,
    lr, decay, beta1, beta2, one_minus_beta1, one_minus_beta2, log_beta1, log_beta2, eps,
    MAXIMIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One AdamW step of a tile."""
    if found_inf is not None:
        if tl.load(found_inf) != 0.0:
            return
    correction1, correction2 = bias_correction(step, log_beta1), bias_correction(step, log_beta2)
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = index < numel
    g = tl.load(grad + index, mask=mask, other=0.0).to(tl.float32)
    p = weights(param, master, index, mask)
    m = tl.load(exp_avg + index, mask=mask).to(tl.float32)
    v = tl.load(exp_avg_sq + index, mask=mask).to(tl.float32)

    if grad_scale is not None:
        g = g * tl.load(grad_scale)
    if MAXIMIZE:
        g = -g
    p = p * decay
    m = m * beta1 + g * one_minus_beta1
    v = v * beta2 + g * g * one_minus_beta2

    denominator = tl.div_rn(tl.sqrt_rn(v), tl.sqrt_rn(correction2)) + eps
    p = p - tl.div_rn(lr, correction1) * tl.div_rn(m, denominator)

    if master is not None:
        tl.store(master + index, p, mask=mask)
    tl.store(param + index, p.to(param.dtype.element_ty), mask=mask)
    tl.store(exp_avg + index, m.to(exp_avg.dtype.element_ty), mask=mask)
    tl.store(exp_avg_sq + index, v.to(exp_avg_sq.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=SCALARS)
def sgd_kernel(
    param, master, grad, momentum_buffer, grad_scale, found_inf,
    numel,
    lr, momentum, one_minus_dampening, weight_decay,
    NESTEROV: tl.constexpr, MAXIMIZE: tl.constexpr, FIRST_STEP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One SGD step of a tile."""
    if found_inf is not None:
        if tl.load(found_inf) != 0.0:
            return
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = index < numel
    g = tl.load(grad + index, mask=mask, other=0.0).to(tl.float32)
    p = weights(param, master, index, mask)

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


def adam_numbers(options: AdamOptions) -> dict[str, float]:
    """The scalar arguments of a kernel, by name. Bias corrections take logarithms, of which that of 0 is -inf."""
    numbers = {name: float(value) for name, value in vars(options).items()}
    for name in ("beta1", "beta2"):
        numbers[f"one_minus_{name}"] = 1.0 - numbers[name]
        numbers[f"log_{name}"] = math.log(numbers[name]) if numbers[name] > 0.0 else -math.inf
    return numbers


def adamw(given: AdamWArguments) -> Launches:
    options = given.options
    numbers = adam_numbers(options) | {"decay": 1.0 - options.lr * options.weight_decay}
    yield _launch(adamw_kernel, given, numbers, {"MAXIMIZE": options.maximize})


def sgd(given: SGDArguments) -> Launches:
    options = given.options
    numbers = {name: float(value) for name, value in vars(options).items()}
    numbers["one_minus_dampening"] = 1.0 - options.dampening
    flags = {"NESTEROV": options.nesterov, "MAXIMIZE": options.maximize, "FIRST_STEP": given.first_step}
    # The second step's binary differs from the first one's.
    yield replace(_launch(sgd_kernel, given, numbers, flags), later=({"FIRST_STEP": False},) * given.first_step)


def _launch(kernel: Any, given: UpdateArguments, numbers: dict[str, float], flags: dict[str, bool]) -> Launch:
    """The launch of an update that takes its elements one by one, with its own settings and compile-time flags.

    No bits of parameters and states depend on the tile. A thread moves 128 bits of the smaller type, or more.
    """
    numel = given.param.numel()
    values = vars(given) | numbers | {"numel": numel}
    return Launch(kernel, (triton.cdiv(numel, TILE),), values, flags | {"TILE": TILE})
