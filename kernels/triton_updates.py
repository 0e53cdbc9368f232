# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton `adamw` and `sgd`: one pass over parameter, gradient and states."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from kfuse.kernels.launch import BF16, F32, NAMES, Case, Launch, Launches, Streams, like_memory
from kfuse.kernels.table import BLOCK
from kfuse.kernels.updates import AdamOptions, AdamWArguments, SGDArguments, SGDOptions, UpdateArguments

SCALARS = ["step", "grad_scale", "found_inf"]
"""Pointers to one number: where it lies is no reason for another binary."""

TILE = 2048
"""Elements that a program updates."""


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


def adamw(given: AdamWArguments) -> Launches:
    """As `kfuse.kernels.adamw`."""
    options = given.options
    numbers = options.numbers | {"decay": 1.0 - options.lr * options.weight_decay}
    yield _launch(adamw_kernel, given, numbers, {"MAXIMIZE": options.maximize})


def sgd(given: SGDArguments) -> Launches:
    """As `kfuse.kernels.sgd`."""
    options = given.options
    numbers = options.numbers | {"one_minus_dampening": 1.0 - options.dampening}
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


def cases() -> Iterator[Case]:
    """The types and settings that training uses."""
    adam = AdamOptions(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1)
    state, one = like_memory(BLOCK), like_memory()
    for param, grad, master in ((F32, F32, 0), (F32, BF16, 0), (BF16, BF16, 0), (BF16, BF16, 1), (BF16, F32, 1)):
        flats = _flats(param, grad, master)
        (launch,) = adamw(AdamWArguments(**flats, exp_avg=state, exp_avg_sq=state, options=adam, step=one))
        everywhere = param == grad == F32 or (master == 1 and grad == BF16)
        yield _case("adamw", launch, (F32, F32), (F32, F32), everywhere)

    for param, master, mode, loads, stores in (
        (F32, 0, "plain", (), ()),
        (F32, 0, "first step", (), (F32,)),
        (F32, 0, "momentum", (F32,), (F32,)),
        (F32, 0, "nesterov", (F32,), (F32,)),
        (BF16, 0, "momentum", (F32,), (F32,)),
        (BF16, 1, "momentum", (F32,), (F32,)),
    ):
        options = SGDOptions(lr=0.1, momentum=0.9 if stores else 0.0, nesterov=mode == "nesterov")
        flats = _flats(param, param, master) | {"momentum_buffer": state if stores else None}
        (launch,) = sgd(SGDArguments(**flats, options=options, first_step=mode == "first step"))
        yield _case(f"sgd {mode}", launch, loads, stores, mode == "momentum" and param == F32)


def _flats(param: torch.dtype, grad: torch.dtype, masters: int) -> dict[str, Any]:
    """What every update is given."""
    return {
        "param": like_memory(BLOCK, dtype=param),
        "grad": like_memory(BLOCK, dtype=grad),
        "grad_scale": like_memory(),
        "found_inf": like_memory(),
        "master": like_memory(BLOCK) if masters else None,
    }


def _case(name: str, launch: Launch, loads: Streams, stores: Streams, everywhere: bool) -> Case:
    """An update that reads and writes these states, beside parameter, masters and gradient."""
    param, grad, master = (launch.arguments[name] for name in ("param", "grad", "master"))
    updated = (param.dtype,) + (F32,) * (master is not None)
    name += f" {NAMES[param.dtype]} param{' fp32 master' * (master is not None)} {NAMES[grad.dtype]} grad"
    return Case(name, launch, TILE, (*updated, grad.dtype, *loads), (*updated, *stores), everywhere)
