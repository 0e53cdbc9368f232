"""One step's samples: cut into micro-batches, distributed over the workers, fetched with seeded random numbers.

Random numbers belong to a micro-batch, whichever worker runs it: they are keyed by (seed, step, micro-batch).
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kfuse.comm.group import CommError
from kfuse.comm.plan import StepPlan
from kfuse.comm.tail import Announcement
from kfuse.data import Dataset, Stream
from kfuse.data.batch import to_device
from kfuse.data.sampler import micro_batch_sizes, worker_range
from kfuse.optim import DistributedOptimizer


@dataclass(frozen=True)
class StepSamples:
    """The samples of one step, cut into micro-batches and distributed over the workers."""

    indices: np.ndarray
    """int64 [samples], in the order of the epoch."""
    micro_batch: int
    """Samples in each micro-batch; the last one may have fewer."""
    workers: int
    shares: tuple[int, ...] | None = None
    """Weights of the workers; None: all the same."""

    @cached_property
    def sizes(self) -> list[int]:
        """Number of samples of each micro-batch of the step, over all workers."""
        return micro_batch_sizes(len(self.indices), self.micro_batch)

    def range_of(self, rank: int) -> range:
        """The micro-batches of worker `rank`, as indices into `sizes`."""
        return worker_range(len(self.sizes), self.workers, rank, self.shares)

    def of(self, j: int) -> np.ndarray:
        """Indices of micro-batch j's samples in the data set: int64 [sizes[j]]."""
        return self.indices[j * self.micro_batch : j * self.micro_batch + self.sizes[j]]

    def plan(self, announcement: Announcement, local_rank: int | None = None) -> StepPlan:
        """The step's plan for the engine. local_rank: this worker's rank in a local step (local SGD); else None."""
        ranges = tuple(self.range_of(rank) for rank in range(self.workers))
        local = None if local_rank is None else sum(self.sizes[j] for j in ranges[local_rank])
        return StepPlan(len(self.indices), ranges, local, announcement)


class Step:
    """A step's micro-batches on this worker. Iterating yields each one's batch, inside opt.micro_batch.

    Set `loss` (the mean loss of these samples) in the body to have it in the metrics.
    """

    def __init__(
        self,
        number: int,
        samples: StepSamples,
        rank: int,
        data: Dataset | Stream,
        opt: DistributedOptimizer,
        key_seed: int,
    ) -> None:
        """number: steps taken before this one. key_seed: the run's seed, from which random numbers are derived."""
        self.number, self.samples, self.mine = number, samples, samples.range_of(rank)
        self.loss: Tensor | float | None = None
        self.data_wait_s = 0.0
        """Seconds spent fetching data so far."""
        self.error: Exception | None = None
        """The exception that ended the step's body early."""
        self._data, self._opt, self._seed = data, opt, key_seed
        self._started = time.perf_counter()

    def seconds(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self._started

    @contextlib.contextmanager
    def micro_batch(self, j: int) -> Iterator[Any]:
        """Micro-batch j's batch, its tensors on this worker's device; a backward within is this micro-batch's.

        The generators are seeded for it before its samples are fetched, and again before its forward.
        """
        key, device = micro_batch_key(self._seed, self.number, j), self._opt.engine.group.device
        started = time.perf_counter()
        seed_host(key)
        batch = to_device(self._data.fetch(self.samples.of(j), torch.Generator().manual_seed(key)), device)
        self.data_wait_s += time.perf_counter() - started
        seed_device(device, key)
        self.loss = None
        with self._opt.micro_batch(samples=self.samples.sizes[j], last=j == self.mine[-1]) as micro_batch:
            yield batch
            micro_batch.loss = self.loss.detach() if isinstance(self.loss, Tensor) else self.loss

    def __iter__(self) -> Iterator[Any]:
        """For the body of a user's loop. If a worker is lost, the iteration ends early; the step is repeated later."""
        try:
            for j in self.mine:
                with self.micro_batch(j) as batch:
                    yield batch
        except CommError as error:
            if not self._opt.leave_to_loop(error):
                raise


def micro_batch_key(seed: int, step: int, micro_batch: int) -> int:
    """A 63-bit key for the random numbers of one micro-batch (splitmix64 over the three)."""
    key = seed
    for value in (step, micro_batch):
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


def seed_device(device: torch.device, key: int) -> None:
    """Seeds torch's default generators of the CPU and of `device` (dropout draws from them)."""
    torch.default_generator.manual_seed(key)
    if device.type == "cuda":
        torch.cuda.manual_seed(key)


@contextlib.contextmanager
def generators_restored(device: torch.device) -> Iterator[None]:
    """On exit, restores the state of the global generators of torch, numpy and random: they belong to the user."""
    cpu, numpy_state, python_state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)
