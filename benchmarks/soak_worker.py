"""What the soak's workers run: a small task, and a policy that does what the soak asks, and dies how it asks."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any, NoReturn

import torch

from kfuse import BasePolicy
from kfuse.data import DataSplit, TensorData
from kfuse.elastic import protocol
from kfuse.policies import GNSPolicy
from kfuse.policies.signals import Decision, Signals

RAISE, EXIT = signal.SIGUSR1, signal.SIGUSR2


class Struck(BaseException):
    """An error that no code expects, at whatever line the worker happens to be."""


def blobs(samples: int = 1500, classes: int = 10) -> DataSplit:
    """Ten overlapping clouds of points: float32 `[B, 64]`, int64 `[B]`. The same each time; imports nothing slow."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(samples) % classes
    x = torch.randn(classes, 64, generator=generator)[y] + 2 * torch.randn(samples, 64, generator=generator)
    held = samples // 5
    spec: dict[str, Any] = {"input_shape": (64,), "num_classes": classes}
    return DataSplit(TensorData((x[held:], y[held:])), TensorData((x[:held], y[:held])), spec)


class Obedient(BasePolicy):
    """Batch size by the noise scale; workers and topology as the file `requests` says: {workers, topology, asked}.

    asked: how often a topology was asked for. pace_s: a step takes at least so long. marks: a folder in which each
    worker writes when its steps begin (the machine's monotonic clock, seconds), in a file named by its process number.
    """

    def __init__(self, requests: str | None = None, pace_s: float = 0.0, marks: str | None = None) -> None:
        self._requests, self._pace_s = None if requests is None else Path(requests), pace_s
        self._adapts = GNSPolicy(every=5)
        self._asked = 0
        self._marks = None if marks is None else Path(marks) / str(os.getpid())
        self._began = time.monotonic()
        if protocol.ENV_WORKER in os.environ:
            signal.signal(RAISE, _raise)
            signal.signal(EXIT, _exit)

    def before_step(self) -> None:
        time.sleep(max(0.0, self._began + self._pace_s - time.monotonic()))
        self._began = time.monotonic()
        if self._marks is not None:
            with self._marks.open("a") as file:
                file.write(f"{self._began}\n")

    def decide(self, signals: Signals) -> Decision | None:
        batch_size = (self._adapts.decide(signals) or Decision()).batch_size
        if self._requests is None:
            return Decision(batch_size=batch_size)
        asked = json.loads(self._requests.read_text())
        topology = asked["topology"] if asked["asked"] > self._asked else None
        self._asked = asked["asked"]
        return Decision(batch_size=batch_size, workers=asked["workers"], topology=topology)


def _raise(*_: object) -> NoReturn:
    raise Struck("struck by the soak")


def _exit(*_: object) -> NoReturn:
    os._exit(3)
