"""A worker on a slow device, for tests: `model._target_=uneven.Uneven policy._target_=uneven.ReplaceStragglers`."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

import kfuse as kf
from kfuse.elastic import protocol
from kfuse.models import MLP

SLOW_WORKER = 1


class Uneven(MLP):
    """Worker 1 is slow. Each worker counts the micro-batches that it was given in a file of its own.

    Worker 1 takes 40 ms longer for each one, and four times as long as the work itself takes: however busy the machine
    is, the worker is slow beside the others.
    """

    def __init__(self, directory: str, input_shape: Sequence[int], num_classes: int) -> None:
        super().__init__(input_shape, num_classes, hidden=[24])
        self._worker = int(os.environ.get(protocol.ENV_WORKER, "-1"))
        self._file = Path(directory, f"worker-{self._worker}")
        self._woke = time.monotonic()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            if self._worker == SLOW_WORKER:
                time.sleep(0.04 + 4 * min(time.monotonic() - self._woke, 0.2))
                self._woke = time.monotonic()
            with self._file.open("a") as file:
                file.write("x")
        return super().forward(x)


class ReplaceStragglers(kf.BasePolicy):
    """A new worker for each that stays slow."""

    def __init__(self, active: bool = True) -> None:
        self.active = active

    def decide(self, signals: kf.Signals) -> kf.Decision | None:
        known = [(ratio, rank) for rank, ratio in enumerate(signals.throughput) if ratio is not None]
        ratio, rank = min(known, default=(1.0, 0))
        return kf.Decision(replace=rank) if self.active and ratio < 0.8 else None
