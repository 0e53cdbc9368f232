"""The fused optimizers: AdamW, LAMB and SGD over all workers' gradients, on flat buffers.

Each reduces, measures, clips and updates in one go. Parameters are fp32 or bf16. For bf16 ones the optimizer keeps fp32
master weights and fp32 moments: it updates the masters, and writes their rounded values to the parameters in the same
kernel. Where a parameter was changed by other means (`model.load_state_dict`, clipped weights), its new value is taken.
clip_norm: limit of the mean gradient's global norm. skip_nonfinite: leaves a step out where a gradient is not finite,
with no host synchronisation, and rank 0 warns. (On CUDA a gradient whose square overflows fp32, above 1e19, counts as
not finite.)
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import ParamsT

from kfuse.comm.buckets import Bucket
from kfuse.kernels import AdamOptions, SGDOptions, adamw, lamb, sgd
from kfuse.optim.flat import Flat, FlatOptimizer, Piece


class AdamMoments(FlatOptimizer):
    """State as torch's Adam: `exp_avg`, `exp_avg_sq`, and each parameter's number of updates."""

    _moment_names = ("exp_avg", "exp_avg_sq")

    def _publish(self, params: list[Parameter], flat: Flat, bucket: Bucket, which: Collection[int]) -> None:
        super()._publish(params, flat, bucket, which)
        for k in which:
            self.state[params[k]]["step"] = flat.steps[k]

    def _options(self, group: dict[str, Any]) -> AdamOptions:
        """A parameter group's, its learning rate multiplied with `lr_factor`."""
        beta1, beta2 = map(float, group["betas"])
        lr = float(group["lr"]) * self.lr_factor
        return AdamOptions(lr, beta1, beta2, group["eps"], group["weight_decay"], maximize=group["maximize"])


class FusedAdamW(AdamMoments, torch.optim.AdamW):
    """torch.optim.AdamW (Loshchilov & Hutter 2019), data-parallel, with its arithmetic and its state_dict.

    Parameters are fp32, or bf16, which get fp32 master weights. `clip_norm` clips the global norm of the mean gradient;
    `skip_nonfinite` leaves a step out where a gradient is not finite, with no host synchronisation, and rank 0 warns.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        clip_norm: float | None = None,
        skip_nonfinite: bool = True,
    ) -> None:
        torch.optim.AdamW.__init__(self, params, lr, betas, eps, weight_decay, maximize=maximize, fused=True)
        self._attach(clip_norm, skip_nonfinite)

    def _update_piece(
        self, piece: Piece, group: dict[str, Any], scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        options, (m, v) = self._options(group), piece.moments.values()
        adamw(
            piece.param,
            piece.grad,
            m,
            v,
            options,
            step=piece.step,
            grad_scale=scale,
            found_inf=found_inf,
            master=piece.master,
        )


class FusedLAMB(AdamMoments, torch.optim.Optimizer):
    """LAMB (You et al. 2020, "Large Batch Optimization for Deep Learning", algorithm 2), data-parallel.

    Each parameter tensor moves by lr * |p| / |u| * u, where u is Adam's bias-corrected update plus weight_decay * p;
    where p or u is zero, by lr * u. Norms are the master weights' where parameters are bf16. `clip_norm` and
    `skip_nonfinite` are as for FusedAdamW.
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
        options, (m, v) = self._options(group), piece.moments.values()
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
            master=piece.master,
        )


class FusedSGD(FlatOptimizer, torch.optim.SGD):
    """torch.optim.SGD, data-parallel, with its arithmetic and its state_dict.

    Parameters, `clip_norm` and `skip_nonfinite` are as for FusedAdamW.
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
        torch.optim.SGD.__init__(
            self, params, lr, momentum, dampening, weight_decay, nesterov, maximize=maximize, fused=True
        )
        self._attach(clip_norm, skip_nonfinite)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with `fused` None for groups of 16-bit parameters: torch's SGD takes that setting over as it
        loads, and its fused kernel leaves them as they are on the CPU (see `refuse_torchs_fused_sgd`).
        """
        state = super().state_dict()
        for saved, group in zip(state["param_groups"], self.param_groups, strict=True):
            if any(p.dtype != torch.float32 for p in group["params"]):
                saved["fused"] = None
        return state

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
            master=piece.master,
        )
