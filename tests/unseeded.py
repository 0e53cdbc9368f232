"""Models as a script that sets no seed makes them, or that do not work; a policy that spoils one worker's."""

from __future__ import annotations

from typing import Any

import torch

import kfuse as kf
from kfuse.models import MLP
from kfuse.optim.base import latest_optimizer


class SpoilsRank1(kf.BasePolicy):
    """In step 13 rank 1's first parameters change, as by a fault of memory."""

    def __init__(self) -> None:
        self.step = 0

    def after_step(self) -> None:
        self.step += 1
        opt = latest_optimizer()
        if self.step == 13 and kf.rank() == 1 and opt is not None:
            opt.param_groups[0]["params"][0].data[0, 0] += 1e-6


class NotFinite(MLP):
    """Whose first gradients are not finite."""

    def __init__(self, input_shape: Any, num_classes: int) -> None:
        super().__init__(input_shape, num_classes, hidden=[8])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * float("nan")
