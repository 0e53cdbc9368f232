"""How fast the workers are: which are stragglers, and what share of a step each gets.

Throughput is an exponentially weighted mean. Every worker computes the same values, from the times in the steps' tails,
so all find the same shares. (Micro-batches in proportion to speed: VirtualFlow, Or et al. 2022; the
straggler's threshold: Or et al. 2020.)
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kfuse.comm import measurement
from kfuse.statistics.figures import StepContext
from kfuse.statistics.step_stats import StepStats

if TYPE_CHECKING:
    from kfuse.train.context import TrainContext

DECAY = 0.98  # of the mean, a step
SLOW = 0.8  # of the median's throughput: below it a worker is a straggler
_RECOVERED = 0.9  # of the median's: from here on it is no longer one
WARM = 10  # steps that a worker is measured in before its throughput is used
_SHARE_STEPS = 16  # a share is a multiple of 1/16 of the median's: small changes of speed change no share
_SMALLEST_SHARE = 2  # sixteenths: the slowest worker too gets micro-batches, else its speed could not be measured
_IDLE_RECOVERY = 0.02  # a step: a worker without a micro-batch is assumed to close this part of its gap to the median

Throughput = dict[int, tuple[float, int]]
"""Worker: (mean micro-batches of the first size a second, steps it was measured in)."""


def measured(known: Mapping[int, tuple[float, int]], workers: Sequence[int], seconds: Sequence[float]) -> Throughput:
    """The means after another step, in which worker `workers[r]` took `seconds[r]` for a micro-batch (0: unknown)."""
    out: Throughput = {}
    relative = relative_throughput(known, workers)
    for worker, time, ratio in zip(workers, seconds, relative, strict=True):
        mean, steps = known.get(worker, (0.0, 0))
        if time > 0:
            share = max(1 - DECAY, 1 / (steps + 1))  # of the first steps it is the plain mean
            out[worker] = (mean + share * (1 / time - mean), steps + 1)
        elif ratio is not None and ratio < 1:
            out[worker] = (mean + _IDLE_RECOVERY * (mean / ratio - mean), steps)
        elif steps:
            out[worker] = (mean, steps)
    return out


def relative_throughput(known: Mapping[int, tuple[float, int]], workers: Sequence[int]) -> list[float | None]:
    """Each worker's throughput over the median of all; None while it is not known well enough."""
    means = [known[worker][0] if known.get(worker, (0.0, 0))[1] >= WARM else None for worker in workers]
    if len(workers) < 2 or any(mean is None for mean in means):
        return [None] * len(workers)
    # The upper median: with two workers the faster one is the reference, so that the slower one can be a straggler.
    median = statistics.median_high(mean for mean in means if mean is not None)
    return [None if mean is None else mean / median for mean in means]


def shares(relative: Sequence[float | None]) -> tuple[int, ...] | None:
    """Each rank's weight for `worker_range`, in sixteenths; None (equal shares) unless a worker is a straggler."""
    known = [ratio for ratio in relative if ratio is not None]
    if len(known) < len(relative) or min(known, default=1.0) >= SLOW:
        return None
    return tuple(max(_SMALLEST_SHARE, round(_SHARE_STEPS * ratio)) for ratio in known)


def stragglers(workers: Sequence[int], relative: Sequence[float | None], before: Sequence[int]) -> tuple[int, ...]:
    """Numbers of the stragglers. A straggler of `before` stays one until its throughput reaches `_RECOVERED`."""
    return tuple(
        worker
        for worker, ratio in zip(workers, relative, strict=True)
        if ratio is not None and ratio < (_RECOVERED if worker in before else SLOW)
    )


def take_measured(training: TrainContext, stats: StepStats, context: StepContext) -> None:
    """Writes what a step measured into `Progress`. Reports interference, and each worker that becomes a straggler."""
    at, session, workers = training.progress, training.session, context.members
    at.mean_grad_sq, at.mean_grad_variance, at.loss = stats.mean_grad_sq, stats.mean_grad_variance, stats.loss
    if session.group.size == 1 and not session.elastic:
        return
    unit = training.settings.batch_micro
    seconds = [each * (unit / (context.micro_batch or unit)) for each in stats.seconds]
    at.throughput = measured(at.throughput, workers, seconds)
    relative = relative_throughput(at.throughput, session.workers)
    for rank, (worker, ratio) in enumerate(zip(session.workers, relative, strict=True)):
        if ratio is not None and ratio < SLOW and worker not in at.stragglers:
            training.reporter.event(at.step, "straggler", worker=worker, rank=rank, throughput=ratio)
    at.stragglers = stragglers(session.workers, relative, at.stragglers)
    found = measurement.verdict(stats.votes, relative) if session.workers == list(workers) else None
    if found and not at.interference:
        votes = [rank for rank, vote in enumerate(stats.votes) if vote == measurement.SLOWER]
        training.reporter.event(at.step, "interference", ranks=votes)
    at.interference = at.interference if found is None else found
