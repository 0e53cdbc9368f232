"""A recorded run, rebuilt from the lines of its metrics.jsonl, and a replay's steps: those, or another policy's.

The signals are those that the run's policy had, but for the links: JSON keeps every bit of a float.

How far a step gets is computed by the trade-off of McCandlish et al. 2018, "An Empirical Model of Large-Batch Training"
(eq. 2.11, and section 2.2 for a batch size that changes):

    a step of B samples, where the noise scale is N, makes the progress B / (B + N) of a step of the exact gradient

So a training of S steps and E samples to the same point has (S / Smin - 1) (E / Emin - 1) = 1 for any fixed B, with
Smin the sum of its steps' progress, and Emin the sum of their progress times N.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from kfuse.policies.signals import Bounds, Signals
from kfuse.train.learning_rate import gain


def progress_of(samples: float, noise_scale: float) -> float:
    """Returns the progress of a step with so many samples, in steps of the exact gradient: in (0, 1]."""
    return samples / (samples + noise_scale)


@dataclass(frozen=True)
class TradeOff:
    """The hyperbola (steps / least_steps - 1) (samples / least_samples - 1) = 1 of a recorded run."""

    least_steps: float  # Smin: steps with batches of any size
    least_samples: float  # Emin: samples with one of them a step

    @property
    def critical_batch(self) -> float:
        """Emin / Smin, in samples: there both steps and samples are twice their least."""
        return self.least_samples / self.least_steps


@dataclass(frozen=True)
class DecidedSettings:
    """What a step is made with, of what a policy decides."""

    batch_size: int
    workers: int
    lr_scale: float = 1.0


@dataclass(frozen=True)
class Recorded:
    """A recorded run, as `Signals.of_record` has rebuilt its lines.

    signals: at least one. scaling: `lr.scaling` of the run. sync, reproducible: of `comm`; None: unknown.
    """

    signals: Sequence[Signals]
    scaling: str = "none"
    sync: str | None = None
    reproducible: bool = False

    @property
    def begin(self) -> DecidedSettings:
        """What the run began with: its workers need not be workers.count, which a resumed run goes on with."""
        first = self.signals[0]
        if first.step > 0:
            return DecidedSettings(first.batch_size, first.workers, first.lr_scale)
        return DecidedSettings(first.base_batch_size or first.batch_size, first.workers)

    def gain(self, batch_size: int, *means: float | None) -> float:
        """Returns the learning rate's factor. means: the running means of G2 and S."""
        first = self.signals[0]
        return gain(self.scaling, batch_size, first.base_batch_size or first.batch_size, *means)

    def counts(self) -> list[tuple[int, int]]:
        """Returns for each line how many steps and samples there were since the line before."""
        first = self.signals[0]
        ends = [(first.step - 1, first.samples - first.batch_size), *((s.step, s.samples) for s in self.signals)]
        return [(step - before, samples - used) for (before, used), (step, samples) in pairwise(ends)]

    def noise_scales(self) -> list[float] | None:
        """Returns the noise scale to reckon with at each line; None where nothing was known of it.

        Where it is unknown it is the last known one, or the interval's low end if that is above it; before the first
        line that knows one of them it is the one there.
        """
        out, last = list[float](), -math.inf
        for each in self.signals:
            last = last if each.noise_scale is None else each.noise_scale
            low = None if each.noise_scale is not None else each.noise_scale_low
            out.append(last if low is None else max(last, low))
        first = next((value for value in out if value > -math.inf), None)
        return None if first is None else [max(value, first) if value == -math.inf else value for value in out]

    def progress(self) -> list[float]:
        """Returns each line's progress in steps of the exact gradient; in samples where no noise scale is known."""
        noise = self.noise_scales()
        if noise is None:
            return [float(samples) for _, samples in self.counts()]
        pairs = zip(self.counts(), noise, strict=True)
        return [steps * progress_of(samples / steps, n) for (steps, samples), n in pairs]

    def trade_off(self) -> TradeOff | None:
        """Returns the run's trade-off; None where the noise scale is never known."""
        noise, progress = self.noise_scales(), self.progress()
        if noise is None:
            return None
        return TradeOff(math.fsum(progress), math.fsum(map(math.prod, zip(noise, progress, strict=True))))


# -- a replay's steps -------------------------------------------------------------------------------------------------

_MOST_STEPS = 10  # a replayed run that takes more than so many times the recorded steps is cut off


class RecordedSteps:
    """The steps that the run made, with what it made them with."""

    cut_off = False

    def __init__(self, recorded: Recorded) -> None:
        self.recorded, self._line = recorded, 0
        first = recorded.signals[0]
        self.bounds = first.bounds
        self.next_step, self.samples = first.step, first.samples - first.batch_size

    def step(self, now: DecidedSettings) -> Signals | None:
        """Returns the next step's signals, None at the end."""
        if self._line == len(self.recorded.signals):
            return None
        seen = self.recorded.signals[self._line]
        self._line += 1
        following = self.recorded.signals[self._line : self._line + 1]
        self.next_step, self.samples = following[0].step if following else seen.step + 1, seen.samples
        return seen


class SimulatedSteps:
    """Steps with other settings than the run's, up to the progress that the run made.

    Signals are those of the recorded step at the same progress, but for what the settings decide. S, G2, their means
    and the noise scale are per-sample quantities: they are taken as they are. Figures of workers are kept where the
    number of workers is the same, step times where the batch size is the same too.
    """

    def __init__(self, recorded: Recorded, bounds: Bounds) -> None:
        self.recorded, self.bounds = recorded, bounds
        first, last = recorded.signals[0], recorded.signals[-1]
        self.next_step, self.samples = first.step, first.samples - first.batch_size
        self._noise, self._epoch = recorded.noise_scales(), first.epoch_samples
        self._reached = [*accumulate(recorded.progress())]  # after each line
        self._line, self._done = 0, 0.0
        self._last_step = first.step + _MOST_STEPS * (last.step - first.step + 1)

    @property
    def _is_over(self) -> bool:
        return self._done >= self._reached[-1] * (1 - 1e-12)

    @property
    def cut_off(self) -> bool:
        """Whether the steps were too many."""
        return not self._is_over and self.next_step >= self._last_step

    def step(self, now: DecidedSettings) -> Signals | None:
        """Makes a step with these settings, and returns its signals; None where the recorded run ends."""
        if self._is_over or self.cut_off:
            return None
        count, epoch = now.batch_size, None
        if self._epoch is not None:
            epoch, cursor = divmod(self.samples, self._epoch)
            count = min(count, self._epoch - cursor)
        self._advance(count)
        at = self._line
        while self._reached[at] < self._done * (1 - 1e-12) and at + 1 < len(self._reached):
            at += 1
        self.samples += count
        seen = self._signals(self.recorded.signals[at], now, count, epoch)
        self.next_step += 1
        return seen

    def _advance(self, count: int) -> None:
        """Adds the progress of a step of `count` samples, which may go over several lines."""
        left = 1.0  # of the step
        while True:
            whole = count if self._noise is None else progress_of(count, self._noise[self._line])
            end = self._reached[self._line]
            room = end - self._done
            if left * whole <= room + 1e-12 * end or self._line + 1 == len(self._reached):
                self._done += left * whole
                return
            left -= max(room, 0.0) / whole
            self._done = max(self._done, end)
            self._line += 1

    def _signals(self, there: Signals, now: DecidedSettings, count: int, epoch: int | None) -> Signals:
        """Returns the signals of a step with `now` and `count` samples, at the progress of the recorded `there`."""
        micro_batches = -(-count // there.micro_batch)
        means, gain = (there.mean_grad_sq, there.mean_grad_variance), self.recorded.gain
        factor = gain(now.batch_size, *means) * now.lr_scale
        recorded = gain(there.batch_size, *means) * there.lr_scale
        changed: dict[str, Any] = {
            "step": self.next_step,
            "epoch": there.epoch if epoch is None else epoch,
            "samples": self.samples,
            "lr": there.lr if factor == recorded else there.lr * factor / recorded,
            "lr_scale": now.lr_scale,
            "batch_size": now.batch_size,
            "workers": now.workers,
            "micro_batches": micro_batches,
            "bounds": self.bounds,
        }
        unknown: list[str] = []
        if there.workers != now.workers:
            changed |= {"throughput": (None,) * now.workers, "corrupt_workers": ()}
            unknown += ["link_latencies", "link_throughputs"]
        if (there.workers, there.batch_size) != (now.workers, now.batch_size):
            unknown += ["previous_step_time_s", "previous_data_wait_s"]
        if micro_batches < 2:  # these compare the micro-batches of a step
            unknown += ["grad_sq", "grad_variance", "noise_scale", "noise_scale_low", "noise_scale_high"]
        elif there.batch_size != now.batch_size:
            known = there.grad_sq is not None and there.grad_variance is not None
            square = (there.grad_sq or 0.0) + (there.grad_variance or 0.0) / count  # |mean gradient|^2 = G2 + S / B
            changed["grad_norm"] = math.sqrt(square) if known and square >= 0 else None
        return Signals(**{**vars(there), **changed, **dict.fromkeys(unknown)})


StepSource = RecordedSteps | SimulatedSteps  # where a replay's steps come from
