"""Stochastic gradient descent with momentum over all workers' gradients, on flat buffers."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import SGD
from torch.optim.optimizer import ParamsT

from kfuse.kernels import SGDOptions, sgd
from kfuse.optim.flat import FlatOptimizer, Piece


class FusedSGD(FlatOptimizer, SGD):
    """torch.optim.SGD, data-parallel: reduces, measures, clips and updates in one go.

    Same arithmetic and same state_dict as torch's. Parameters must be fp32. `clip_norm` clips the global norm of the
    mean gradient; `skip_nonfinite` leaves a step out where a gradient is not finite, with no host synchronisation, and
    rank 0 warns. (On CUDA a gradient whose square overflows fp32, above 1e19, counts as not finite.)
    """

    _moment_names = ("momentum_buffer",)

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        clip_norm: float | None = None,
        skip_nonfinite: bool = True,
    ) -> None:
        SGD.__init__(self, params, lr, momentum, dampening, weight_decay, nesterov, maximize=maximize, fused=True)
        self._attach(clip_norm, skip_nonfinite)

    def _keeps_state(self, group: dict[str, Any]) -> bool:
        """As torch's: without momentum no buffer is made, and one that is there is left alone."""
        return bool(group["momentum"] != 0)

    def _skips_first(self, group: dict[str, Any], found_inf: Tensor | None) -> bool:
        """With dampening a buffer of zeros does not give the first update: then a CUDA device is asked too."""
        if found_inf is not None and group["dampening"] != 0:
            return bool(found_inf.item())
        return super()._skips_first(group, found_inf)

    def _update_piece(
        self, piece: Piece, group: dict[str, Any], scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        options = SGDOptions(
            float(group["lr"]) * self.lr_factor,
            group["momentum"],
            group["dampening"],
            group["weight_decay"],
            group["nesterov"],
            group["maximize"],
        )
        buffer = piece.moments["momentum_buffer"] if options.momentum != 0 else None
        sgd(
            piece.param,
            piece.grad,
            buffer,
            options,
            first_step=piece.first,
            grad_scale=scale,
            found_inf=found_inf,
        )
