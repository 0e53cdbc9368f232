"""The critical batch size, measured by branches of one training: the estimate and its interval.

Merrill et al. 2025, "Critical Batch Size Revisited" (arXiv 2505.23971). docs/adapt.md has the method. Each
branch is repeated with several orders of the data. A repetition has the same order for all k, so that the differences
between branches, which are all that counts, are free of the noise that they share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from kfuse.settings.tree import ConfigError
from kfuse.statistics.noise_scale import fieller

Floats = NDArray[np.float64]
# What a branch measured, by step: samples since the checkpoint, the step's included; mean loss before its update; S,
# unbiased for tr(Sigma); G2, unbiased for |G|^2; the curvature's noise scale, where that is measured. None is unknown.
Trace = list[tuple[float, float | None, float | None, float | None, float | None]]
Branch = Callable[[float, int], Trace]  # branch(k, repetition): trains a branch. Repetitions count from 0.

FACTORS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
_POINTS = 256  # of a curve, between two measured k


@dataclass(frozen=True)
class Plan:
    """What is measured: which branches, over how many samples, and by which tolerance.

    Raises ConfigError for values out of range, which names the field.
    """

    batch_size: int  # B: the batch size of k = 1, in samples
    factors: Sequence[float] = FACTORS
    """The values of k, ascending. The first is the reference, which all others are compared with."""
    repetitions: int = 5  # repetitions of each branch, each with a data order of its own; at least 2
    samples: int | None = None  # samples of each branch; None: 16 steps of the largest batch
    branch_samples: int = field(init=False)  # the same, as a number
    tolerance: float = 0.01  # part of the reference's smoothed loss by which that of a branch may be above it
    window: float = 0.25
    """The part of the samples, at the end of a branch, whose mean loss is its smoothed loss; above 0, at most 1."""

    def __post_init__(self) -> None:
        def must(right: bool, name: str, allowed: str) -> None:
            if not right:
                raise ConfigError(f"{name}={getattr(self, name)}: must be {allowed}")

        ascend = len(self.factors) > 1 and all(a < b for a, b in pairwise((0, *self.factors, math.inf)))
        must(ascend, "factors", "at least two finite numbers above 0 that ascend")
        whole = all(float(k * self.batch_size).is_integer() for k in self.factors)
        must(whole, "factors", f"whole where multiplied by the batch size {self.batch_size}")
        must(self.repetitions >= 2, "repetitions", "at least 2")
        must(0 < self.tolerance < math.inf, "tolerance", "above 0, and finite")
        must(0 < self.window <= 1, "window", "above 0, at most 1")
        object.__setattr__(self, "factors", tuple(map(float, self.factors)))
        largest = self.batch(self.factors[-1])
        object.__setattr__(self, "branch_samples", 16 * largest if self.samples is None else self.samples)
        if self.branch_samples < (least := math.ceil(largest / self.window)):
            why = f"the last {self.window:g} of them must be a step of the largest batch, {largest}"
            raise ConfigError(f"samples={self.branch_samples}: must be at least {least}: {why}")

    def batch(self, k: float) -> int:
        """Returns the batch size of branch k, in samples."""
        return round(k * self.batch_size)

    def steps(self, k: float, cursor: int = 0, length: int | None = None) -> int:
        """Returns the steps after which branch k has trained on all of its samples.

        An epoch's last step is shorter. cursor: samples of the epoch that were used before. length: samples of an
        epoch; None: a stream. Raises ConfigError where the batch is larger than an epoch.
        """
        batch = self.batch(k)
        if length is None:
            return -(-self.branch_samples // batch)
        if batch > length:
            raise ConfigError(f"factors: {k:g} makes a batch of {batch} samples: must be at most the data's {length}")
        begun = min(length - cursor % length, self.branch_samples)  # in the epoch under way
        epochs, rest = divmod(self.branch_samples - begun, length)
        return -(-begun // batch) + epochs * -(-length // batch) + -(-rest // batch)


def smoothed(trace: Trace, total: float, window: float) -> float:
    """Returns the mean loss over the last `window` of the first `total` samples; NaN where one there is not known."""
    ends, losses = np.array(trace, dtype=np.float64).T[:2]
    starts = np.concatenate([[0.0], ends[:-1]])
    first = total * (1 - window)
    weights = np.clip(np.minimum(ends, total) - np.maximum(starts, first), 0.0, None)
    used = weights > 0
    if not (weights.sum() >= (total - first) * (1 - 1e-9) and np.isfinite(losses[used]).all()):
        return math.nan
    return float(losses[used] @ weights[used] / weights.sum())


@dataclass(frozen=True)
class CriticalBatch:
    """The critical batch size at one point of a training, with its 95 % interval, in samples."""

    plan: Plan
    factors: tuple[float, ...]
    """The values of k that were measured: none after the first one whose loss is significantly above the tolerance."""
    losses: tuple[tuple[float, ...], ...]  # smoothed loss by k and repetition; NaN where a branch diverged
    critical: float | None
    """B*; None where no branch was beyond the tolerance: it is larger than all batches that were tried."""
    low: float  # The interval's lower end. Where no upper end is known, B* may be anything from here on.
    high: float | None  # the interval's upper end; None where no loss is significantly above the tolerance
    noise_scale: tuple[float, float, float] | None = None
    """tr(Sigma) / |G|^2 over the branches of the reference, and its 95 % interval; None where it has no upper end."""

    curvature_noise_scale: float | None = None
    """`StepSettings.curvature_noise_scale` as these branches end, their median; None where it is not known."""

    @property
    def ratio(self) -> float | None:
        """c = B* / noise scale; None where one of them is unknown."""
        return self.critical / self.noise_scale[0] if self.critical and self.noise_scale else None

    @property
    def curvature_ratio(self) -> float | None:
        """B* / curvature_noise_scale; None where one of them is unknown."""
        return self.critical / self.curvature_noise_scale if self.critical and self.curvature_noise_scale else None

    def excess(self) -> list[tuple[float, float, float]]:
        """Returns by k how far the smoothed loss is above the reference's, as a part of it, with its 95 % interval.

        (mean, low, high); NaN where a branch diverged, and all of them where the reference's loss is 0.
        """
        losses = np.array(self.losses)
        scale = float(np.abs(losses[0]).mean()) or math.nan
        bounds = np.stack(_bounds((losses - losses[0]) / scale), axis=1).tolist()
        return [(mean, low, high) for mean, low, high in bounds]

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON; what is not finite is None."""
        names = ("critical", "low", "high", "noise_scale", "ratio", "curvature_noise_scale", "curvature_ratio")
        found = {name: getattr(self, name) for name in names}
        for name, rows in (("losses", self.losses), ("excess", self.excess())):
            found[name] = [[value if math.isfinite(value) else None for value in row] for row in rows]
        return asdict(self.plan) | found | {"measured": list(self.factors)}


def measure(branch: Branch, plan: Plan) -> CriticalBatch:
    """Trains the branches, from the smallest k to the largest, and estimates the critical batch size.

    It ends with the first k whose loss is significantly above the tolerance (one-sided test at 2.5 %): larger ones
    would not change the result. Raises ValueError where a branch of the reference diverges.
    """
    losses, traces = list[list[float]](), list[list[Trace]]()
    for k in plan.factors:
        traces.append([branch(k, repetition) for repetition in range(plan.repetitions)])
        losses.append([smoothed(trace, plan.branch_samples, plan.window) for trace in traces[-1]])
        if not np.isfinite(losses[0]).all():
            raise ValueError(f"the branch of the smallest batch, {plan.batch(k)}, diverges: nothing to compare with")
        if not np.isfinite(losses[-1]).all() or _bounds(_over(losses, plan.tolerance)[-1:])[1][0] > 0:
            break
    curvatures = [trace[-1][4] for trace in traces[0] if trace[-1][4] is not None]
    by_curvature = median(curvatures) if curvatures else None
    return replace(estimate(losses, plan), noise_scale=noise_scale(traces[0]), curvature_noise_scale=by_curvature)


def noise_scale(traces: Sequence[Trace]) -> tuple[float, float, float] | None:
    """Returns mean S / mean G2 over repeated branches, and its 95 % interval by Fieller's theorem.

    The interval is the set of r for which a t-test over the branches does not reject that the mean of S - r G2 is 0.
    None where it is not bounded, or S and G2 are unknown in all steps (one micro-batch each).
    """
    moments = [np.array(trace, dtype=np.float64)[:, 2:4] for trace in traces]
    moments = [each[np.isfinite(each).all(axis=1)] for each in moments]
    if not all(map(len, moments)):
        return None
    means = np.array([each.mean(axis=0) for each in moments])
    s, g = map(float, means.mean(axis=0))
    (ss, sg), (_, gg) = (np.cov(means.T) / len(means)).tolist()
    t = float(stdtrit(len(means) - 1, 0.975))  # the 97.5 % quantile of Student's t
    low, high = fieller(s, g, (ss, sg, gg), t, t)
    return None if low is None or high is None else (s / g, low, high)


def estimate(losses: Sequence[Sequence[float]], plan: Plan) -> CriticalBatch:
    """Returns the critical batch size from smoothed losses [k][repetition] of the first values of plan.factors.

    With d_s(k) = L_s(k) - L_s(reference) - tolerance |L_s(reference)| of repetition s, and linear in k between measured
    values:

        B* / B     where the mean of d over the repetitions first rises above 0
        interval   the k at which a t-test over the repetitions, at the 5 % level, does not reject a mean d of 0

    A test that is inverted in this way covers the true crossing in 95 % of the cases, if d_s is normal at that one k,
    whatever the shape of the curve. (Normal: d_s is a mean over many steps.) A branch that diverged is beyond.
    """
    finite = [k for k, row in zip(plan.factors, losses, strict=False) if np.isfinite(row).all()]
    over = _over(losses[: len(finite)], plan.tolerance)
    parts = [np.linspace(a, b, _POINTS, endpoint=False) for a, b in pairwise(finite)]
    grid = np.concatenate([*parts, finite[-1:]])
    curves = np.stack([np.interp(grid, finite, over[:, s]) for s in range(plan.repetitions)], axis=1)
    mean, lower, upper = _bounds(curves)
    critical, low, high = _first_above(grid, mean), _first_above(grid, upper), None
    if lower[-1] > 0:
        high = _crossing(grid, lower, int(np.flatnonzero(lower <= 0)[-1]))
    elif len(finite) < len(losses):  # a branch diverged: B* is below its batch, and nothing tells how far
        critical, high = critical or finite[-1], plan.factors[len(finite)]
    base = plan.batch_size
    return CriticalBatch(
        plan,
        tuple(plan.factors[: len(losses)]),
        tuple(tuple(map(float, row)) for row in losses),
        critical=None if critical is None else base * critical,
        low=base * (low or finite[-1]),
        high=None if high is None else base * high,
    )


def calibration(found: Sequence[CriticalBatch]) -> float | None:
    """Returns c of a run: the geometric mean of its checkpoints' B* / noise scale; None where none is known."""
    known = [each.ratio for each in found if each.ratio is not None]
    return math.exp(sum(map(math.log, known)) / len(known)) if known else None


def _over(losses: Sequence[Sequence[float]], tolerance: float) -> Floats:
    """Returns d [k, repetition]: above 0 where the loss is beyond the tolerance."""
    values = np.array(losses, dtype=np.float64)
    return np.asarray(values - values[0] - tolerance * np.abs(values[0]))


def _bounds(values: Floats) -> tuple[Floats, Floats, Floats]:
    """Returns each row's mean, and the ends of its 95 % interval."""
    repetitions, mean = values.shape[1], values.mean(axis=1)
    half = stdtrit(repetitions - 1, 0.975) * values.std(axis=1, ddof=1) / math.sqrt(repetitions)
    return mean, mean - half, mean + half


def _first_above(grid: Floats, curve: Floats) -> float | None:
    if not (curve > 0).any():
        return None
    i = int(np.argmax(curve > 0))
    return _crossing(grid, curve, i - 1) if i else float(grid[0])


def _crossing(grid: Floats, curve: Floats, i: int) -> float:
    """Returns where the curve, at most 0 at point i and above 0 at the next, crosses 0."""
    part = -curve[i] / (curve[i + 1] - curve[i])
    return float(grid[i] + part * (grid[i + 1] - grid[i]))
