"""Who else moves these bytes: torch's fused and foreach operations, and other libraries where they are installed.

A peer is found by importing it; one that is missing, or cannot take a case, is named with the reason.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from kernels_shapes import Layout

Run = Callable[[dict[str, Any]], None]
Found = tuple[dict[str, Run], dict[str, str]]

LR, BETA1, BETA2, EPS, DECAY, MOMENTUM = 1e-3, 0.9, 0.999, 1e-8, 3.0, 0.9
# So much decay that an update without it would be seen.
STEP = 3.0
"""The number of the update that is checked and timed."""
MAX_NORM = 0.1

# Optimizer classes on CUDA with torch.optim's interface, adamw's decay by default.
OTHERS = {
    "adamw": {
        "apex": ("apex.optimizers", "FusedAdam"),
        "transformer-engine": ("transformer_engine.pytorch.optimizers", "FusedAdam"),
        "deepspeed": ("deepspeed.ops.adam", "FusedAdam"),
    },
    "sgd": {"apex": ("apex.optimizers", "FusedSGD")},
    "lamb": {"apex": ("apex.optimizers", "FusedLAMB")},
}


def pack(dtype: torch.dtype, device: torch.device, scale: float, accumulate: bool) -> Found:
    def foreach(b: dict[str, Any]) -> None:
        if accumulate:
            torch._foreach_add_(b["segments"], b["grads"], alpha=scale)
        else:
            torch._foreach_copy_(b["segments"], b["grads"])
            b["flat"].mul_(scale)
        b["total"].copy_(torch.stack(torch._foreach_norm(b["grads"])).square().sum())

    if dtype != torch.float32:
        return {}, {"torch": "foreach_norm rounds to the gradients' dtype"}
    if device.type != "cuda" or accumulate:
        return {"torch": foreach}, {}
    try:
        kernels: Any = importlib.import_module("amp_C")
        apply: Any = importlib.import_module("apex.multi_tensor_apply").multi_tensor_applier
    except ImportError as error:
        return {"torch": foreach}, {"apex": _line(error)}

    def apex(b: dict[str, Any]) -> None:
        overflow = torch.zeros(1, dtype=torch.int, device=device)
        norm, _ = apply(kernels.multi_tensor_l2norm, overflow, [b["grads"]], False)
        apply(kernels.multi_tensor_scale, overflow, [b["grads"], b["segments"]], scale)
        b["total"].copy_(norm[0].square())

    return {"torch": foreach, "apex": apex}, {}


def optimizer(name: str, clip: bool, layout: Layout, dtype: torch.dtype, device: torch.device) -> Found:
    """torch's fused optimizer (after clip_grad_norm_ with `clip`), and those of other libraries."""
    common = {"lr": LR, "weight_decay": DECAY}
    adam = common | {"betas": (BETA1, BETA2), "eps": EPS}
    options = {"adamw": adam, "sgd": common | {"momentum": MOMENTUM}, "lamb": adam | {"max_grad_norm": 1e30}}[name]
    states = ("momentum_buffer",) if name == "sgd" else ("exp_avg", "exp_avg_sq")
    if dtype != torch.float32:
        return {}, {"torch": "gradients of another dtype than the parameters'"}
    runs: dict[str, Run] = {}
    absent: dict[str, str] = {}
    if name == "lamb":
        absent["torch"] = "torch has no LAMB"
    else:
        kind = torch.optim.AdamW if name == "adamw" else torch.optim.SGD
        runs["torch"] = _stepping("torch", lambda params: kind(params, fused=True, **options), states, layout, clip)
    for peer, (module, attribute) in OTHERS[name].items():
        if device.type != "cuda":
            absent[peer] = "for CUDA only"
            continue
        try:
            made: Any = getattr(importlib.import_module(module), attribute)
            made([torch.nn.Parameter(torch.zeros(8, device=device))], **options)
        except (ImportError, AttributeError, RuntimeError, TypeError) as error:
            absent[peer] = _line(error)
            continue
        runs[peer] = _stepping(peer, lambda params, made=made: made(params, **options), states, layout, clip)
    return runs, absent


def _stepping(peer: str, build: Callable[..., Any], states: tuple[str, ...], layout: Layout, clip: bool) -> Run:
    """A run of `optimizer.step()` on the buffers' own memory; the optimizer is made at a set's first run."""

    def run(b: dict[str, Any]) -> None:
        if peer not in b:
            params = [torch.nn.Parameter(view) for view in b["params"]]
            optimizer = build(params)
            views = [layout.views(b[state]) for state in states]
            for index, (param, grad) in enumerate(zip(params, b["grads"], strict=True)):
                param.grad = grad
                # Of the update before this one: step() counts first.
                optimizer.state[param] = {"step": torch.tensor(STEP - 1, device=param.device)} | {
                    state: view[index] for state, view in zip(states, views, strict=True)
                }
            for group in optimizer.param_groups:
                if peer != "torch":
                    group["step"] = int(STEP) - 1
            b[peer] = optimizer, params
        optimizer, params = b[peer]
        if clip:
            torch.nn.utils.clip_grad_norm_(params, MAX_NORM, foreach=True)
        optimizer.step()

    return run


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
