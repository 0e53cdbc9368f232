"""LAMB (You et al. 2020, "Large Batch Optimization for Deep Learning", algorithm 2) on flat buffers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from kfuse.kernels import lamb
from kfuse.optim.adam import AdamMoments, adam_options
from kfuse.optim.flat import Piece


class FusedLAMB(AdamMoments, torch.optim.Optimizer):
    """LAMB, data-parallel: reduces, measures, clips and updates in one go.

    Each parameter tensor moves by lr * |p| / |u| * u, where u is Adam's bias-corrected update plus weight_decay * p;
    where p or u is zero, by lr * u. Parameters must be fp32. `clip_norm` clips the global norm of the mean gradient;
    `skip_nonfinite` leaves a step out where a gradient is not finite, with no host synchronisation, and rank 0 warns.
    (On CUDA a gradient whose square overflows fp32, above 1e19, counts as not finite.)
    """

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
        skip_nonfinite: bool = True,
    ) -> None:
        """Raises ValueError for a negative lr, eps or weight_decay, or a beta outside [0, 1)."""
        self.check_arguments(lr, betas, eps, weight_decay)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        torch.optim.Optimizer.__init__(self, params, defaults)
        self._attach(clip_norm, skip_nonfinite)

    @staticmethod
    def check_arguments(
        lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6, weight_decay: float = 1e-2, **_: object
    ) -> None:
        """Raises ValueError as the constructor does, which calls it; it needs no parameters and no workers."""
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ValueError(f"{name}={value!r}: must be 0 or more")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas={betas!r}: each must be in [0, 1)")

    def _update_piece(
        self, piece: Piece, group: dict[str, Any], scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        options, (m, v) = adam_options(group, self.lr_factor), piece.moments.values()
        lamb(
            piece.param,
            piece.grad,
            m,
            v,
            piece.table,
            options,
            step=piece.step,
            grad_scale=scale,
            found_inf=found_inf,
        )
