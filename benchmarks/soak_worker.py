"""What the soak's workers run: a small task, and a policy that does what the soak asks, and dies how it asks.

kfuse-run soak_worker.py SETTINGS      # a JSON file, see `main`
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import nn

import kfuse as kf
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


class Obedient(kf.BasePolicy):
    """Batch size by the noise scale; as many workers as the file `requests` says: {"workers": 3}.

    pace_s: a step takes at least so long. marks: a file to which each worker adds when a step begins: the machine's
    monotonic clock (seconds, 8 bytes) and its process (8 bytes).
    """

    is_plan, owned_fields = True, ("batch_size", "workers")  # the same results however busy the machine is

    def __init__(self, requests: str | None = None, pace_s: float = 0.0, marks: str | None = None) -> None:
        self._requests, self._pace_s = None if requests is None else Path(requests), pace_s
        self._adapts = GNSPolicy(every=5)
        self._marks = None if marks is None else Path(marks)
        self._began = time.monotonic()
        if protocol.ENV_WORKER in os.environ:
            signal.signal(RAISE, _raise)
            signal.signal(EXIT, _exit)

    def before_step(self) -> None:
        time.sleep(max(0.0, self._began + self._pace_s - time.monotonic()))
        self._began = time.monotonic()
        if self._marks is not None:
            with self._marks.open("ab", buffering=0) as file:
                file.write(struct.pack("<dq", self._began, os.getpid()))

    def decide(self, signals: Signals) -> Decision | None:
        batch_size = (self._adapts.decide(signals) or Decision()).batch_size
        if self._requests is None:
            return Decision(batch_size=batch_size)
        return Decision(batch_size=batch_size, workers=json.loads(self._requests.read_text())["workers"])


def _raise(*_: object) -> NoReturn:
    raise Struck("struck by the soak")


def _exit(*_: object) -> NoReturn:
    os._exit(3)


def main(settings: dict[str, Any]) -> None:
    """settings: `comm`, `train`, `policy`: arguments of kf.init, the training, `Obedient`; `loop`: by kf.DataLoader."""
    torch.set_num_threads(1)
    kf.init(**settings["comm"])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    opt = kf.FusedAdamW(model.parameters(), lr=0.003, clip_norm=0.5)
    data, policy = blobs().train, Obedient(**settings["policy"])
    if not settings["loop"]:
        kf.fit(model, data, opt, policy, **settings["train"])
        return
    for step in kf.DataLoader(model, data, opt, policy=policy, **settings["train"]):
        for x, y in step:
            step.loss = F.cross_entropy(model(x), y)
            step.loss.backward()
        opt.step()
        opt.zero_grad()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
