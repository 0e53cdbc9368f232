"""Batch size and worker count that bring training furthest in a second, by Pollux' goodput."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from kfuse.policies.signals import ConfiguredPolicy, Decision, Signals, check_positive, check_whole
from kfuse.policies.step_time import Array, Point, StepTime, fit

_KEPT_TIMES = 20  # the newest ones of each setting
_LEAST_TIMES = 5  # with fewer a setting is not measured yet
_KEPT_SETTINGS = 64
_CANDIDATES = 64  # batch sizes that are compared for a number of workers


def efficiency(batch_size: ArrayLike, base_batch_size: float, noise_scale: ArrayLike) -> Array:
    """Returns a sample's progress in a batch of this size, over that in the base batch (Pollux, section 3.1)."""
    noise = np.asarray(noise_scale, np.float64)
    return (noise + base_batch_size) / (noise + np.asarray(batch_size, np.float64))


class GoodputPolicy(ConfiguredPolicy):
    """Maximises goodput = throughput x efficiency over batch size and workers (Pollux: Qiao et al., OSDI 2021).

        throughput(B, n) = B / t(k, n)      samples a second; k = ceil(micro-batches / n) is what a worker has at most
        efficiency(B) = (noise + B0) / (noise + B)      noise: the noise scale; B0: the batch size at first

    t is Pollux' model of a step's time, fitted to the steps so far. Measured settings count with their own median time,
    and the model says how others compare with the present one.

    - A larger batch is judged by the low end of the noise scale's interval, a smaller one by the high end. If that end
      is unknown, the change is not considered.
    - The batch size is the best one for the present workers, and the worker count that of the best pair. So a batch
      size never relies on workers that have not come.
    - As in Pollux more workers are assumed to scale until they are tried. The planned worker count is at most twice the
      largest count tried so far. The batch size changes by at most a factor of two at a time, in whole micro-batches.
    - The efficiency is that of a learning rate that follows the batch size: choose lr.scaling=adascale, as Pollux does.

    It decides by measured times, so its decisions differ from run to run, and with them the bits of the result.

    every: steps between decisions; at least 1. A fit takes some milliseconds.
    margin: the predicted gain in goodput, as a fraction, below which nothing changes; above 0. 0.05 is above the noise
    of the median of twenty step times on a machine that has little else to do.
    """

    owned_fields = ("batch_size", "workers")

    def __init__(self, every: int = 50, margin: float = 0.05) -> None:
        check_whole("policy.every", every, 1)
        check_positive("policy.margin", margin)
        self.every, self.margin = every, margin
        self.last_step = -1
        self.settings: list[list[int]] = []
        """[k, n] of each setting that was measured, the newest last."""
        self.times: list[list[float]] = []
        """The newest step times of each, in seconds."""

    def decide(self, signals: Signals) -> Decision | None:
        """Returns the batch size and worker count to move to; None at other steps, and where none is to change."""
        self._observe(signals)
        if signals.step % self.every:
            return None
        points = self.points
        measured = {(k, n): seconds for k, n, seconds in points}
        if (_share(signals, signals.batch_size, signals.workers), signals.workers) not in measured:
            return None
        model, bounds = fit(points), signals.bounds
        most = min(bounds.workers_max, 2 * max(n for _, n, _ in points))
        batch_size, _ = self._best(signals, [signals.workers], measured, model)
        _, workers = self._best(signals, _spread(bounds.workers_min, most), measured, model)
        return Decision(batch_size=batch_size, workers=workers).changes(signals)

    def _observe(self, signals: Signals) -> None:
        """Keeps the step time, once: a step may be decided on again after a failure."""
        took = signals.previous_step_time_s
        if signals.step <= self.last_step or took is None or not took > 0:
            return
        self.last_step = signals.step
        setting, times = [_share(signals, signals.batch_size, signals.workers), signals.workers], list[float]()
        if setting in self.settings:
            times = self.times.pop(self.settings.index(setting))
            self.settings.remove(setting)
        self.settings = [*self.settings, setting][-_KEPT_SETTINGS:]
        self.times = [*self.times, [*times, took][-_KEPT_TIMES:]][-_KEPT_SETTINGS:]

    @property
    def points(self) -> list[Point]:
        """Returns the settings that are measured well enough, with their median step time."""
        pairs = zip(self.settings, self.times, strict=True)
        return [(k, n, statistics.median(times)) for (k, n), times in pairs if len(times) >= _LEAST_TIMES]

    def _best(
        self, signals: Signals, workers: Sequence[int], measured: Mapping[tuple[int, int], float], model: StepTime
    ) -> tuple[int, int]:
        """Returns batch size and workers of the best goodput; the present ones, unless others gain the margin.

        measured: seconds of a step by (k, n), those of the present setting among them.
        """
        pairs = [(signals.batch_size, signals.workers)]
        pairs += [(size, n) for n in workers for size in _batch_sizes(signals, n)]
        settings = [(_share(signals, size, n), n) for size, n in pairs]
        predicted = model.seconds(*np.array(settings).T)
        predicted *= measured[settings[0]] / predicted[0]
        seconds = np.array([measured.get(each, other) for each, other in zip(settings, predicted, strict=True)])
        sizes = np.array([size for size, _ in pairs], np.float64)
        low, high = _interval(signals)
        noise = np.where(sizes > sizes[0], low, np.where(sizes < sizes[0], high, 1.0))
        goodput = sizes / seconds * efficiency(sizes, signals.batch_size, noise)
        goodput = np.where(np.isnan(goodput), 0.0, goodput)
        best = int(goodput.argmax())
        return pairs[best] if goodput[best] > (1 + self.margin) * goodput[0] else pairs[0]


def _interval(signals: Signals) -> tuple[float, float]:
    """Returns both ends of the noise scale's interval, in samples; NaN where one is unknown."""
    ends = (signals.noise_scale_low, None if signals.noise_scale is None else signals.noise_scale_high)
    low, high = (math.nan if end is None or not 0 <= end < math.inf else end for end in ends)
    return low, high


def _share(signals: Signals, batch_size: int, workers: int) -> int:
    """Returns k, the micro-batches of the worker that has most."""
    return -(-batch_size // (signals.micro_batch * workers))


def _batch_sizes(signals: Signals, workers: int) -> list[int]:
    """Returns sizes to compare, within the bounds and a factor of two: equal shares are best, as none waits then."""
    bounds, batch_size, micro = signals.bounds, signals.batch_size, signals.micro_batch
    least = max(math.ceil(bounds.batch_min / micro), math.ceil(batch_size / 2 / micro))
    most = min(bounds.batch_max, 2 * batch_size) // micro
    if least > most:
        return [batch_size]
    shares = _spread(-(-least // workers), most // workers)
    return sorted({batch_size, most * micro, *(share * workers * micro for share in shares)})


def _spread(low: int, high: int) -> list[int]:
    """Returns the whole numbers from `low` to `high`; of many some, in geometric steps, both ends too."""
    if high - low < _CANDIDATES:
        return list(range(low, high + 1))
    return sorted({round(each) for each in np.geomspace(low, high, _CANDIDATES)})
