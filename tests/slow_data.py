"""A data set whose samples take a while, for `data._target_=slow_data.split`."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from kfuse.data import DataSplit


class Slow:
    """Pairs of 8 numbers and a class, each after `wait_s` seconds."""

    def __init__(self, samples: int, wait_s: float) -> None:
        self.x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(0))
        self.y = (self.x[:, 0] > 0).long()
        self.wait_s = wait_s

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self.wait_s)
        return self.x[index], self.y[index]


def split(wait_s: float) -> DataSplit:
    """256 samples to train on, 16 held out."""
    spec = {"input_shape": (8,), "num_classes": 2}
    return DataSplit(Slow(256, wait_s), Slow(16, 0.0), spec)
