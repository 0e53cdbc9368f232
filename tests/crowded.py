"""A model whose workers hold each other up when they are too many: `model._target_=crowded.Crowded`, for tests."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

import kfuse as kf
from kfuse.models import MLP


class Crowded(MLP):
    """With more than `most` workers each forward of a training step takes `seconds` longer.

    Many times as long as the step itself takes also on a busy machine: so how the throughput depends on the number of
    workers is no matter of how processes are scheduled.
    """

    def __init__(self, most: int, seconds: float, input_shape: Sequence[int], num_classes: int) -> None:
        super().__init__(input_shape, num_classes, hidden=[24])
        self._most, self._seconds = most, seconds

    def forward(self, x: Tensor) -> Tensor:
        if self.training and kf.size() > self._most:
            time.sleep(self._seconds)
        return super().forward(x)
