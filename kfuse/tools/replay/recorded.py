"""A recorded run, rebuilt from the lines of its metrics.jsonl: the signals of its steps, and how far each brought it.

The signals are exactly those that the run's policy had: JSON keeps every bit of a float. What a line lacks is carried
over from the line before (`signals`, in the lines where they change), or computed again: the running means of S and G2
follow from the S and G2 of each step.

How far a step gets is computed by the trade-off of McCandlish et al. 2018, "An Empirical Model of Large-Batch Training"
(eq. 2.11, and section 2.2 for a batch size that changes):

    a step of B samples, where the noise scale is N, makes the progress B / (B + N) of a step of the exact gradient

So a training of S steps and E samples to the same point has (S / Smin - 1) (E / Emin - 1) = 1 for any fixed B, with
Smin the sum of its steps' progress, and Emin the sum of their progress times N.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

from kfuse.policies.signals import OF_COLUMNS, OTHER_SIGNALS, RUNNING_MEANS, Bounds, Signals
from kfuse.statistics.noise_scale import NoiseScale

_NEEDED = [each.name for each in fields(Signals) if each.name in OTHER_SIGNALS and each.default is MISSING]


def signals_of(lines: Iterable[Mapping[str, Any]]) -> list[Signals]:
    """Returns the signals of each line of metrics.jsonl, in order. None is unknown.

    A running mean is unknown from the first line on that does not follow the step before: where lines of all steps are
    not there (`observe.every` above 1), and in a run that has its earlier steps in another directory. The learning
    rate is NaN where it was not finite.

    lines: steps ascend, values are of the right types. Raises ValueError where the first line lacks signals: an earlier
    version of kfuse, or a monitor, has written it.
    """
    out: list[Signals] = []
    others: dict[str, Any] = {}
    means, next_step, whole = NoiseScale(), 0, True
    for line in lines:
        if changed := line.get("signals"):
            others |= {name: _tuples(value) for name, value in changed.items() if name in OTHER_SIGNALS}
        if lacking := [name for name in _NEEDED if name not in others]:
            why = "a training by this version of kfuse must have written them"
            raise ValueError(f"its lines have no signals {', '.join(lacking)}: {why}")
        step = line["step"]
        whole, next_step = whole and step == next_step, step + 1
        figures = {name: line[name] for name in OF_COLUMNS}
        figures["lr"] = math.nan if line["lr"] is None else line["lr"]
        mean_sq = mean_variance = None
        if whole:
            means.update(line["grad_variance"], line["grad_sq"])
            mean_variance, mean_sq = means.means()
        figures.update(zip(RUNNING_MEANS, (mean_sq, mean_variance), strict=True))
        out.append(Signals(step=step, **figures, **(others | {"bounds": Bounds(**others["bounds"])})))
    return out


def _tuples(value: Any) -> Any:
    """Returns a signal's value from its JSON: tuples are lists there."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def progress_of(samples: float, noise_scale: float) -> float:
    """Returns the progress of a step with so many samples, in steps of the exact gradient: in (0, 1]."""
    return samples / (samples + noise_scale)


@dataclass(frozen=True)
class TradeOff:
    """The hyperbola (steps / least_steps - 1) (samples / least_samples - 1) = 1 of a recorded run."""

    least_steps: float
    """Smin: steps with batches of any size."""
    least_samples: float
    """Emin: samples with one of them a step."""

    @property
    def critical_batch(self) -> float:
        """Emin / Smin, in samples: there both steps and samples are twice their least."""
        return self.least_samples / self.least_steps

    def predict(self, batch_size: float) -> tuple[float, float]:
        """Returns steps and samples with this batch size from the first step to the last."""
        steps = self.least_steps + self.least_samples / batch_size
        return steps, steps * batch_size


@dataclass(frozen=True)
class Recorded:
    """A recorded run, as `signals_of` has rebuilt it."""

    signals: Sequence[Signals]
    """At least one."""
    seconds: Sequence[float | None]
    """The wall time of each step; None where it is unknown."""

    @property
    def is_whole(self) -> bool:
        """Whether no step between the first and the last is missing."""
        return self.signals[-1].step - self.signals[0].step == len(self.signals) - 1

    def counts(self) -> list[tuple[int, int]]:
        """Returns for each line how many steps and samples there were since the line before."""
        first = self.signals[0]
        before = (first.step - 1, first.samples - first.batch_size)
        out = []
        for each in self.signals:
            out.append((each.step - before[0], each.samples - before[1]))
            before = each.step, each.samples
        return out

    def totals(self) -> tuple[int, int]:
        """Returns the steps and samples of the whole run."""
        steps, samples = zip(*self.counts(), strict=True)
        return sum(steps), sum(samples)

    def noise_scales(self) -> list[float] | None:
        """Returns the noise scale to reckon with at each line; None where nothing was known of it.

        Where it is unknown it is the last one that was known, or the interval's low end, where that is known to be
        above it. Before the first line that knows one of them it is the one there.
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
