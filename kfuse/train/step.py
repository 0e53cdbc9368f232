"""One step's samples: cut into micro-batches, distributed over the workers, fetched, and yielded for their forward.

A micro-batch's random numbers do not depend on the worker that runs it. Those of its forward (dropout) are keyed by
(seed, step, micro-batch), those of fetching it by (seed, epoch, index): `kfuse.data.fetching`.

A worker's share follows its throughput, an exponentially weighted mean. Every worker computes the same shares, from the
times in the steps' tails. (Micro-batches in proportion to speed: VirtualFlow, Or et al. 2022; the straggler's
threshold: Or et al. 2020.)
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kfuse.comm import devices
from kfuse.comm.group import CommError
from kfuse.comm.step import MicroBatch
from kfuse.data import EpochSampler, StreamSampler
from kfuse.data.dataset import tensors, to_device
from kfuse.data.fetching import Fetcher, Task, TaskPlan, micro_batch_sizes, random_key, worker_range
from kfuse.membership import Session
from kfuse.settings.tree import TrainSettings
from kfuse.statistics.figures import StepContext
from kfuse.statistics.step_stats import StepStats
from kfuse.train.progress import Progress, Throughput

if TYPE_CHECKING:
    from kfuse.optim import DistributedOptimizer
    from kfuse.train.arguments import TrainArguments
    from kfuse.train.passes import Passes


@dataclass
class StepSamples:
    """The samples of one step, cut into micro-batches and distributed over the workers."""

    epoch: int
    cursor: int  # samples of the epoch that were used before this step
    indices: np.ndarray  # int64 [samples], in the order of the epoch
    micro_batch: int  # samples in each micro-batch; the last one may have fewer
    workers: int
    shares: tuple[int, ...] | None = None  # weights of the workers; None: all the same
    aligned: bool = False  # ranges are those for reproducible sums: see `worker_range`
    parts: int = 1  # processes of each worker, which share each micro-batch
    sizes: list[int] = field(init=False)  # number of samples of each micro-batch of the step, over all workers
    ranges: tuple[range, ...] = field(init=False)  # the micro-batches that each worker is to run

    def __post_init__(self) -> None:
        self.sizes = micro_batch_sizes(len(self.indices), self.micro_batch, self.parts)
        split = len(self.sizes), self.workers
        self.ranges = tuple([worker_range(*split, rank, self.shares, self.aligned) for rank in range(self.workers)])

    def of(self, j: int) -> np.ndarray:
        """Indices of micro-batch j's samples in the data set: int64 [sizes[j]]."""
        task = self.task(j)
        start = task.cursor - self.cursor
        return self.indices[start : start + task.samples]

    def task(self, j: int) -> Task:
        """What to fetch for micro-batch j: the samples `of(j)`."""
        start = j * self.micro_batch if self.parts == 1 else sum(self.sizes[:j])
        return Task(self.epoch, self.cursor + start, self.sizes[j])

    def task_plan(self, rank: int, batch_size: int, length: int | None, epochs: int | None) -> TaskPlan:
        """What worker `rank` will fetch from this step on, with these settings. length: samples of an epoch."""
        settings = (length, epochs, batch_size, self.micro_batch, self.workers, rank, self.shares, self.aligned)
        return TaskPlan(*settings, self.parts, self.epoch, self.cursor)


class Step:
    """A step's micro-batches on this worker. Iterating yields each one's batch, inside opt.micro_batch. The body may
    set `loss`, the mean loss of these samples, for the metrics.
    """

    def __init__(
        self,
        number: int,
        samples: StepSamples,
        session: Session,
        fetcher: Fetcher,
        given: TrainArguments,
        passes: Passes | None,
        ends_epoch: bool = False,
    ) -> None:
        """number: steps completed before this one. passes: where several optimizers step in the body.

        ends_epoch: whether its samples are the epoch's last ones.
        """
        self.ends_epoch = ends_epoch
        self.number = number
        self.samples, self.mine = samples, samples.ranges[session.group.rank]
        self.members = tuple(session.workers)  # the workers' numbers, by rank
        self.loss: Tensor | float | None = None
        self.figures: Sequence[Tensor | float] = ()  # averaged like the loss, in the order of `Statistics.figure_names`
        self.data_wait_s = 0.0  # seconds spent waiting for data so far
        self.data_bytes = 0  # bytes of the tensors in the batches so far; torch does not tell them of sparse ones
        self.error: Exception | None = None  # the exception that ended the step's body early
        self._fetcher, self._opt, self._objective, self._passes = fetcher, given.opt, given.objective, passes
        self._seed, self._several_backwards = given.settings["seed"], given.several_backwards
        self._part, self._parts = session.part
        self._fetched = set[int]()  # micro-batches that were fetched, by number: an earlier pass has used them
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
    def micro_batch(self, j: int, opt: DistributedOptimizer) -> Iterator[Any]:
        """Micro-batch j's batch, its tensors on this worker's device; a backward within is this micro-batch's.

        opt: the optimizer whose pass it is.
        """
        device = opt.engine.group.device
        started = time.perf_counter()
        fetch = self._fetcher.fetch_out_of_turn if j in self._fetched else self._fetcher.fetch
        fetched, samples = fetch(self.samples.task(j)), self.samples.sizes[j]
        self._fetched.add(j)
        weight = self._objective.weight(fetched, samples)  # before it is on a GPU: no wait
        batch = to_device(fetched, device)
        self.data_wait_s += time.perf_counter() - started
        for each in tensors(batch):
            self.data_bytes += 0 if each.is_sparse else each.nbytes
        seed_forward(device, random_key(self._seed, self.number, j * self._parts + self._part))
        self.loss, self.figures = None, ()
        with MicroBatch(weight, j == self.mine[-1], self._several_backwards, opt.engine) as micro_batch:
            yield batch
            micro_batch.loss, micro_batch.figures = self.loss, self.figures
        if self._passes is not None:
            self._passes.drop_others(opt)

    def batch_again(self, j: int) -> Any:
        """Micro-batch j's batch, of any worker's, as `micro_batch` gives it to its forward; it is part of no step."""
        device = self._opt.engine.group.device
        batch = to_device(self._fetcher.fetch_out_of_turn(self.samples.task(j)), device)
        seed_forward(device, random_key(self._seed, self.number, j))
        return batch

    def __iter__(self) -> Iterator[Any]:
        """For the body of a user's loop. If a worker is lost, the iteration ends early; the step is repeated later."""
        if self._passes is not None:
            raise RuntimeError(
                "this kf.DataLoader has several optimizers: write `for batch in step.micro_batches(opt)`, then "
                "opt.step(), for one after the other; of several that one loss trains make one: kf.Optimizer(a, b)"
            )
        return self._yielded(self._opt)

    def micro_batches(self, opt: DistributedOptimizer) -> Iterator[Any]:
        """A pass over the step's micro-batches for `opt`, one of several optimizers, whose step() follows it.

        Each pass has the same samples, fetched anew, and its forwards begin with the same random state: noise that is
        drawn first is the same in each. A backward counts for the parameters of `opt` alone. If a worker is lost the
        body comes again: the pass is empty then if the update was made before. Raises as `Passes.begin`.
        """
        if self._passes is None:
            if opt is not self._opt:
                raise ValueError("step.micro_batches(opt): opt must be the optimizer given to kf.DataLoader")
            return iter(self)
        return self._yielded(opt) if self._passes.begin(opt) else iter(())

    def _yielded(self, opt: DistributedOptimizer) -> Iterator[Any]:
        try:
            for j in self.mine:
                with self.micro_batch(j, opt) as batch:
                    yield batch
            if not self.mine:  # no backward of this worker's has set p.grad, which the body may clip
                opt.synchronize()
        except GeneratorExit:  # `steps` raises it, unless the body leaves the outer loop as well
            self.error = RuntimeError(
                f"step {self.number}: the loop over its {len(self)} micro-batches ended early (by `break`, "
                "`next(iter(step))` or an exception that was caught): a step needs all of them"
            )
            raise
        except CommError as error:
            if not opt.reducer.leave_to_loop(error):
                raise


def seed_forward(device: torch.device, key: int) -> None:
    """Seeds the global generators of torch, on the CPU and `device`: a forward draws from them. Those of numpy and of
    Python are seeded where samples are read: seeding all of them takes six times as long.
    """
    torch.default_generator.manual_seed(key)
    if (there := devices.of(device)).asynchronous:
        there.seed(key)


DECAY = 0.98  # of the mean, a step
SLOW = 0.8  # of the median's throughput: below it a worker is a straggler
_RECOVERED = 0.9  # of the median's: from here on it is no longer one
LASTS_S = 10.0  # a straggler is reported once it has been one for so long: on a busy machine each worker is for moments
WARM = 10  # steps that a worker is measured in before its throughput is used
_SHARE_STEPS = 16  # a share is a multiple of 1/16 of the median's: small changes of speed change no share
_SMALLEST_SHARE = 2  # sixteenths: the slowest worker too gets micro-batches, else its speed could not be measured
_IDLE_RECOVERY = 0.02  # a step: a worker without a micro-batch is assumed to close this part of its gap to the median


def measured(known: Mapping[int, tuple[float, int]], workers: Sequence[int], seconds: Sequence[float]) -> Throughput:
    """The means after another step, in which worker `workers[r]` took `seconds[r]` for a micro-batch (0: unknown)."""
    out: Throughput = {}
    relative = relative_throughput(known, workers)
    for worker, taken, ratio in zip(workers, seconds, relative, strict=True):
        mean, steps = known.get(worker, (0.0, 0))
        if taken > 0:
            share = max(1 - DECAY, 1 / (steps + 1))  # of the first steps it is the plain mean
            out[worker] = (mean + share * (1 / taken - mean), steps + 1)
        elif ratio is not None and ratio < 1:
            out[worker] = (mean + _IDLE_RECOVERY * (mean / ratio - mean), steps)
        elif steps:
            out[worker] = (mean, steps)
    return out


def relative_throughput(known: Mapping[int, tuple[float, int]], workers: Sequence[int]) -> list[float | None]:
    """Each worker's throughput over the median of all; None while it is not known well enough."""
    means = [known[worker][0] for worker in workers if worker in known and known[worker][1] >= WARM]
    if len(workers) < 2 or len(means) < len(workers):
        return [None] * len(workers)
    # The upper median: with two workers the faster one is the reference, so that the slower one can be a straggler.
    median = sorted(means)[len(means) // 2]
    return [mean / median for mean in means]


def shares(relative: Sequence[float | None]) -> tuple[int, ...] | None:
    """Each rank's weight for `worker_range`, in sixteenths; None (equal shares) unless a worker is a straggler."""
    known = [ratio for ratio in relative if ratio is not None]
    if len(known) < len(relative) or min(known, default=1.0) >= SLOW:
        return None
    return tuple(max(_SMALLEST_SHARE, round(_SHARE_STEPS * ratio)) for ratio in known)


def stragglers(
    workers: Sequence[int], relative: Sequence[float | None], before: Mapping[int, float], seconds: float
) -> dict[int, float]:
    """The stragglers by number, and for how many seconds each has been one. before: the same after the step before,
    which took so many seconds. A straggler stays one until its throughput reaches `_RECOVERED`.
    """
    return {
        worker: before.get(worker, 0.0) + seconds
        for worker, ratio in zip(workers, relative, strict=True)
        if ratio is not None and ratio < (_RECOVERED if worker in before else SLOW)
    }


def micro_batch_of(settings: TrainSettings, batch_size: int, workers: int) -> int:
    """Returns the samples of each micro-batch in a step of `batch_size` samples; the last one may have fewer.

    A multiple of `micro_batch`, at most `micro_batch_max`. A larger batch than the first one has at least as many
    micro-batches, so that the statistics stay as good; and as many on each worker, where whole multiples allow it.
    """
    unit = settings["micro_batch"] or 1
    count = max(-(-settings["batch_size"] // unit), -(-batch_size // (settings["micro_batch_max"] or unit)))
    count = -(-count // workers) * workers
    size = -(-batch_size // (count * unit)) * unit
    if -(-batch_size // size) < count:  # rounded up, too few are left
        size -= unit
    return max(size, unit)


Sampler = EpochSampler | StreamSampler


@dataclass
class Sampling:
    """The samples of each step of a training, the same on every worker."""

    session: Session
    settings: TrainSettings
    progress: Progress
    sampler: Sampler
    reproducible: bool

    def take_measured(self, stats: StepStats, context: StepContext) -> list[dict[str, Any]]:
        """Writes what a step measured into `Progress`. Returns what is reported of each lasting straggler."""
        at, session, workers = self.progress, self.session, context.members
        at.means, at.loss = (stats.mean_grad_sq, stats.mean_grad_variance), stats.loss
        if session.group.size == 1 and not session.elastic:
            return []
        unit = self.settings["micro_batch"] or 1
        seconds = [each * (unit / (context.micro_batch or unit)) for each in stats.seconds]
        at.throughput = measured(at.throughput, workers, seconds)
        before, now = at.stragglers, session.workers
        relative = relative_throughput(at.throughput, now)
        at.stragglers = stragglers(now, relative, before, stats.previous_step_time_s or 0.0)
        return [
            {"worker": worker, "rank": rank, "throughput": ratio}
            for rank, (worker, ratio) in enumerate(zip(now, relative, strict=True))
            if before.get(worker, 0.0) < LASTS_S <= at.stragglers.get(worker, 0.0)
        ]

    def of_next_step(self) -> StepSamples:
        at = self.progress
        workers = 1 if self.reproducible else self.session.group.size
        micro_batch = micro_batch_of(self.settings, at.batch_size, workers)
        return self._samples(at.epoch, at.cursor, at.batch_size, micro_batch)

    def of_finished_step(self, stats: StepStats, context: StepContext) -> StepSamples:
        count = round(stats.samples) if context.share is None else context.batch_size
        micro_batch = context.micro_batch or self.settings["micro_batch"] or 1
        return self._samples(context.epoch, context.cursor, count, micro_batch)

    def _samples(self, epoch: int, cursor: int, count: int, micro_batch: int) -> StepSamples:
        indices, workers = self.sampler.indices(epoch, cursor, count), self.session.workers
        weights = None
        # Apart, each worker knows its own speed only: unequal shares would leave samples out.
        if len(workers) > 1 and self.settings["workers_balance"] and not self.progress.is_apart:
            weights = shares(relative_throughput(self.progress.throughput, workers))
        how = weights, self.reproducible, self.session.part[1]
        return StepSamples(epoch, cursor, indices, micro_batch, len(workers), *how)

    def times_before(self) -> tuple[float, float]:
        """Seconds of the step before, and those of them that this worker waited for data; 0.0 where they do not stand
        for steps with the present settings: it had others, was the shorter last one of its epoch, or is unknown.
        """
        at, length = self.progress, self.sampler.length
        before = at.contexts.get(at.step - 1)
        if before is None or (before.batch_size, before.workers) != (at.batch_size, len(self.session.workers)):
            return 0.0, 0.0
        if length is not None and before.cursor + before.batch_size > length:
            return 0.0, 0.0
        return before.step_time_s, before.data_wait_s
