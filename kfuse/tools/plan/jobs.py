"""Plans a few jobs on one cluster: who gets how many workers and which batch size. No I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from sklearn.linear_model import LinearRegression

from kfuse.policies.goodput import efficiency

# What a worker must bring, over what each of the job's first ones brings, else it is released: Or et al. (MLSys 2020)
# keep a worker that gains a tenth of linear scaling. 0: all that help are used. Below 1.
LEAST_GAIN = 0.1

# -- what a job can have ----------------------------------------------------------------------------------------------


def share(workers: int, batch: int, micro: int) -> int:
    """Returns the samples of the worker with the most micro-batches."""
    return min(-(-batch // (workers * micro)) * micro, batch)


@dataclass(frozen=True)
class LinearStepTime:
    """Seconds of a step on n workers, the busiest with `share` samples: fixed + sample * share + worker * (n - 1).

    Pollux's model (kfuse.policies.step_time) is not used: it assumes what was not measured, since a policy can try it.
    The planner only plans: `fit` is None where three constants stay open.
    """

    fixed: float
    sample: float
    worker: float

    def __call__(self, workers: int, share: int) -> float:
        return self.fixed + self.sample * share + self.worker * (workers - 1)


def fit(measured: Mapping[tuple[int, int], float], micro: int) -> LinearStepTime | None:
    """Fits seconds by (workers, batch) by the least squares of relative errors, constants not below 0.

    None where they leave a constant open, or a measured step would take no time.
    """
    rows = np.array([[1, share(n, batch, micro), n - 1] for n, batch in measured], dtype=float)
    if len(rows) < 3 or np.linalg.matrix_rank(rows / np.abs(rows).max(axis=0).clip(1e-300)) < 3:
        return None
    rows /= np.array([*measured.values()])[:, None]
    constants = LinearRegression(fit_intercept=False, positive=True).fit(rows, np.ones(len(rows))).coef_
    return LinearStepTime(*constants.tolist()) if (rows @ constants > 0).all() else None


@dataclass(frozen=True)
class Option:
    """A job's best batch size with so many workers, and its goodput with that, with low and high ends.

    In samples at the base batch size per second: throughput * (noise + base) / (noise + batch) (Pollux: Qiao et al.,
    OSDI 2021), as a larger batch needs more samples for the same progress (McCandlish et al. 2018).
    """

    workers: int
    batch: int
    goodput: float
    low: float
    high: float


@dataclass(frozen=True)
class Job:
    """One job. Batch sizes are multiples of `micro`, each worker has one at least; samples left at the base batch.

    Samples left over goodput is the time to the same progress. A run that train.epochs or train.steps ends stops by its
    own count: after as many samples or steps, whatever its batch size.

    batch, workers: smallest and largest. measured: seconds of a step by (workers, batch). spread: its ends, relative.
    """

    name: str
    samples_left: float
    base_batch: int
    batch: tuple[int, int]
    micro: int
    workers: tuple[int, int]
    # Low end, estimate and high end, in samples. None: unknown, so the batch size stays at `base_batch`.
    noise_scale: tuple[float, float, float] | None
    step_time: LinearStepTime | None  # None: only the settings of `measured` are known
    measured: Mapping[tuple[int, int], float]
    spread: tuple[float, float]

    def options(self, counts: Iterable[int]) -> list[Option]:
        """Returns the best batch size for each of these numbers of workers, ascending, that the job can have."""
        found: list[Option] = []
        for n in sorted(n for n in counts if self.workers[0] <= n <= self.workers[1]):
            each = (self._option(n, batch) for batch in sorted(self._batches(n)))
            best = max(each, key=lambda option: option.goodput, default=None)
            if best and (not found or best.goodput > found[-1].goodput):  # else its further workers bring nothing
                found.append(best)
        return found

    def _batches(self, workers: int) -> list[int]:
        """Returns sizes one of which has the largest goodput; none where nothing is known of this many workers."""
        least, most = max(self.batch[0], workers * self.micro), self.batch[1]
        if self.step_time is None:
            batches = [b for n, b in self.measured if n == workers and (self.noise_scale or b == self.base_batch)]
        elif self.noise_scale is None:
            batches = [self.base_batch]
        else:
            # Time for the same progress, (noise + B) / B * t, has one minimum where all workers have as many samples.
            per_step = self.step_time.fixed + self.step_time.worker * (workers - 1)
            per_sample = max(self.step_time.sample, 1e-300)
            ideal = math.sqrt(self.noise_scale[1]) * math.sqrt(workers * per_step / per_sample)  # 0 * inf would be NaN
            even = math.floor(min(max(ideal, least), most) / (workers * self.micro))
            batches = [self.base_batch, most // self.micro * self.micro]
            batches += [even * workers * self.micro, (even + 1) * workers * self.micro]
        return [batch for batch in batches if least <= batch <= most]

    def _option(self, workers: int, batch: int) -> Option:
        most = share(workers, batch, self.micro)
        seconds = self.step_time(workers, most) if self.step_time else self.measured[workers, batch]
        # Where the noise scale is unknown the batch is the base, and the parts are 1.
        parts = efficiency(batch, self.base_batch, self.noise_scale or (1.0, 1.0, 1.0)).tolist()
        low, mid, high = (batch / seconds * part for part in (min(parts), parts[1], max(parts)))
        return Option(workers, batch, mid, low / self.spread[1], high / self.spread[0])


# -- what each job gets -----------------------------------------------------------------------------------------------


def service(options: Sequence[Option], samples_left: float) -> float:
    """Returns a job's expected worker-seconds with its fewest workers: what QSSF sorts by (Hu et al., SC 2021)."""
    return options[0].workers * samples_left / options[0].goodput


def plan(options: Sequence[Sequence[Option]], samples_left: Sequence[float], workers: int) -> list[Option | None]:
    """Returns what each job does with its part of the workers; None: it waits.

    The sum over the jobs of their effective workers is the largest possible. A job that waits adds 0, and one on n
    workers, whose fewest are m: goodput(n) / (goodput(m) / m) - LEAST_GAIN * n. Saxena et al. (2020) maximise this sum
    with throughput for Pollux's goodput. Of equal sums the one is taken that runs the job of the shortest `service`.

    options: each job's, of `Job.options`, at least one.
    """
    order, choices = sorted(range(len(options)), key=lambda j: service(options[j], samples_left[j])), []
    for j in order:
        first, values = options[j][0].goodput / options[j][0].workers, []
        for option in options[j]:
            efficiency = option.goodput / option.workers / first
            values.append((option.workers, round(1e6 * option.workers * (efficiency - LEAST_GAIN))))
        choices.append(values)
    taken = dict(zip(order, allocate(choices, workers), strict=True))
    return [next((option for option in each if option.workers == taken[j]), None) for j, each in enumerate(options)]


def allocate(choices: Sequence[Sequence[tuple[int, int]]], workers: int) -> list[int]:
    """Returns for each job the workers that it gets, 0 where it waits, by dynamic programming over jobs and workers.

    The sum of their values is the largest possible. choices: each job's (workers, value); whole numbers, so that equal
    sums are found. Of these the one with the fewest workers is taken, then the one that gives them to the first jobs.
    Takes O(number of choices * workers).
    """
    # best[j, w]: the largest sum of the first j jobs with w workers at most.
    best = np.zeros((len(choices) + 1, workers + 1), dtype=np.int64)
    for j, options in enumerate(choices):
        best[j + 1] = best[j]
        for count, gain in options:
            if count <= workers and gain > 0:
                np.maximum(best[j + 1, count:], best[j, : workers + 1 - count] + gain, out=best[j + 1, count:])
    taken = [0] * len(choices)
    left = int(np.argmax(best[-1] == best[-1, -1]))
    for j in reversed(range(len(choices))):
        if best[j + 1, left] > best[j, left]:
            taken[j] = min(n for n, gain in choices[j] if n <= left and best[j, left - n] + gain == best[j + 1, left])
            left -= taken[j]
    return taken


def forecast(
    options: Sequence[Sequence[Option]], samples_left: Sequence[float], workers: int
) -> tuple[list[float], float]:
    """Returns each job's end, in seconds from now, and all worker-seconds, if each end brings a new plan, at once.

    Each job's first option must have at most `workers`.
    """
    left, unfinished, now, worker_seconds = list(samples_left), list(range(len(options))), 0.0, 0.0
    ends = [0.0] * len(options)
    while unfinished:
        given = plan([options[j] for j in unfinished], [left[j] for j in unfinished], workers)
        running = {j: option for j, option in zip(unfinished, given, strict=True) if option}
        first = min(running, key=lambda j: left[j] / running[j].goodput)
        seconds = left[first] / running[first].goodput
        for j, option in running.items():
            worker_seconds += seconds * option.workers
            left[j] -= seconds * option.goodput
        now += seconds
        # Others may end at the same time; what rounding leaves of them is no work, and may be below 0.
        for j in [j for j in running if j == first or left[j] <= 1e-12 * samples_left[j]]:
            ends[j] = now
            unfinished.remove(j)
    return ends, worker_seconds
