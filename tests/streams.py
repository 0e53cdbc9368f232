"""Streams for jobs: digits in shards of different lengths, with noise drawn for each sample."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from kfuse.data import DataSplit, load_digits

LENGTHS = (150, 90, 41, 7)


class Digits:
    """The digits as a `kfuse.data.Source`."""

    shards, block = len(LENGTHS), 4

    def __init__(self) -> None:
        self.split = load_digits()

    def open(self, shard: int, position: int) -> Iterator[Any]:
        first = sum(LENGTHS[:shard])
        x, y = self.split.train.fetch(np.arange(first, first + LENGTHS[shard]))
        return ((x[p] + 0.1 * torch.randn(x[p].shape), int(y[p])) for p in range(position, LENGTHS[shard]))


class Unseekable(IterableDataset):
    """The same without a way to seek."""

    def __iter__(self) -> Iterator[Any]:
        source = Digits()
        for shard in range(source.shards):
            yield from source.open(shard, 0)


def split(seekable: bool = True) -> DataSplit:
    """For `data._target_=streams.split`."""
    source = Digits()
    return DataSplit(source if seekable else Unseekable(), source.split.heldout, source.split.spec)
