"""A job as the planner sees it: samples left, noise scale, and the time of a step by batch size and workers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from kfuse.policies.goodput import efficiency


def share(workers: int, batch: int, micro: int) -> int:
    """Samples of the worker with the most micro-batches."""
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
    """Least squares of relative errors of seconds by (workers, batch), constants not below 0; None if it stays open."""
    rows = np.array([[1, share(n, batch, micro), n - 1] for n, batch in measured], dtype=float)
    if len(rows) < 3 or np.linalg.matrix_rank(rows / np.abs(rows).max(axis=0).clip(1e-300)) < 3:
        return None
    rows /= np.array([*measured.values()])[:, None]
    # The best without negative constants is the best of one of the seven models with these constants only.
    found: list[tuple[float, list[float]]] = []
    for kept in ([0, 1, 2], [0, 1], [0, 2], [1, 2], [0], [1], [2]):
        constants = np.zeros(3)
        constants[kept] = np.linalg.lstsq(rows[:, kept], np.ones(len(rows)), rcond=None)[0]
        if (constants >= 0).all() and (rows @ constants > 0).all():  # no measured step takes no time
            found.append((float(np.square(rows @ constants - 1).sum()), constants.tolist()))
    return LinearStepTime(*min(found, key=lambda each: each[0])[1])


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
    noise_scale: tuple[float, float, float] | None
    """Low end, estimate and high end, in samples. None: unknown, so the batch size stays at `base_batch`."""
    step_time: LinearStepTime | None
    """None: only the settings of `measured` are known."""
    measured: Mapping[tuple[int, int], float]
    spread: tuple[float, float]

    def options(self, counts: Iterable[int]) -> list[Option]:
        """The best batch size for each of these numbers of workers, ascending, that the job can have."""
        found: list[Option] = []
        for n in sorted(n for n in counts if self.workers[0] <= n <= self.workers[1]):
            each = (self._option(n, batch) for batch in sorted(self._batches(n)))
            best = max(each, key=lambda option: option.goodput, default=None)
            if best and (not found or best.goodput > found[-1].goodput):  # else its further workers bring nothing
                found.append(best)
        return found

    def _batches(self, workers: int) -> list[int]:
        """Batch sizes one of which has the largest goodput; none where nothing is known of this many workers."""
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
