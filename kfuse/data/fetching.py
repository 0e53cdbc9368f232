"""A micro-batch's samples are fetched with random numbers of their own: keyed by (seed, epoch, index).

So what is fetched is a pure function of (seed, epoch, indices). It depends on no step, batch size, worker or process.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import torch

from kfuse.data.dataset import Dataset, MapData
from kfuse.data.sampler import EpochSampler, StreamSampler
from kfuse.data.streams import Stream

_FETCHING = 2**63 - 25
"""In the keys of fetching: sets them apart from the keys of a micro-batch's forward, which have a step in its place."""


class Task(NamedTuple):
    """A micro-batch to fetch: the next `samples` samples from position `cursor` on, in the order of `epoch`."""

    epoch: int
    cursor: int
    samples: int


class Fetcher:
    """Fetches micro-batches of one data set in the caller's thread."""

    def __init__(self, data: Dataset | Stream, sampler: EpochSampler | StreamSampler) -> None:
        """sampler: the order of the samples in each epoch, and the seed."""
        self.data, self._sampler = data, sampler

    def fetch(self, task: Task) -> Any:
        """Returns the task's batch. The global generators of torch, numpy and random are seeded, and left so."""
        indices = self._sampler.indices(*task)
        return fetch(self.data, indices, self._sampler.seed, task.epoch)


def fetch(data: Dataset | Stream, indices: np.ndarray, seed: int, epoch: int) -> Any:
    """Returns the batch of the samples `indices` (int64 `[B]`), a function of these arguments alone.

    Sample i of a map-style data set or a stream is taken with the global generators seeded from (seed, epoch, i).
    Another data set gets a generator seeded from (seed, epoch, indices[0]), and the global generators are seeded from
    the same.
    """
    if isinstance(data, MapData | Stream):
        return data.fetch(indices, before_sample=lambda i: seed_host(random_key(seed, _FETCHING, epoch, i)))
    key = random_key(seed, _FETCHING, epoch, int(indices[0]))
    seed_host(key)
    return data.fetch(indices, torch.Generator().manual_seed(key))


def random_key(seed: int, *numbers: int) -> int:
    """A 63-bit key for random numbers that belong to (seed, *numbers): splitmix64 over all of them."""
    key = seed
    for value in numbers:
        key = (key + 0x9E3779B97F4A7C15 * (value + 1)) & 0xFFFFFFFFFFFFFFFF
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        key ^= key >> 31
    return key >> 1


def seed_host(key: int) -> None:
    """Seeds the global generators of torch (CPU), numpy and random: a data set's transforms draw from them."""
    torch.default_generator.manual_seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    random.seed(key)
