"""A model that would end its process, for tests: `model._target_=exits.Net`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn


class Stop(BaseException):
    """An exception that is no Exception."""


class Net(nn.Module):
    """Raises in its fourth forward, in training or in evaluation.

    how: "exit", "interrupt", "stop", or an exit status.
    """

    def __init__(self, input_shape: Sequence[int], num_classes: int, how: Any = 0, trains: bool = True) -> None:
        super().__init__()
        self.layer, self.left = nn.Linear(8 * 8, num_classes), 3
        self.how, self.trains = how, trains

    def forward(self, x: Tensor) -> Tensor:
        if self.training == self.trains:
            self.left -= 1
        if self.left < 0:
            raise {"interrupt": KeyboardInterrupt(), "stop": Stop("now")}.get(self.how, SystemExit(self.how))
        scores: Tensor = self.layer(x.flatten(1))
        return scores
