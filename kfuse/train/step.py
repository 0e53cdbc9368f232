"""One step's samples: cut into micro-batches, distributed over the workers, fetched, and yielded for their forward.

A micro-batch's random numbers do not depend on the worker that runs it. Those of its forward (dropout) are keyed by
(seed, step, micro-batch), those of fetching it by (seed, epoch, index): `kfuse.data.fetching`.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kfuse.comm import devices
from kfuse.comm.group import CommError
from kfuse.data.dataset import tensors
from kfuse.data.fetching import Fetcher, Task, TaskPlan, micro_batch_sizes, random_key, seed_host, worker_range
from kfuse.optim import DistributedOptimizer


@dataclass(frozen=True)
class StepSamples:
    """The samples of one step, cut into micro-batches and distributed over the workers."""

    epoch: int
    cursor: int
    """Samples of the epoch that were used before this step."""
    indices: np.ndarray
    """int64 [samples], in the order of the epoch."""
    micro_batch: int
    """Samples in each micro-batch; the last one may have fewer."""
    workers: int
    shares: tuple[int, ...] | None = None
    """Weights of the workers; None: all the same."""
    aligned: bool = False
    """Ranges are those for reproducible sums: see `worker_range`."""

    @cached_property
    def sizes(self) -> list[int]:
        """Number of samples of each micro-batch of the step, over all workers."""
        return micro_batch_sizes(len(self.indices), self.micro_batch)

    def range_of(self, rank: int) -> range:
        """The micro-batches that worker `rank` is to run, as indices into `sizes`."""
        return worker_range(len(self.sizes), self.workers, rank, self.shares, self.aligned)

    @property
    def ranges(self) -> tuple[range, ...]:
        """By rank, `range_of` it."""
        return tuple(self.range_of(rank) for rank in range(self.workers))

    def count(self, micro_batches: Iterable[int]) -> int:
        """The samples of these micro-batches."""
        return sum(self.sizes[j] for j in micro_batches)

    def of(self, j: int) -> np.ndarray:
        """Indices of micro-batch j's samples in the data set: int64 [sizes[j]]."""
        return self.indices[j * self.micro_batch : j * self.micro_batch + self.sizes[j]]

    def task(self, j: int) -> Task:
        """What to fetch for micro-batch j: the samples `of(j)`."""
        return Task(self.epoch, self.cursor + j * self.micro_batch, self.sizes[j])

    def task_plan(self, rank: int, batch_size: int, length: int | None, epochs: int | None) -> TaskPlan:
        """What worker `rank` will fetch from this step on, with these settings. length: samples of an epoch."""
        settings = (length, epochs, batch_size, self.micro_batch, self.workers, rank, self.shares, self.aligned)
        return TaskPlan(*settings, self.epoch, self.cursor)


class Step:
    """A step's micro-batches on this worker. Iterating yields each one's batch, inside opt.micro_batch. The body may
    set `loss`, the mean loss of these samples, for the metrics.
    """

    def __init__(
        self,
        number: int,
        samples: StepSamples,
        rank: int,
        members: tuple[int, ...],
        fetcher: Fetcher,
        opt: DistributedOptimizer,
        key_seed: int,
        weigh: Callable[[Any, int], float] | None = None,
        several_backwards: bool = False,
    ) -> None:
        """number: steps completed before this one. members: the workers' numbers, by rank. key_seed: the run's seed.

        weigh(batch, samples): a micro-batch's weight; None: its samples. several_backwards: see opt.micro_batch.
        """
        self.number, self.samples, self.members, self.mine = number, samples, members, samples.range_of(rank)
        self.loss: Tensor | float | None = None
        self.figures: Sequence[Tensor | float] = ()
        """Scalars that are averaged like the loss, in the order of `Statistics.figure_names`."""
        self.data_wait_s = 0.0
        """Seconds spent waiting for data so far."""
        self.data_bytes = 0
        """Bytes of the tensors in the batches so far."""
        self.error: Exception | None = None
        """The exception that ended the step's body early."""
        self._fetcher, self._opt, self._seed = fetcher, opt, key_seed
        self._weigh, self._several_backwards = weigh, several_backwards
        self.began = time.perf_counter()

    def __len__(self) -> int:
        """The number of micro-batches that this worker is to run; 0 where it has none in this step."""
        return len(self.mine)

    def __bool__(self) -> bool:
        return True  # also where this worker has no micro-batch

    @property
    def epoch(self) -> int:
        return self.samples.epoch

    @contextlib.contextmanager
    def micro_batch(self, j: int) -> Iterator[Any]:
        """Micro-batch j's batch, its tensors on this worker's device; a backward within is this micro-batch's."""
        key, device = random_key(self._seed, self.number, j), self._opt.engine.group.device
        started = time.perf_counter()
        fetched, samples = self._fetcher.fetch(self.samples.task(j)), self.samples.sizes[j]
        weight = None if self._weigh is None else self._weigh(fetched, samples)  # before it is on a GPU: no wait
        batch = self._fetcher.to_device(fetched, device)
        self.data_wait_s += time.perf_counter() - started
        self.data_bytes += sum(tensor.nbytes for tensor in tensors(batch))
        seed_forward(device, key)
        self.loss, self.figures = None, ()
        with self._opt.micro_batch(
            samples, j == self.mine[-1], weight=weight, several_backwards=self._several_backwards
        ) as micro_batch:
            yield batch
            micro_batch.loss = self.loss.detach() if isinstance(self.loss, Tensor) else self.loss
            micro_batch.figures = self.figures

    def batch_again(self, j: int) -> Any:
        """Micro-batch j's batch, of any worker's, as `micro_batch` gives it to its forward; it is part of no step."""
        device = self._opt.engine.group.device
        batch = self._fetcher.to_device(self._fetcher.fetch_out_of_turn(self.samples.task(j)), device)
        seed_forward(device, random_key(self._seed, self.number, j))
        return batch

    def __iter__(self) -> Iterator[Any]:
        """For the body of a user's loop. If a worker is lost, the iteration ends early; the step is repeated later."""
        try:
            for j in self.mine:
                with self.micro_batch(j) as batch:
                    yield batch
        except GeneratorExit:  # `steps` raises it, unless the body leaves the outer loop as well
            self.error = RuntimeError(
                f"step {self.number}: the loop over its {len(self)} micro-batches ended early (by `break`, "
                "`next(iter(step))` or an exception that was caught): a step needs all of them"
            )
            raise
        except CommError as error:
            if not self._opt.reducer.leave_to_loop(error):
                raise


def seed_forward(device: torch.device, key: int) -> None:
    """Seeds the global generators of torch (CPU and `device`), numpy and random: a forward draws from them."""
    seed_host(key)
    devices.of(device).seed(key)


@contextlib.contextmanager
def generators_restored(device: torch.device) -> Iterator[None]:
    """On exit, restores the state of the global generators of torch, numpy and random: they belong to the user."""
    cpu, numpy_state, python_state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    on_device = devices.of(device).random_state()
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        devices.of(device).set_random_state(on_device)
