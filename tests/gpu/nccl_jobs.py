"""What the workers of whole jobs over the NCCL double need: a model that installs the double before they join."""

from __future__ import annotations

from pathlib import Path

import nccl_double
import torch
from nccl_double import Faults
from torch import Tensor, nn


class Classifier(nn.Module):
    """For data=digits. log: where the double's records go; None: gloo."""

    def __init__(self, log: str | None = None) -> None:
        super().__init__()
        if log is not None:
            nccl_double.install(Path(log), Faults(loss_is_noticed=False))
        self.first, self.dropout, self.last = nn.Linear(64, 24), nn.Dropout(0.1), nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.dropout(torch.relu(self.first(x.flatten(1)))))
        return out
