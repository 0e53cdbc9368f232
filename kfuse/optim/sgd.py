"""Stochastic gradient descent with momentum over all workers' gradients, on flat buffers."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD
from torch.optim.optimizer import ParamsT

from kfuse.comm.buckets import Bucket
from kfuse.kernels import SGDOptions, sgd
from kfuse.optim.flat import FlatOptimizer, Piece, _Flat


class FusedSGD(FlatOptimizer, SGD):
    """torch.optim.SGD, data-parallel: reduces, measures, clips and updates in one go.

    Same arithmetic and same state_dict as torch's. Parameters must be fp32. `clip_norm` clips the global norm of the
    mean gradient; `skip_nonfinite` leaves a step out where a gradient is not finite, with no host synchronisation.
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
        skip_nonfinite: bool = False,
    ) -> None:
        SGD.__init__(self, params, lr, momentum, dampening, weight_decay, nesterov, maximize=maximize, fused=True)
        self._attach(clip_norm, skip_nonfinite)

    def _publish(self, p: Parameter, flat: _Flat, bucket: Bucket, k: int) -> None:
        if self.param_groups[self._group_of[bucket.layout.params[k]]]["momentum"] != 0:
            super()._publish(p, flat, bucket, k)

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
