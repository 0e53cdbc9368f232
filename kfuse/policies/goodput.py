"""Batch size and worker count that bring training furthest in a second, by Pollux' goodput and its model of a step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from kfuse.policies.noise_interval import LEAST_MICRO_BATCHES, LEAST_STEPS, NoisePolicy
from kfuse.policies.signals import DECISION_LAG, Decision, Signals, check_number, check_whole
from kfuse.policies.step_time import Array, Point, StepTime, fit

_KEPT_TIMES = 20  # the newest ones of each setting
_LEAST_TIMES = 5  # with fewer a setting is not measured yet
_KEPT_SETTINGS = 64
_CANDIDATES = 64  # batch sizes that are compared for a number of workers


def efficiency(batch_size: ArrayLike, base_batch_size: float, noise_scale: ArrayLike) -> Array:
    """Returns a sample's progress in a batch of this size, over that in the base batch (Pollux, section 3.1)."""
    noise = np.asarray(noise_scale, np.float64)
    return (noise + base_batch_size) / (noise + np.asarray(batch_size, np.float64))


class GoodputPolicy(NoisePolicy):
    """Maximises goodput = throughput x efficiency over batch size and workers (Pollux: Qiao et al., OSDI 2021).

        throughput(B, n) = B / t(k, n)      samples a second; k = ceil(micro-batches / n) is what a worker has at most
        efficiency(B) = (noise + B0) / (noise + B)      noise: the noise scale; B0: the present batch size

    t is Pollux' model of a step's time, fitted to the steps so far. Measured settings count with their own median time,
    and the model says how others compare with the present one.

    - A larger batch is judged by the low end of the newest steps' noise scale (`NoisePolicy`), a smaller one by the
      high end. If that end is unknown, the change is not considered.
    - Steps of one batch size do not tell what of a step's time grows with the batch. So a few steps are made with twice
      the batch (half, where that is too large), once; then it decides.
    - The batch size is the best one for the present workers, or for the fewer ones that it asks for, and the worker
      count that of the best pair. So a batch size never relies on workers that have not come, or leave.
    - As in Pollux more workers are assumed to scale until they are tried. The planned worker count is at most twice the
      largest count tried so far. It is planned with the batch size that suits it, however far that is; the batch size
      itself changes by at most a factor of two at a time, in whole micro-batches.
    - The efficiency is that of a learning rate that follows the batch size: lr.scaling=sqrt for Adam, adascale (Pollux'
      choice) for SGD.

    It decides by measured times, so its decisions differ from run to run, and with them the bits of the result.

    every: steps between decisions; at least 4, so that a decision applies before the next one. A fit takes some
    milliseconds.
    margin: the predicted gain in goodput, as a fraction, below which nothing changes; above 0. It is small since the
    optimum is flat: by (r + B)(1 + N / B), a batch a third below the best one costs 4 % more at most. Where step times
    scatter by 10 %, the batch size changes a few times in a thousand steps by chance.
    threshold: a worker is added where its scaling efficiency in goodput is above this, and given up where it is at most
    half of this; above 0. 1: it adds as much as each of the others (see policy=autoscale).
    """

    owned_fields = ("batch_size", "workers")

    def __init__(self, every: int = 20, margin: float = 0.02, threshold: float = 0.1) -> None:
        super().__init__()
        check_whole("policy.every", every, DECISION_LAG)
        check_number("policy.margin", margin)
        check_number("policy.threshold", threshold)
        self.every, self.margin, self.threshold = every, margin, threshold
        # k, n and the newest step times in seconds, of each setting that was measured; the newest setting last.
        self.measured: list[list[Any]] = []
        self.tried = 0  # The batch size that is being tried, from the decision on to `tried_until`; 0: none
        self.tried_until = self.tried_from = 0  # The step that ends it; the batch size before it, 0: none was tried yet
        self.compared_with = 0  # The batch size that this step's decision is compared with; 0: the present one

    def decide(self, signals: Signals) -> Decision | None:
        due = signals.step % self.every == 0
        if signals.step > self.last_step:  # else it is decided on again, after a failure
            self._observe_time(signals)
            if due:
                self._follow_trial(signals)
        self.observe(signals)
        if not due:
            return None
        if self.tried:
            return Decision(batch_size=self.tried).changes(signals)
        now = replace(signals, batch_size=self.compared_with) if self.compared_with else signals
        points = self.points
        measured = {(k, n): seconds for k, n, seconds in points}
        if (_share(now, now.batch_size, now.workers), now.workers) not in measured:
            return Decision(batch_size=now.batch_size).changes(signals)  # after a trial in which the workers changed
        model, bounds = fit(points), signals.bounds
        most = min(bounds.workers_max, 2 * max(n for _, n, _ in points))
        _, workers = self._best(now, _spread(bounds.workers_min, most), measured, model, reach=math.inf)
        batch_size, _ = self._best(now, [min(workers, now.workers)], measured, model)  # fewer workers leave at once
        return Decision(batch_size=batch_size, workers=workers).changes(signals)

    def _follow_trial(self, signals: Signals) -> None:
        """Begins to try another batch size, where one alone was measured, or ends that."""
        step, self.compared_with = signals.step, 0
        if self.tried and step >= self.tried_until:
            self.compared_with = self.tried_from if signals.batch_size == self.tried else 0
            self.tried = 0
        elif not self.tried_from and len(self.points) == 1 and self.points[0][1] == signals.workers:
            self.tried = _to_try(signals)
            self.tried_from = signals.batch_size
            # With one micro-batch a step, the noise scale is first seen in the trial.
            least = LEAST_STEPS if signals.micro_batches < LEAST_MICRO_BATCHES else 2 * _LEAST_TIMES
            self.tried_until = step + max(self.every, DECISION_LAG + least)

    def _observe_time(self, signals: Signals) -> None:
        took = signals.previous_step_time_s
        if took is None or not took > 0:
            return
        setting = [_share(signals, signals.batch_size, signals.workers), signals.workers]
        times: list[float] = next((each[2] for each in self.measured if each[:2] == setting), [])
        others = [each for each in self.measured if each[:2] != setting]
        self.measured = [*others, [*setting, [*times, took][-_KEPT_TIMES:]]][-_KEPT_SETTINGS:]

    @property
    def points(self) -> list[Point]:
        """Returns the settings that are measured well enough, with their median step time."""
        return [(k, n, statistics.median(times)) for k, n, times in self.measured if len(times) >= _LEAST_TIMES]

    def _best(
        self,
        signals: Signals,
        workers: Sequence[int],
        measured: Mapping[tuple[int, int], float],
        model: StepTime,
        reach: float = 2.0,
    ) -> tuple[int, int]:
        """Returns batch size and workers of the best goodput; the present ones, unless others gain the margin.

        measured: seconds of a step by (k, n), those of the present setting among them. reach: the largest factor on the
        batch size.
        """
        pairs = [(signals.batch_size, signals.workers)]
        pairs += [(size, n) for n in workers for size in _batch_sizes(signals, n, reach)]
        settings = [(_share(signals, size, n), n) for size, n in pairs]
        predicted = model.seconds(*np.array(settings).T)
        predicted *= measured[settings[0]] / predicted[0]
        seconds = np.array([measured.get(each, other) for each, other in zip(settings, predicted, strict=True)])
        sizes = np.array([size for size, _ in pairs], np.float64)
        low, high = self.noise_interval()
        any_noise = 1.0  # the present batch has the efficiency 1
        noise = np.where(sizes > sizes[0], low, np.where(sizes < sizes[0], high, any_noise))
        goodput = sizes / seconds * efficiency(sizes, signals.batch_size, noise)
        goodput = np.where(np.isnan(goodput), 0.0, goodput)
        paying = self._paying(pairs, goodput)
        best = int(np.where([n in paying for _, n in pairs], goodput, 0.0).argmax())
        stays = signals.workers in paying and goodput[best] <= (1 + self.margin) * goodput[0]
        return pairs[0] if stays else pairs[best]

    def _paying(self, pairs: Sequence[tuple[int, int]], goodput: Array) -> set[int]:
        """Returns the worker counts that pay beside every smaller one, each with its best batch size.

        The present one with half the threshold: a worker that was added by a small gain is not given back at once.
        """
        best: dict[int, float] = {}
        for (_, n), value in zip(pairs, goodput.tolist(), strict=True):
            best[n] = max(value, best.get(n, 0.0))

        def pays(n: int, fewer: int) -> bool:
            least = self.threshold / (2 if n == pairs[0][1] else 1)
            return (best[n] / best[fewer] - 1) / (n / fewer - 1) > least

        return {n for n in best if all(pays(n, fewer) for fewer in best if fewer < n)}


def _share(signals: Signals, batch_size: int, workers: int) -> int:
    """Returns k, the micro-batches of the worker that has most."""
    return -(-batch_size // (signals.micro_batch * workers))


def _to_try(signals: Signals) -> int:
    """Returns another batch size within the bounds, twice the present one or half of it; 0 where there is none."""
    batch_size, micro, bounds = signals.batch_size, signals.micro_batch, signals.bounds
    now = _share(signals, batch_size, signals.workers)
    least = max(bounds.batch_min, LEAST_MICRO_BATCHES * micro)
    for size in (2 * batch_size // micro * micro, batch_size // 2 // micro * micro):
        if least <= size <= bounds.batch_max and _share(signals, size, signals.workers) != now:
            return size
    return 0


def _batch_sizes(signals: Signals, workers: int, reach: float) -> list[int]:
    """Returns the batch sizes to compare, within the bounds and a factor of `reach`.

    They give each worker the same share, so that none waits; the present one and the largest are there too.
    """
    bounds, batch_size, micro = signals.bounds, signals.batch_size, signals.micro_batch
    least = max(math.ceil(bounds.batch_min / micro), math.ceil(batch_size / reach / micro), LEAST_MICRO_BATCHES)
    most = int(min(bounds.batch_max, reach * batch_size)) // micro
    if least > most:
        return [batch_size]
    shares = _spread(-(-least // workers), most // workers)
    return sorted({batch_size, most * micro, *(share * workers * micro for share in shares)})


def _spread(low: int, high: int) -> list[int]:
    """Returns the whole numbers from `low` to `high`; of many some, in geometric steps, both ends too."""
    if high - low < _CANDIDATES:
        return list(range(low, high + 1))
    return sorted({round(each) for each in np.geomspace(low, high, _CANDIDATES)})
