"""The fused optimizers: AdamW, LAMB and SGD over all workers' gradients, on flat buffers.

For bf16 parameters the optimizer keeps fp32 master weights and fp32 moments: it updates the masters, and writes their
rounded values to the parameters in the same kernel. Where a parameter was changed by other means
(`model.load_state_dict`, clipped weights), its new value is taken.
"""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT

from kfuse.optim.base import DistributedOptimizer
from kfuse.optim.flat_updates import FlatUpdates
from kfuse.optim.refuse import refuse_options
from kfuse.optim.rules import AdamWRule, LambRule, SGDRule


class FusedAdamW(DistributedOptimizer, torch.optim.AdamW):
    """torch.optim.AdamW (Loshchilov & Hutter 2019), data-parallel, with its arithmetic and its state_dict.

    Parameters are fp32, or bf16, which get fp32 master weights. clip_norm: limit of the mean gradient's global norm.
    skip_nonfinite: leaves a step out where a gradient is not finite, with no host synchronisation; rank 0 warns. (On
    CUDA a gradient whose square overflows fp32, above 1e19, counts as not finite.)
    """

    shards_state = True

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
        self._attach(FlatUpdates(self, AdamWRule()), clip_norm, skip_nonfinite)


class FusedLAMB(DistributedOptimizer):
    """LAMB (You et al. 2020, "Large Batch Optimization for Deep Learning", algorithm 2), data-parallel.

    Each parameter tensor moves by lr * |p| / |u| * u, where u is Adam's bias-corrected update plus weight_decay * p;
    where p or u is zero, by lr * u. Norms are the master weights' where parameters are bf16. `clip_norm` and
    `skip_nonfinite` are as for FusedAdamW.
    """

    shards_state = True
    check_arguments = staticmethod(refuse_options)  # it needs no parameters and no workers

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
        self._attach(FlatUpdates(self, LambRule()), clip_norm, skip_nonfinite)


class FusedSGD(DistributedOptimizer, torch.optim.SGD):
    """torch.optim.SGD, data-parallel, with its arithmetic and its state_dict.

    Parameters, `clip_norm` and `skip_nonfinite` are as for FusedAdamW.
    """

    shards_state = True

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
        # Not fused=True: torch's SGD would take it over with our state, and its fused kernel leaves bf16 parameters on
        # the CPU as they are, up to torch 2.13 (pytorch issue 191763).
        torch.optim.SGD.__init__(self, params, lr, momentum, dampening, weight_decay, nesterov, maximize=maximize)
        self._attach(FlatUpdates(self, SGDRule()), clip_norm, skip_nonfinite)
