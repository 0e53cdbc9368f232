"""Which samples a step has, and how they are distributed over the workers."""

from __future__ import annotations

from kfuse.statistics.figures import StepContext
from kfuse.statistics.step_stats import StepStats
from kfuse.train import load_balance
from kfuse.train.context import TrainContext
from kfuse.train.step import StepSamples


class Sampling:
    """The samples of each step of a training, the same on every worker."""

    def __init__(self, training: TrainContext) -> None:
        self._session, self._settings, self._progress = training.session, training.settings, training.progress
        self._sampler, self._reproducible = training.sampler, training.opt.engine.options.reproducible

    def of_next_step(self) -> StepSamples:
        """Those of the coming step."""
        at = self._progress
        workers = 1 if self._reproducible else self._session.group.size
        micro_batch = self._settings.micro_batch_of(at.batch_size, workers)
        return self._samples(at.epoch, at.cursor, at.batch_size, micro_batch)

    def of_finished_step(self, stats: StepStats, context: StepContext) -> StepSamples:
        """Those of a step whose statistics have arrived."""
        count = round(stats.samples) if context.share is None else context.batch_size
        micro_batch = context.micro_batch or self._settings.batch_micro
        return self._samples(context.epoch, context.cursor, count, micro_batch)

    def _samples(self, epoch: int, cursor: int, count: int, micro_batch: int) -> StepSamples:
        indices, workers = self._sampler.indices(epoch, cursor, count), self._session.workers
        relative = load_balance.relative_throughput(self._progress.throughput, workers)
        # Apart, each worker knows its own speed only: unequal shares would leave samples out.
        balanced = self._settings.workers_balance and not self._progress.is_apart
        shares = load_balance.shares(relative) if balanced else None
        return StepSamples(epoch, cursor, indices, micro_batch, len(workers), shares, self._reproducible)

    def times_before(self) -> tuple[float, float]:
        """Seconds of the step before, and those of them that this worker waited for data; 0.0 where they do not stand
        for steps with the present settings: it had others, was the shorter last one of its epoch, or is unknown.
        """
        at, length = self._progress, self._sampler.length
        before = at.contexts.get(at.step - 1)
        if before is None or (before.batch_size, before.workers) != (at.batch_size, len(self._session.workers)):
            return 0.0, 0.0
        if length is not None and before.cursor + before.batch_size > length:
            return 0.0, 0.0
        return before.step_time_s, before.data_wait_s
