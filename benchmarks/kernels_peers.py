"""Who else moves these bytes: torch's fused and foreach operations. One that cannot take a case says why."""

from __future__ import annotations

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


def pack(dtype: torch.dtype, scale: float, accumulate: bool) -> Found:
    def foreach(b: dict[str, Any]) -> None:
        if accumulate:
            torch._foreach_add_(b["segments"], b["grads"], alpha=scale)
        else:
            torch._foreach_copy_(b["segments"], b["grads"])
            b["flat"].mul_(scale)
        b["total"].copy_(torch.stack(torch._foreach_norm(b["grads"])).square().sum())

    if dtype != torch.float32:
        return {}, {"torch": "foreach_norm rounds to the gradients' dtype"}
    return {"torch": foreach}, {}


def optimizer(name: str, clip: bool, layout: Layout, dtype: torch.dtype) -> Found:
    """torch's fused optimizer (after clip_grad_norm_ with `clip`)."""
    if dtype != torch.float32:
        return {}, {"torch": "gradients of another dtype than the parameters'"}
    if name == "lamb":
        return {}, {"torch": "torch has no LAMB"}
    common: dict[str, Any] = {"lr": LR, "weight_decay": DECAY, "fused": True}
    states: tuple[str, ...] = ("momentum_buffer",) if name == "sgd" else ("exp_avg", "exp_avg_sq")

    def run(b: dict[str, Any]) -> None:
        """`optimizer.step()` on the buffers' own memory; the optimizer is made at a set's first run."""
        if "torch" not in b:
            params = [torch.nn.Parameter(view) for view in b["params"]]
            if name == "adamw":
                optimizer: Any = torch.optim.AdamW(params, betas=(BETA1, BETA2), eps=EPS, **common)
            else:
                optimizer = torch.optim.SGD(params, momentum=MOMENTUM, **common)
            views = [layout.views(b[state]) for state in states]
            for index, (param, grad) in enumerate(zip(params, b["grads"], strict=True)):
                param.grad = grad
                # Of the update before this one: step() counts first.
                optimizer.state[param] = {"step": torch.tensor(STEP - 1, device=param.device)} | {
                    state: view[index] for state, view in zip(states, views, strict=True)
                }
            b["torch"] = optimizer, params
        optimizer, params = b["torch"]
        if clip:
            torch.nn.utils.clip_grad_norm_(params, MAX_NORM, foreach=True)
        optimizer.step()

    return {"torch": run}, {}
