"""The gradient noise scale: unbiased moments of one step, and their running ratio with its interval.

Notation of McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", appendix A: G is the
true gradient, Sigma the covariance of one sample's gradient, B_simple = tr(Sigma) / |G|^2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BLOCKS = 20
_STUDENT_T = 2.0930240544083087  # 97.5 % quantile for _BLOCKS - 1 degrees of freedom


def moments(
    sum_weighted_sq: float, grad_sq_total: float, samples: float, micro_batches: int
) -> tuple[float | None, float | None]:
    """(S, G2) of one step: unbiased for tr(Sigma) and for |G|^2, also for micro-batches of unequal sizes.

        S  = (sum_j b_j |g_j|^2 - B |gbar|^2) / (M - 1)        G2 = |gbar|^2 - S / B

    sum_weighted_sq: sum over micro-batches of b_j |g_j|^2, with g_j the mean gradient of b_j samples.
    grad_sq_total: |gbar|^2, gbar being the mean gradient of the whole step.
    samples: B = sum_j b_j. micro_batches: M.
    Either can come out negative: clamping would bias every average taken over steps. Both are None
    where M < 2 (nothing to compare) or a value is not finite.

    Precision: the subtraction runs in float64, but its inputs are fp32 sums with a relative error eps
    (6e-8 for one rounding, a few 1e-7 for a sum over blocks). Where S << B |gbar|^2 the two terms nearly
    cancel, and the relative error of S is about eps * b / B_simple, with b = B / M the micro-batch size,
    whatever M is: three digits hold while the noise scale is above 1e-3 of a micro-batch. G2 is exact
    to eps there.
    """
    if micro_batches < 2 or not samples > 0:
        return None, None
    variance = (sum_weighted_sq - samples * grad_sq_total) / (micro_batches - 1)
    grad_sq = grad_sq_total - variance / samples
    if not (math.isfinite(variance) and math.isfinite(grad_sq)):
        return None, None
    return variance, grad_sq


@dataclass(frozen=True)
class Estimate:
    """The running noise scale in samples, its 95 % interval, and the running means it comes from.

    The first three are all known or all None.
    """

    noise_scale: float | None = None
    low: float | None = None
    high: float | None = None
    mean_grad_variance: float | None = None
    mean_grad_sq: float | None = None


class NoiseScale:
    """Running estimate of B_simple = EMA(S) / EMA(G2), with a confidence interval.

    S and G2 are averaged apart, bias-corrected and never clamped, since the mean of ratios is not the
    ratio of means. They are per-sample quantities: state carries over changes of batch size and workers.

    The interval is Fieller's (1954), for a ratio of two correlated means. Their covariance is taken from
    20 contiguous block means over the latest W = (1 + decay) / (1 - decay) steps: the uniform window whose
    mean is as variable as the exponential one, if steps are independent. Blocks, because steps are not
    quite independent: what is correlated falls mostly inside a block.

    decay: weight of the past per step, in [0, 1). Raises ValueError otherwise.
    """

    def __init__(self, decay: float = 0.99) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"noise scale decay={decay}: allowed is 0 <= decay < 1")
        self._decay = decay
        self._max_block = max(1, round((1 + decay) / (1 - decay) / _BLOCKS))
        self._window = self._max_block * _BLOCKS
        # Rows S and G2. Twice the window, so that the latest values always lie contiguously.
        self._values: NDArray[np.float64] = np.empty((2, 2 * self._window))
        self._end = 0
        self._sums = (0.0, 0.0)
        self._weight = 0.0  # sum of the EMA's weights: 1 - decay**steps
        self._weight_sq = 0.0  # sum of their squares
        self._unknown_run = 0
        self._estimate: Estimate | None = Estimate()
        self.known_steps = 0
        """Steps that entered the estimate."""
        self.unknown_steps = 0
        """Steps left out because their statistics were None or not finite."""

    def update(self, grad_variance: float | None, grad_sq: float | None) -> None:
        """Take in one step's (S, G2), as from `moments`. A pair that is not known is counted and ignored."""
        self._estimate = None
        if grad_variance is None or grad_sq is None or not math.isfinite(grad_variance + grad_sq):
            self.unknown_steps += 1
            self._unknown_run += 1
            return
        self.known_steps += 1
        self._unknown_run = 0
        self._append(grad_variance, grad_sq)
        keep, new = self._decay, 1 - self._decay
        self._sums = (keep * self._sums[0] + new * grad_variance, keep * self._sums[1] + new * grad_sq)
        self._weight = keep * self._weight + new
        self._weight_sq = keep**2 * self._weight_sq + new**2

    def estimate(self) -> Estimate:
        """The estimate now. Cheap enough for every step.

        noise_scale, low and high are None
        - before 20 known steps;
        - where the interval is unbounded: the mean of G2 is not significantly above zero, so that the
          noise scale could be anything upwards;
        - where the mean of S is not positive: a variance cannot be, so what was measured is rounding;
        - after more unknown steps in a row than one block has (10 by default): the past says little then.
        The lower end is cut off at zero, below which no noise scale lies.
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
            "sums": list(self._sums),
            "weight": self._weight,
            "weight_sq": self._weight_sq,
            "unknown_run": self._unknown_run,
            "known_steps": self.known_steps,
            "unknown_steps": self.unknown_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`'s state, bitwise where the decay is the same."""
        self._end = 0
        for pair in zip(state["grad_variance"], state["grad_sq"], strict=True):
            self._append(*pair)
        self._sums = (float(state["sums"][0]), float(state["sums"][1]))
        self._weight = float(state["weight"])
        self._weight_sq = float(state["weight_sq"])
        self._unknown_run = int(state["unknown_run"])
        self.known_steps = int(state["known_steps"])
        self.unknown_steps = int(state["unknown_steps"])
        self._estimate = None

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
        variance, grad_sq = self._sums[0] / self._weight, self._sums[1] / self._weight
        unknown = Estimate(mean_grad_variance=variance, mean_grad_sq=grad_sq)
        block = min(self._end // _BLOCKS, self._max_block)
        if block == 0 or self._unknown_run > self._max_block or variance <= 0:
            return unknown
        interval = _fieller(variance, grad_sq, self._covariance(block))
        if interval is None:
            return unknown
        return Estimate(variance / grad_sq, max(interval[0], 0.0), interval[1], variance, grad_sq)

    def _covariance(self, block: int) -> tuple[float, float, float]:
        """Var, Cov and Var of the two EMA means, from 20 blocks of `block` steps each."""
        latest = self._values[:, self._end - block * _BLOCKS : self._end]
        deviations = latest.reshape(2, _BLOCKS, block).sum(axis=2)
        deviations -= deviations.sum(axis=1, keepdims=True) / _BLOCKS
        sums = deviations @ deviations.T
        # A block sum has the variance of `block` independent steps, the EMA that of one step times the
        # sum of its squared weights. Before the window is full, the two windows are not the same.
        per_step = 1 / ((_BLOCKS - 1) * block)
        scale = per_step * self._weight_sq / self._weight**2
        return scale * float(sums[0, 0]), scale * float(sums[0, 1]), scale * float(sums[1, 1])


def _fieller(
    numerator: float, denominator: float, covariance: tuple[float, float, float]
) -> tuple[float, float] | None:
    """The values r that a t-test of numerator - r * denominator = 0 does not reject; None if unbounded.

    covariance: variance of the numerator, covariance, variance of the denominator.
    """
    t2 = _STUDENT_T**2
    a = denominator**2 - t2 * covariance[2]
    b = numerator * denominator - t2 * covariance[1]
    c = numerator**2 - t2 * covariance[0]
    if denominator <= 0 or a <= 0:
        return None
    root = math.sqrt(max(b * b - a * c, 0.0))
    return (b - root) / a, (b + root) / a
