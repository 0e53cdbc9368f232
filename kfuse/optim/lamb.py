"""LAMB (You et al. 2020, "Large Batch Optimization for Deep Learning", algorithm 2) on flat buffers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import ParamsT

from kfuse.comm.buckets import Bucket
from kfuse.kernels import PackTable, lamb
from kfuse.optim.flat import FlatOptimizer, _Flat


class FusedLAMB(FlatOptimizer, torch.optim.Optimizer):
    """LAMB, data-parallel: reduces, measures, clips and updates in one go.

    Each parameter tensor moves by lr * |p| / |u| * u, where u is Adam's bias-corrected update plus weight_decay * p;
    where p or u is zero, by lr * u. Parameters must be fp32. `clip_norm` clips the global norm of the mean gradient;
    `skip_nonfinite` leaves a step out where a gradient is not finite, with no host synchronisation.
    """

    _moment_names = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        clip_norm: float | None = None,
        skip_nonfinite: bool = False,
    ) -> None:
        """Raises ValueError for a negative lr, eps or weight_decay, or a beta outside [0, 1)."""
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ValueError(f"{name}={value!r}: must be 0 or more")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas={betas!r}: each must be in [0, 1)")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        torch.optim.Optimizer.__init__(self, params, defaults)
        self._attach(clip_norm, skip_nonfinite)

    def _publish(self, p: Parameter, flat: _Flat, bucket: Bucket, k: int) -> None:
        super()._publish(p, flat, bucket, k)
        self.state[p]["step"] = flat.steps[k]

    def _update_flat(
        self,
        group: dict[str, Any],
        table: PackTable,
        param: Tensor,
        grad: Tensor,
        moments: dict[str, Tensor],
        step: Tensor,
        first: bool,
        scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        beta1, beta2 = group["betas"]
        lamb(
            param,
            grad,
            moments["exp_avg"],
            moments["exp_avg_sq"],
            table,
            step=step,
            lr=float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            maximize=group["maximize"],
            grad_scale=scale,
            found_inf=found_inf,
        )
