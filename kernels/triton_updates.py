# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton `adamw` and `sgd`, one pass over parameter, gradient and states, and `lamb`.

`lamb`: moments and norms in one pass, each tensor's trust ratio, and the update in another pass. The update's direction
is formed twice from the moments instead of being stored: that costs no more memory traffic, needs no buffer, and leaves
the gradient's dtype free.
"""

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from kfuse.kernels.dispatch import Launch, Launches
from kfuse.kernels.table import CHUNK
from kfuse.kernels.triton_reduction import lane_sums
from kfuse.kernels.updates import (
    AdamOptions,
    AdamWArguments,
    LAMBArguments,
    SGDArguments,
    TrustArguments,
    UpdateArguments,
)

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


@triton.jit
def gradient(grad, visible, at, mask):
    """fp32: the gradient, but for elements of `visible` that are not its rounded values any more."""
    if visible is None:
        return tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
    else:
        return weights(visible, grad, at, mask)


@triton.jit(do_not_specialize_on_alignment=SCALARS)
def adamw_kernel(
    param, master, grad, visible, exp_avg, exp_avg_sq, step, grad_scale, found_inf,
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
    g = gradient(grad, visible, index, mask)
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
    param, master, grad, visible, momentum_buffer, grad_scale, found_inf,
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
    g = gradient(grad, visible, index, mask)
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
        # Of the beta itself: `step` counts what it counts, also where an update counts as several.
        numbers[f"log_{name}"] = math.log(numbers[name]) if numbers[name] > 0.0 else -math.inf
        if options.batch_factor != 1:
            numbers[name] **= options.batch_factor
        numbers[f"one_minus_{name}"] = 1.0 - numbers[name]
    return numbers


def adamw(given: AdamWArguments) -> Launches:
    launch = _launch(adamw_kernel, given, _adamw_numbers(given.options), {"MAXIMIZE": given.options.maximize})
    yield replace(launch, varying=_varying_of_adamw)


@lru_cache(maxsize=64)  # the buckets of a step have the same
def _adamw_numbers(options: AdamOptions) -> dict[str, float]:
    numbers = adam_numbers(options) | {"decay": 1.0 - options.lr * options.weight_decay}
    return {name: value for name, value in numbers.items() if name in adamw_kernel.arg_names}


def _varying_of_adamw(given: AdamWArguments) -> dict[str, Any]:
    scalars = {"grad_scale": given.grad_scale, "found_inf": given.found_inf, "MAXIMIZE": given.options.maximize}
    return _adamw_numbers(given.options) | scalars


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


# -- lamb -------------------------------------------------------------------------------------------------------------

WIDTH = 1024  # chunks whose norms `lamb_trust_kernel` adds at a time


@triton.jit
def _direction(p, m, v, correction1, correction2, eps, weight_decay):
    """The update before the trust ratio: Adam's, bias-corrected, and the decay."""
    denominator = tl.div_rn(tl.sqrt_rn(v), tl.sqrt_rn(correction2)) + eps
    return tl.div_rn(tl.div_rn(m, correction1), denominator) + p * weight_decay


@triton.jit
def _moments_span(
    at, mask, param, master, grad, visible, exp_avg, exp_avg_sq,
    scale, beta1, beta2, gain1, gain2, correction1, correction2, eps, decay,
):  # fmt: skip
    """Update the moments of the elements `at`; return the squares of the parameter and of the update's direction."""
    p = weights(param, master, at, mask)
    g = gradient(grad, visible, at, mask) * scale
    m = tl.load(exp_avg + at, mask=mask, other=0.0) * beta1 + g * gain1
    v = tl.load(exp_avg_sq + at, mask=mask, other=0.0) * beta2 + g * g * gain2
    tl.store(exp_avg + at, m, mask=mask)
    tl.store(exp_avg_sq + at, v, mask=mask)
    u = tl.where(mask, _direction(p, m, v, correction1, correction2, eps, decay), 0.0)
    return p * p, u * u


@triton.jit
def lamb_moments_kernel(
    chunks, param, master, grad, visible, exp_avg, exp_avg_sq, partials, step, grad_scale, found_inf,
    beta1, beta2, one_minus_beta1, one_minus_beta2, log_beta1, log_beta2, eps, weight_decay,
    MAXIMIZE: tl.constexpr, OFFSET_ALIGNMENT: tl.constexpr,
    LANE: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Update one chunk's moments; write the sums of squares of its parameters and of its update's direction."""
    if found_inf is not None:
        if tl.load(found_inf) != 0.0:
            return
    chunk = tl.program_id(0)
    row = chunks + chunk.to(tl.int64) * 4
    length = tl.load(row + 2).to(tl.int32)
    offset = tl.multiple_of(tl.load(row + 3), OFFSET_ALIGNMENT)
    scale = -1.0 if MAXIMIZE else 1.0
    if grad_scale is not None:
        scale = scale * tl.load(grad_scale)
    correction1, correction2 = bias_correction(step, log_beta1), bias_correction(step, log_beta2)

    # As in `pack`: the mask changes at multiples of 16 elements only, and the few elements after it go apart.
    whole = length // 16 * 16
    squares_p = tl.zeros((TILE // LANE,), tl.float32)
    squares_u = tl.zeros((TILE // LANE,), tl.float32)
    for start in range(0, CHUNK, TILE):
        index = start + tl.arange(0, TILE)
        pp, uu = _moments_span(
            offset + index, index < whole, param, master, grad, visible, exp_avg, exp_avg_sq,
            scale, beta1, beta2, one_minus_beta1, one_minus_beta2, correction1, correction2, eps, weight_decay,
        )  # fmt: skip
        squares_p += lane_sums(pp, LANE)
        squares_u += lane_sums(uu, LANE)
    total_p, total_u = tl.sum(squares_p, axis=0), tl.sum(squares_u, axis=0)
    if whole < length:
        index = whole + tl.arange(0, 16)
        pp, uu = _moments_span(
            offset + index, index < length, param, master, grad, visible, exp_avg, exp_avg_sq,
            scale, beta1, beta2, one_minus_beta1, one_minus_beta2, correction1, correction2, eps, weight_decay,
        )  # fmt: skip
        total_p += tl.sum(pp, axis=0)
        total_u += tl.sum(uu, axis=0)
    tl.store(partials + chunk, total_p)
    tl.store(partials + tl.num_programs(0) + chunk, total_u)


@triton.jit
def lamb_trust_kernel(first_chunks, partials, trust, num_chunks, WIDTH: tl.constexpr):
    """|p| / |u| of one tensor, from its chunks' partials in fp64 and in order; 1 where either is zero."""
    tensor = tl.program_id(0)
    at = tl.load(first_chunks + tensor).to(tl.int32)
    end = tl.load(first_chunks + tensor + 1).to(tl.int32)
    index = tl.arange(0, WIDTH)
    sum_p, sum_u = tl.zeros((WIDTH,), tl.float64), tl.zeros((WIDTH,), tl.float64)
    while at < end:
        mask = at + index < end
        sum_p += tl.load(partials + at + index, mask=mask, other=0.0).to(tl.float64)
        sum_u += tl.load(partials + num_chunks + at + index, mask=mask, other=0.0).to(tl.float64)
        at += WIDTH
    p, u = tl.sqrt(tl.sum(sum_p, axis=0)), tl.sqrt(tl.sum(sum_u, axis=0))
    ratio = tl.where((p > 0.0) & (u > 0.0), p / u, 1.0)
    tl.store(trust + tensor, tl.where((p != p) | (u != u), p + u, ratio).to(tl.float32))


@triton.jit
def _apply_span(at, mask, param, master, exp_avg, exp_avg_sq, rate, correction1, correction2, eps, decay):
    p = weights(param, master, at, mask)
    m = tl.load(exp_avg + at, mask=mask, other=0.0)
    v = tl.load(exp_avg_sq + at, mask=mask, other=0.0)
    u = _direction(p, m, v, correction1, correction2, eps, decay)
    p = p - rate * u
    if master is not None:
        tl.store(master + at, p, mask=mask)
    tl.store(param + at, p.to(param.dtype.element_ty), mask=mask)


@triton.jit
def lamb_apply_kernel(
    chunks, param, master, exp_avg, exp_avg_sq, trust, step, found_inf,
    lr, log_beta1, log_beta2, eps, weight_decay,
    OFFSET_ALIGNMENT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Move one chunk's parameters by the update's direction, its rate times the tensor's trust ratio."""
    if found_inf is not None:
        if tl.load(found_inf) != 0.0:
            return
    row = chunks + tl.program_id(0).to(tl.int64) * 4
    rate = lr * tl.load(trust + tl.load(row))
    length = tl.load(row + 2).to(tl.int32)
    offset = tl.multiple_of(tl.load(row + 3), OFFSET_ALIGNMENT)
    correction1, correction2 = bias_correction(step, log_beta1), bias_correction(step, log_beta2)
    whole = length // 16 * 16
    index = tl.arange(0, CHUNK)
    _apply_span(
        offset + index, index < whole, param, master, exp_avg, exp_avg_sq,
        rate, correction1, correction2, eps, weight_decay,
    )  # fmt: skip
    if whole < length:
        rest = whole + tl.arange(0, 16)
        _apply_span(
            offset + rest, rest < length, param, master, exp_avg, exp_avg_sq,
            rate, correction1, correction2, eps, weight_decay,
        )  # fmt: skip


def lamb(given: LAMBArguments) -> Launches:
    table, chunks = given.table, (given.table.num_chunks,)
    layout = {"OFFSET_ALIGNMENT": table.offset_alignment, "CHUNK": CHUNK}
    values = vars(given) | adam_numbers(given.options) | {"chunks": table.chunks}
    if given.trust is None:
        if given.partials is None:
            values["partials"] = torch.empty(2, table.num_chunks, dtype=torch.float32, device=given.param.device)
            values["trust"] = torch.empty(len(table.numels), dtype=torch.float32, device=given.param.device)
        moments = {"MAXIMIZE": given.options.maximize, **layout, "LANE": 4, "TILE": TILE}
        yield Launch(lamb_moments_kernel, chunks, values, moments)
        if given.partials is not None:
            return
        yield from lamb_trust(TrustArguments(values["partials"], table, values["trust"]))
    yield Launch(lamb_apply_kernel, chunks, values, layout)


def lamb_trust(given: TrustArguments) -> Launches:
    table = given.table
    values = vars(given) | {"trust": given.out, "first_chunks": table.first_chunks, "num_chunks": table.num_chunks}
    yield Launch(lamb_trust_kernel, (len(table.numels),), values, {"WIDTH": WIDTH})
