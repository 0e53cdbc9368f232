"""AdamW (Loshchilov & Hutter 2019) over all workers' gradients, on flat buffers."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import AdamW
from torch.optim.optimizer import ParamsT

from kfuse.kernels import adamw
from kfuse.optim.adam import AdamMoments, adam_options
from kfuse.optim.flat import Piece


class FusedAdamW(AdamMoments, AdamW):
    """torch.optim.AdamW, data-parallel: reduces, measures, clips and updates in one go.

    Same arithmetic and same state_dict as torch's. Parameters must be fp32. `clip_norm` clips the global norm of the
    mean gradient; `skip_nonfinite` leaves a step out where a gradient is not finite, with no host synchronisation, and
    rank 0 warns. (On CUDA a gradient whose square overflows fp32, above 1e19, counts as not finite.)
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
        AdamW.__init__(self, params, lr, betas, eps, weight_decay, maximize=maximize, fused=True)
        self._attach(clip_norm, skip_nonfinite)

    def _update_piece(
        self, piece: Piece, group: dict[str, Any], scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        options, (m, v) = adam_options(group, self.lr_factor), piece.moments.values()
        adamw(piece.param, piece.grad, m, v, options, step=piece.step, grad_scale=scale, found_inf=found_inf)
