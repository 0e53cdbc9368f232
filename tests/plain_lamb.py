"""LAMB as the paper has it, a tensor at a time: the reference for kf.FusedLAMB."""

from __future__ import annotations

from typing import Any

import torch


class PlainLAMB(torch.optim.Optimizer):
    """You et al. 2020, algorithm 2, with torch's names for the state."""

    def __init__(self, params: Any, lr: float = 1e-3, **options: Any) -> None:
        defaults = {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01, "maximize": False}
        super().__init__(params, defaults | options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p, group in [(p, g) for g in self.param_groups for p in g["params"] if p.grad is not None and p.numel()]:
            state, (beta1, beta2), g = self.state[p], group["betas"], -p.grad if group["maximize"] else p.grad
            step = state["step"] = state.get("step", torch.zeros(())) + 1
            state["exp_avg"] = beta1 * state.get("exp_avg", 0.0) + (1 - beta1) * g
            state["exp_avg_sq"] = beta2 * state.get("exp_avg_sq", 0.0) + (1 - beta2) * g * g
            m, v = state["exp_avg"] / (1 - beta1**step), state["exp_avg_sq"] / (1 - beta2**step)
            u = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * p
            ratio = p.norm() / u.norm() if p.norm() > 0 and u.norm() > 0 else 1.0
            p -= group["lr"] * ratio * u
