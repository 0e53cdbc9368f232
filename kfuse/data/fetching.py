"""Which samples a step uses, and how they are fetched: pure functions of the seed and the position.

The position in an epoch is one number, the cursor: how many of its samples have been used. A step takes the next
`count` of them, cuts them into micro-batches, and gives each worker a contiguous range of those. The number of workers
may change at any step: every sample of an epoch is still used exactly once, and none is padded. Random numbers of a
sample's transforms are keyed by (seed, epoch, index).
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from kfuse.comm.sum_tree import aligned_ranges
from kfuse.data.dataset import Dataset, MapData, TensorData
from kfuse.data.sources import Stream


def permutation(length: int, seed: int, epoch: int = 0) -> np.ndarray:
    """Returns the order of `length` samples in `epoch`, int64 `[length]`, the same on every machine.

    Sorts raw 64-bit outputs of PCG64: NumPy keeps a bit generator's stream stable between versions, which it
    does not promise for `Generator.permutation` (NEP 19). Workers may then run different versions of NumPy.
    """
    seeds = np.random.SeedSequence(seed, spawn_key=(epoch,))
    keys = np.random.PCG64(seeds).random_raw(length)
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)


class EpochSampler:
    """Visits each of `length` samples exactly once an epoch, in an order drawn from (seed, epoch).

    Holds no position: `indices` gives the same answer whenever and wherever it is asked. The order of the last epoch
    asked for is cached (8 bytes a sample). Raises ValueError for an empty data set.
    """

    def __init__(self, length: int, seed: int, order: Callable[[int], np.ndarray | None] | None = None) -> None:
        """order(epoch): as of `Dataset`."""
        if length < 1:
            raise ValueError(f"length={length}: the data must have at least 1 sample")
        self.length, self.seed = length, seed
        self._order = order or (lambda epoch: None)
        self._cached = (-1, np.empty(0, dtype=np.int64))

    def indices(self, epoch: int, cursor: int, count: int) -> np.ndarray:
        """Returns the samples at positions `cursor..cursor+count-1` of `epoch`, int64; fewer at its end."""
        if self._cached[0] != epoch:
            order = self._order(epoch)
            self._cached = (epoch, permutation(self.length, self.seed, epoch) if order is None else order)
        return self._cached[1][cursor : cursor + count].copy()


class StreamSampler:
    """Takes the numbers 0, 1, 2, ... in order: the samples of a stream, which is one epoch without an end."""

    length = None

    def __init__(self, seed: int) -> None:
        """seed: of the random numbers of fetching; the order has none."""
        self.seed = seed

    def indices(self, epoch: int, cursor: int, count: int) -> np.ndarray:
        return np.arange(cursor, cursor + count, dtype=np.int64)


def micro_batch_sizes(count: int, micro: int, parts: int = 1) -> list[int]:
    """Cuts `count` samples into micro-batches of `micro` samples, the last one smaller where it must be.

    parts: how many processes share each. What the last one has beyond a multiple of that are micro-batches of one
    sample, which each of these processes runs: so the mean over them is the mean over the samples.
    """
    full, rest = divmod(count, micro)
    alone = rest % parts
    return [micro] * full + [rest - alone] * (rest > alone) + [1] * alone


def worker_range(
    micro_batches: int, workers: int, rank: int, weights: Sequence[int] | None = None, aligned: bool = False
) -> range:
    """Returns the contiguous range of micro-batches of worker `rank`; together they cover each exactly once.

    Without `weights` (or with equal ones) the shares differ by at most one. With them, shares are in
    proportion and less than one micro-batch off. Rank 0, the leader, always has one; other shares may be empty.
    aligned: for reproducible sums. The ranges are those of `kfuse.comm.sum_tree`, which need little memory: the largest
    share is ceil(micro_batches / workers) where that is enough, and at most 1.25 of the mean share. Weighted shares
    keep their proportion instead, and may need more memory.
    """
    if weights is None and aligned and micro_batches >= workers:
        return aligned_ranges(micro_batches, workers)[rank]
    if weights is None:
        return range(-(-micro_batches * rank // workers), -(-micro_batches * (rank + 1) // workers))
    bounds = list(accumulate(weights, initial=0))
    return range(-(-micro_batches * bounds[rank] // bounds[-1]), -(-micro_batches * bounds[rank + 1] // bounds[-1]))


# In the keys of fetching: sets them apart from the keys of a micro-batch's forward, which have a step in its place.
_FETCHING = 2**63 - 25
_IDLE_STEPS = 100


class Task(NamedTuple):
    """A micro-batch to fetch: the next `samples` samples from position `cursor` on, in the order of `epoch`."""

    epoch: int
    cursor: int
    samples: int


@dataclass
class TaskPlan:
    """Which micro-batches are a worker's, step after step, for as long as none of these changes."""

    samples: int | None  # of the data set; None: a stream, which has no end
    epochs: int | None  # of this training; None: no limit
    batch_size: int
    micro_batch: int
    workers: int
    rank: int
    shares: tuple[int, ...] | None  # weights of the workers; None: all the same
    aligned: bool  # for reproducible sums: see `worker_range`
    parts: int  # processes of each worker, which share each micro-batch
    # The position from which on tasks are asked for. Two plans that differ in nothing else are equal.
    epoch: int = field(compare=False)
    cursor: int = field(compare=False)

    def tasks(self) -> Iterator[Task]:
        """The worker's micro-batches from this position on, in the order of their use, across epochs.

        Ends after `_IDLE_STEPS` steps without one for this worker.
        """
        epoch, cursor, idle, end = self.epoch, self.cursor, 0, self.samples or sys.maxsize
        while (self.epochs is None or epoch < self.epochs) and idle < _IDLE_STEPS:
            sizes = micro_batch_sizes(min(self.batch_size, end - cursor), self.micro_batch, self.parts)
            mine = worker_range(len(sizes), self.workers, self.rank, self.shares, self.aligned)
            starts = [*accumulate(sizes, initial=cursor)]
            yield from (Task(epoch, starts[j], sizes[j]) for j in mine)
            idle = 0 if mine else idle + 1
            cursor += sum(sizes)
            if cursor >= end:
                epoch, cursor = epoch + 1, 0


@dataclass(frozen=True)
class Loading:
    """The loader processes of one training worker, which fetch its micro-batches ahead."""

    workers: int = 0  # how many; 0: none, data are fetched in the step's own thread
    prefetch: int = 2  # micro-batches that each loader process fetches ahead
    init: Callable[[int], object] | None = None  # called first in each loader process, with its number from 0


class LoaderError(RuntimeError):
    """Loader processes end again and again. The message says which one, and how it ended."""


class Fetcher:
    """Fetches micro-batches of one data set in the caller's thread. `Feeder` does the same in loader processes."""

    def __init__(
        self, data: Dataset | Stream, sampler: EpochSampler | StreamSampler, part: int = 0, parts: int = 1
    ) -> None:
        """sampler: the order of the samples in each epoch, and the seed. part: which of the equal parts of each
        micro-batch it fetches.
        """
        self.data, self.sampler, self.part, self.parts = data, sampler, part, parts

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context of a training: outside of it no loader process runs."""
        yield

    def expect(self, plan: TaskPlan) -> None:
        """A step begins. The plan's tasks will be asked for, in their order, until it changes."""

    def fetch(self, task: Task) -> Any:
        """Returns the task's batch, a function of seed and task alone. Changes the state of the global generators."""
        indices = self.sampler.indices(*task)
        if self.parts > 1 and len(indices) > 1:  # a single sample all of them run
            indices = indices[self.part :: self.parts]
        return fetch(self.data, indices, self.sampler.seed, task.epoch)

    def fetch_out_of_turn(self, task: Task) -> Any:
        """As `fetch`, for a task that `expect` did not announce: another worker's, or one that was fetched before."""
        return self.fetch(task)


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
