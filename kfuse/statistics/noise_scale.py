"""The gradient noise scale: unbiased moments of one step, and their running ratio with its interval.

Notation of McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", appendix A: G is the true gradient,
Sigma the covariance of one sample's gradient, B_simple = tr(Sigma) / |G|^2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Batch = tuple[float, int]  # a step's samples, and its micro-batches, at least 2
Covariance = tuple[float, float, float]

_BLOCKS = 20
_AGE = np.arange(_BLOCKS) - (_BLOCKS - 1) / 2  # of a block, in blocks from the middle of the window
_NOW = _BLOCKS / 2  # the end of the window, in blocks from its middle
_SPREAD = float(_AGE @ _AGE)
_CURVE = _AGE**2 - _SPREAD / _BLOCKS
_CURVE *= (_NOW**2 - _SPREAD / _BLOCKS) / float(_CURVE @ _CURVE)
_RESIDUAL = np.eye(_BLOCKS) - 1 / _BLOCKS - np.outer(_AGE, _AGE) / _SPREAD
# Columns: the mean of the blocks; the rise of the least-squares line from the middle of the window to now; how far a
# parabola ends above the line; the residuals, latest block first, so that their squares sum to a block's variance.
_FIT = np.column_stack(
    [np.full(_BLOCKS, 1 / _BLOCKS), _AGE * _NOW / _SPREAD, _CURVE, _RESIDUAL[:, ::-1] / math.sqrt(_BLOCKS - 2)]
)
_RISE_VARIANCE = _NOW**2 / _SPREAD  # of the line's rise, over the variance of one block
_CURVE_VARIANCE = float(_CURVE @ _CURVE)  # of the parabola's end above the line, likewise
_NOW_VARIANCE = 1 / _BLOCKS + _RISE_VARIANCE  # of the line's value now: twice the error of the mean
_T_LOW, _T_HIGH = 2.1009, 2.8784  # 97.5 % and 99.5 % quantiles of Student's t, _BLOCKS - 2 degrees of freedom
_BEND = 0.2  # curvature allowed for, as a standard deviation, over the line's rise
_CURVED, _STEEP = 0.15, 0.75  # curvature over rise, and rise over mean, above which a window is too curved for a line
_LAST = 0.34  # the latest block's share of the squared residuals at 3.5 standard errors: a jump, not yet a trend
_OUTLIER = 5.0  # t statistic of a step's S among the others
_SAME_BATCH = 1.5  # S and G2 of batches within this factor are about equally variable
_CHANGED = 3  # steps in a row with another batch make a change; one alone is the short last step of an epoch
_ROUNDING_SHARE = 0.25  # of S, at most, where S counts as measured


def moments(
    sum_weighted_sq: float, grad_sq_total: float, samples: float, micro_batches: int
) -> tuple[float | None, float | None]:
    """(S, G2) of one step: unbiased for tr(Sigma) and for |G|^2, also for micro-batches of unequal sizes.

        S  = (sum_j b_j |g_j|^2 - B |gbar|^2) / (M - 1)        G2 = |gbar|^2 - S / B

    sum_weighted_sq: sum over micro-batches of b_j |g_j|^2, with g_j the mean gradient of b_j samples. grad_sq_total:
    |gbar|^2, of the whole step's mean gradient. samples: B = sum_j b_j. micro_batches: M.
    Either can come out negative: clamping would bias averages over steps. Both are None where M < 2 or a value is not
    finite. The subtraction runs in float64, its inputs are rounded before: see `rounding_error`.
    """
    if micro_batches < 2 or not samples > 0:
        return None, None
    variance = (sum_weighted_sq - samples * grad_sq_total) / (micro_batches - 1)
    grad_sq = grad_sq_total - variance / samples
    if not (math.isfinite(variance) and math.isfinite(grad_sq)):
        return None, None
    return variance, grad_sq


def rounding_error(
    grad_sq_total: float, samples: float, micro_batches: int, workers: int = 1, wire: str = "fp32"
) -> float:
    """A bound on the rounding error of S as `moments` computes it.

    Where S << B |gbar|^2 the two terms nearly cancel. With eps the relative error of either, S is off by up to

        eps * B |gbar|^2 / (M - 1), which is eps * b / B_simple of S itself, with b = B / M the micro-batch size.

    fp32 on the wire: eps = 2^-24 (128 + M). Adding M micro-batches of nearly equal gradients costs up to M roundings,
    sums of squares within a block some tens.
    bf16 on the wire between n workers: eps = 2^-9 (n + 3). n contributions that are nearly equal are each rounded
    once, and so is each of the n - 1 partial sums, in proportion to its size; a square has twice its root's error.
    With sums in fp32 the contributions' roundings alone are left: eps = 2^-9 * 2.
    int8 on the wire (`kfuse.kernels.wire`), of contributions that are nearly equal: eps = 2 * 8 / 254. In a group of 64
    elements with the largest magnitude m each is off by m / 254 at most, so the group by 8 m / 254, and its norm is at
    least m. That is if all errors point in the gradient's direction. Usual errors are far smaller: docs/noise.md.

    workers: n; one alone sends nothing. wire: fp32, int8, bf16 (added up in fp32), or "bf16 sums" (added up in bf16).
    micro_batches: at least 2.
    """
    relative = 2**-24 * (128 + micro_batches)
    if workers > 1:
        relative += {"fp32": 0.0, "int8": 16 / 254, "bf16": 2**-9 * 2, "bf16 sums": 2**-9 * (workers + 3)}[wire]
    return relative * samples * grad_sq_total / (micro_batches - 1)


@dataclass(frozen=True)
class Estimate:
    """The running noise scale in samples, its interval, and the running means it comes from. None is unknown.

    low is known alone where G2 is not significantly above zero, and where one step's S stands out. Otherwise the first
    three are all known or all None.
    """

    noise_scale: float | None = None
    low: float | None = None
    high: float | None = None
    mean_grad_variance: float | None = None
    mean_grad_sq: float | None = None


class NoiseScale:
    """Running estimate of B_simple = EMA(S) / EMA(G2), with a confidence interval for the noise scale now.

    S and G2 are averaged apart, bias-corrected and never clamped, since the mean of ratios is not the
    ratio of means. They are per-sample quantities: the means carry over changes of batch size and workers.

    The interval is for the noise scale now, which the EMA lags behind where it drifts:

    1) It rests on the latest W = (1 + decay) / (1 - decay) steps (the uniform window whose mean is as variable as the
       EMA), but only on those since the batch last changed by more than a factor of 1.5, for the batch decides how
       much S and G2 vary from step to step. Other batches in between (an epoch's short last step) stay out of it.
    2) A straight line is fitted to 20 contiguous block means of S and of G2; its value at the end of the window stands
       for now, and its residuals give the covariance. Blocks, because steps are not quite independent: what is
       correlated falls mostly inside a block.
    3) Where the blocks bend significantly away from the line, or the line is steep, the window is halved, if need be
       down to 20 steps. The covariance allows for a curvature that was not significant.
    4) The interval is Fieller's (1954), for a ratio of two correlated values, with error probabilities of 2.5 % below
       and 0.5 % above. Less above, since a number is shown only where G2 came out clearly above zero, hence in part
       where it came out too large: 0.5 % of all runs are 10 % of those with a number where one in twenty has one.
    5) It is widened by the rounding error of S, and to hold the running estimate.

    docs/noise.md has the measured coverage and what remains.

    decay: weight of the past per step, in [0, 1). Raises ValueError otherwise.
    """

    def __init__(self, decay: float = 0.99) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"noise scale decay={decay}: must be at least 0 and below 1")
        self._decay = decay
        self._max_block = max(1, round((1 + decay) / (1 - decay) / _BLOCKS))
        self._window = self._max_block * _BLOCKS
        # Rows S and G2. Twice the window, so that the latest values always lie contiguously.
        self._values: NDArray[np.float64] = np.empty((2, 2 * self._window))
        self._end = 0
        self._batch: Batch | None = None  # of the window's first step
        self._other_run = 0  # steps in a row that had another batch
        self._sums = (0.0, 0.0, 0.0)  # of S, of G2 and of the rounding error of S
        self._weight = 0.0  # sum of the EMA's weights: 1 - decay**steps
        self._unknown_run = 0
        self._estimate: Estimate | None = Estimate()

    def update(
        self, grad_variance: float | None, grad_sq: float | None, batch: Batch | None = None, rounding: float = 0.0
    ) -> None:
        """Takes in one step's (S, G2), as from `moments`. A pair that is not known is ignored.

        batch: the step's samples and micro-batches (at least 2). Without it no change of the batch is noticed.
        rounding: the error that S may have by rounding, from `rounding_error`.
        """
        self._estimate = None
        if grad_variance is None or grad_sq is None or not math.isfinite(grad_variance + grad_sq):
            self._unknown_run += 1
            return
        self._unknown_run = 0
        if self._enters_window(batch):
            self._append(grad_variance, grad_sq)
        keep, new, sums = self._decay, 1 - self._decay, self._sums
        self._sums = (
            keep * sums[0] + new * grad_variance,
            keep * sums[1] + new * grad_sq,
            keep * sums[2] + new * rounding,
        )
        self._weight = keep * self._weight + new

    def means_alone(self) -> Estimate:
        """The running means of S and of G2, where nobody sees the rest."""
        if self._weight == 0:
            return Estimate()
        variance, grad_sq, _ = (total / self._weight for total in self._sums)
        return Estimate(mean_grad_variance=variance, mean_grad_sq=grad_sq)

    def estimate(self) -> Estimate:
        """The estimate now. Cheap enough for every step.

        noise_scale, low and high are None
        - before 20 known steps, and before 20 since the batch changed;
        - where the mean of S is not above four times its rounding error;
        - where no line fits S or G2 over the latest 20 steps;
        - after more unknown steps in a row than one block has (10 by default): no recent values.
        noise_scale and high are None too where G2 is not significantly above zero, and where one step's S stands out:
        the gradients' tails are too heavy for them. The low end is still given: that step's variance lowers it.
        """
        if self._estimate is None:
            self._estimate = self._compute()
        return self._estimate

    def state_dict(self) -> dict[str, Any]:
        """Everything that estimates depend on, in plain values."""
        latest = self._values[:, max(0, self._end - self._window) : self._end]
        return {
            "grad_variance": latest[0].tolist(),
            "grad_sq": latest[1].tolist(),
            "batch": None if self._batch is None else list(self._batch),
            "other_run": self._other_run,
            "sums": list(self._sums),
            "weight": self._weight,
            "unknown_run": self._unknown_run,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`'s state, bitwise where the decay is the same."""
        self._end = 0
        for pair in zip(state["grad_variance"], state["grad_sq"], strict=True):
            self._append(*pair)
        self._batch = None if state["batch"] is None else tuple(state["batch"])
        self._other_run = state["other_run"]
        self._sums, self._weight = tuple(state["sums"]), state["weight"]
        self._unknown_run = state["unknown_run"]
        self._estimate = None

    def _enters_window(self, batch: Batch | None) -> bool:
        """Whether this step's values belong to the window, which begins anew where the batch has changed."""
        if batch is None or self._batch is None or _similar(batch, self._batch):
            self._batch = self._batch or batch
            self._other_run = 0
            return True
        self._other_run += 1
        if self._other_run < _CHANGED:
            return False
        self._batch, self._other_run, self._end = batch, 0, 0
        return True

    def _append(self, grad_variance: float, grad_sq: float) -> None:
        if self._end == self._values.shape[1]:
            self._values[:, : self._window] = self._values[:, self._window :]
            self._end = self._window
        self._values[0, self._end] = grad_variance
        self._values[1, self._end] = grad_sq
        self._end += 1

    def _compute(self) -> Estimate:
        if self._weight == 0:
            return Estimate()
        variance, grad_sq, rounding = (total / self._weight for total in self._sums)
        unknown = Estimate(mean_grad_variance=variance, mean_grad_sq=grad_sq)
        if self._unknown_run > self._max_block or not variance > 0 or rounding > _ROUNDING_SHARE * variance:
            return unknown
        now = self._now()
        if now is None:
            return unknown
        low, high = fieller(*now, _T_LOW, _T_HIGH)
        if low is None:
            return unknown
        low *= 1 - rounding / variance
        if high is None or grad_sq <= 0 or self._has_outlier():
            return Estimate(None, low or None, None, variance, grad_sq)
        ratio = variance / grad_sq
        return Estimate(ratio, min(low, ratio), max(high * (1 + rounding / variance), ratio), variance, grad_sq)

    def _has_outlier(self) -> bool:
        """Whether the window's largest S fails Grubbs's test: its share of the squared deviations is too large."""
        values = self._values[0, max(0, self._end - self._window) : self._end]
        steps, deviations = len(values), values - values.mean()
        share = (steps - 1) / steps * _OUTLIER**2 / (steps - 2 + _OUTLIER**2)
        return float(deviations.max()) ** 2 > share * float(deviations @ deviations)

    def _now(self) -> tuple[float, float, Covariance] | None:
        """S and G2 at the end of the window, with the variance of S, the covariance and the variance of G2."""
        block = min(self._end // _BLOCKS, self._max_block)
        while block:
            latest = self._values[:, self._end - block * _BLOCKS : self._end]
            fit = np.add.reduce(latest.reshape(2, _BLOCKS, block), axis=2) @ _FIT  # of block sums
            (mean_s, rise_s, curve_s, last_s), (mean_g, rise_g, curve_g, last_g) = fit[:, :4].tolist()
            residuals = fit[:, 3:]
            (ss, sg), (_, gg) = (residuals @ residuals.T).tolist()
            straight = _is_straight(mean_s, rise_s, curve_s, last_s, ss)
            if straight and _is_straight(mean_g, rise_g, curve_g, last_g, gg):
                bend_s, bend_g = _BEND * rise_s, _BEND * rise_g
                covariance = (
                    (_NOW_VARIANCE * ss + bend_s * bend_s) / block**2,
                    (_NOW_VARIANCE * sg + bend_s * bend_g) / block**2,
                    (_NOW_VARIANCE * gg + bend_g * bend_g) / block**2,
                )
                return (mean_s + rise_s) / block, (mean_g + rise_g) / block, covariance
            block //= 2
        return None


def _similar(one: Batch, other: Batch) -> bool:
    samples, freedom = one[0] / other[0], (one[1] - 1) / (other[1] - 1)
    return max(samples, 1 / samples, freedom, 1 / freedom) <= _SAME_BATCH


def _is_straight(mean: float, rise: float, curve: float, last: float, block_variance: float) -> bool:
    """Whether a line describes the window. The first two tests need two standard errors as well."""
    steep = abs(rise) > _STEEP * abs(mean) and rise * rise > 4 * _RISE_VARIANCE * block_variance
    curved = abs(curve) > _CURVED * abs(rise) and curve * curve > 4 * _CURVE_VARIANCE * block_variance
    return not (steep or curved or last * last > _LAST * block_variance)


def fieller(
    numerator: float, denominator: float, covariance: Covariance, t_low: float, t_high: float
) -> tuple[float | None, float | None]:
    """Returns both ends of the values r >= 0 that a t-test of numerator - r * denominator = 0 does not reject.

    covariance: variance of the numerator, covariance, variance of the denominator. t_low, t_high: the quantile of
    Student's t for either end. The upper end is None where there is none, both are None where nothing can be said. The
    ends are the roots of a r^2 - 2 b r + c.
    """
    low = high = None
    a, b, c = _quadratic(numerator, denominator, covariance, t_low)
    divisor = b + math.sqrt(max(b * b - a * c, 0.0))
    if numerator > 0 and divisor > 0:
        low = max(c, 0.0) / divisor
    a, b, c = _quadratic(numerator, denominator, covariance, t_high)
    if low is not None and denominator > 0 and a > 0:
        high = (b + math.sqrt(max(b * b - a * c, 0.0))) / a
    return low, high


def _quadratic(x: float, y: float, covariance: Covariance, t: float) -> tuple[float, float, float]:
    return y * y - t * t * covariance[2], x * y - t * t * covariance[1], x * x - t * t * covariance[0]
