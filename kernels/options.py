"""What the optimizers' updates are told beside their tensors, in torch.optim's words."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class AdamOptions:
    """Of AdamW and LAMB."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool = False

    @property
    def log_betas(self) -> tuple[float, float]:
        """Natural logarithms; of 0 it is -inf."""
        beta1, beta2 = (math.log(beta) if beta > 0.0 else -math.inf for beta in (self.beta1, self.beta2))
        return beta1, beta2


@dataclass(frozen=True)
class SGDOptions:
    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False
