"""A micro-batch's samples are fetched with random numbers of their own: keyed by (seed, epoch, index).

So what is fetched is a pure function of (seed, epoch, indices). It depends on no step, batch size, worker or process.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from kfuse.data.batch import to_device
from kfuse.data.dataset import Dataset, MapData, TensorData
from kfuse.data.sampler import EpochSampler, StreamSampler, micro_batch_sizes, worker_range
from kfuse.data.streams import Stream

_FETCHING = 2**63 - 25
"""In the keys of fetching: sets them apart from the keys of a micro-batch's forward, which have a step in its place."""
_IDLE_STEPS = 100


class Task(NamedTuple):
    """A micro-batch to fetch: the next `samples` samples from position `cursor` on, in the order of `epoch`."""

    epoch: int
    cursor: int
    samples: int


@dataclass(frozen=True)
class TaskPlan:
    """Which micro-batches are a worker's, step after step, for as long as none of these changes."""

    samples: int | None
    """Samples of the data set; None: a stream, which has no end."""
    epochs: int | None
    """Epochs of this training; None: no limit."""
    batch_size: int
    micro_batch: int
    workers: int
    rank: int
    shares: tuple[int, ...] | None
    """Weights of the workers; None: all the same."""
    aligned: bool
    """Ranges are those for reproducible sums: see `worker_range`."""
    epoch: int = field(compare=False)
    """The position from which on it is asked for. Two plans that differ in nothing else are equal."""
    cursor: int = field(compare=False)

    def tasks(self) -> Iterator[Task]:
        """The worker's micro-batches from this position on, in the order of their use, across epochs.

        Ends after `_IDLE_STEPS` steps without one for this worker.
        """
        epoch, cursor, idle, end = self.epoch, self.cursor, 0, self.samples or sys.maxsize
        while (self.epochs is None or epoch < self.epochs) and idle < _IDLE_STEPS:
            sizes = micro_batch_sizes(min(self.batch_size, end - cursor), self.micro_batch)
            mine = worker_range(len(sizes), self.workers, self.rank, self.shares, self.aligned)
            yield from (Task(epoch, cursor + j * self.micro_batch, sizes[j]) for j in mine)
            idle = 0 if mine else idle + 1
            cursor += sum(sizes)
            if cursor >= end:
                epoch, cursor = epoch + 1, 0


@dataclass(frozen=True)
class Loading:
    """The loader processes of one training worker, which fetch its micro-batches ahead."""

    workers: int = 0
    """How many; 0: none, data are fetched in the step's own thread."""
    prefetch: int = 2
    """Micro-batches that each loader process fetches ahead."""
    init: Callable[[int], object] | None = None
    """Called first in each loader process, with its number from 0."""


class LoaderError(RuntimeError):
    """Loader processes end again and again. The message says which one, and how it ended."""


class Fetcher:
    """Fetches micro-batches of one data set in the caller's thread.

    `kfuse.data.feeder.Feeder` has the same methods, and fetches in loader processes.
    """

    def __init__(self, data: Dataset | Stream, sampler: EpochSampler | StreamSampler) -> None:
        """sampler: the order of the samples in each epoch, and the seed."""
        self.data, self.sampler = data, sampler

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context of a training: outside of it no loader process runs."""
        yield

    def expect(self, plan: TaskPlan) -> None:
        """A step begins. The plan's tasks will be asked for, in their order, until it changes."""

    def fetch(self, task: Task) -> Any:
        """Returns the task's batch, a function of seed and task alone. Changes the state of the global generators."""
        indices = self.sampler.indices(*task)
        return fetch(self.data, indices, self.sampler.seed, task.epoch)

    def fetch_out_of_turn(self, task: Task) -> Any:
        """As `fetch`, for a task that `expect` did not announce: another worker's, or one that was fetched before."""
        return self.fetch(task)

    def to_device(self, batch: Any, device: torch.device) -> Any:
        """Returns the batch that was fetched last, with its tensors on `device`."""
        return to_device(batch, device)


def fetch(data: Dataset | Stream, indices: np.ndarray, seed: int, epoch: int) -> Any:
    """Returns the batch of the samples `indices` (int64 `[B]`), a function of these arguments alone.

    Sample i of a map-style data set or a stream is taken with the global generators seeded from (seed, epoch, i).
    Another data set gets a generator seeded from (seed, epoch, indices[0]), and the global generators are seeded from
    the same.
    """
    if type(data) is TensorData:  # it draws nothing, and seeding takes longer than its fetch
        return data.fetch(indices)
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
