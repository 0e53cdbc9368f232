"""A worker that computes wrongly, for tests: `model._target_=faulty.Faulty policy._target_=faulty.ReplaceCorrupt`."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import kfuse as kf
from kfuse.elastic import protocol

wrong_backwards = 0  # so many of this process's coming backwards through a `Faulty` have a flipped bit


class Faulty(nn.Module):
    """An MLP with BatchNorm and dropout. Worker number `worker`, -1 for none, flips a bit in every gradient."""

    def __init__(self, input_shape: Sequence[int], num_classes: int, worker: int = -1) -> None:
        super().__init__()
        first = nn.Linear(torch.Size(input_shape).numel(), 24)
        self.first = nn.Sequential(nn.Flatten(), first)
        self.norm = nn.BatchNorm1d(24)
        self.last = nn.Sequential(nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, num_classes))
        always = worker >= 0 and os.environ.get(protocol.ENV_WORKER) == str(worker)

        def wrong(grad: Tensor) -> Tensor:
            global wrong_backwards
            if not (always or wrong_backwards):
                return grad
            wrong_backwards -= not always
            grad = grad.clone(memory_format=torch.contiguous_format)
            grad.view(-1).view(torch.int32)[17] ^= 1 << 2
            return grad

        first.weight.register_hook(wrong)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        features = self.first(x)
        if not self.training or len(x) > 1:  # one sample has no variance
            features = self.norm(features)
        scores: Tensor = self.last(features)
        return scores


class ReplaceCorrupt(kf.BasePolicy):
    """A new worker for each that an audit has named. Until it is there, steps are slow: training must not end first."""

    def decide(self, signals: kf.Signals) -> kf.Decision | None:
        if not signals.corrupt_workers:
            return None
        time.sleep(0.1)
        return kf.Decision(replace=signals.corrupt_workers[0])
