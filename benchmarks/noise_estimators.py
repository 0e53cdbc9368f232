"""Published estimators of the gradient noise scale, written anew from their formulas, beside kfuse's own.

Each takes a step's M micro-batches of b samples (B = M b): |g_j|^2 of each one's mean gradient g_j, and |gbar|^2 of the
step's. Each has the default settings of its source, and gives a number of samples.

    S_j  = (|g_j|^2 - |gbar|^2) / (1/b - 1/B)      unbiased for tr(Sigma)
    G2_j = (B |gbar|^2 - b |g_j|^2) / (B - b)      unbiased for |G|^2       (McCandlish et al. 2018, appendix A.1)

Means of these over j are kfuse's S and G2. So the sources differ in three points: how many of the M squares they use,
how they average over steps, and what they clamp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kfuse.statistics.noise_scale import Estimate, NoiseScale, moments, rounding_error


class Estimator(Protocol):
    def update(self, squares: Sequence[float], total: float, size: int) -> None:
        """Takes in a step. squares: |g_j|^2 of each micro-batch. total: |gbar|^2. size: b, in samples."""
        ...

    def estimate(self) -> Estimate:
        """The noise scale in samples; None where the source gives a number that is negative or not finite."""
        ...


@dataclass
class Mean:
    """An exponential mean. It begins with the first value, or, where `corrected`, divides by the sum of its weights."""

    decay: float
    corrected: bool = True
    value: float = 0.0
    weight: float = 0.0

    def update(self, value: float) -> None:
        first = not self.corrected and self.weight == 0
        new = 1.0 if first else 1 - self.decay
        self.value, self.weight = (1 - new) * self.value + new * value, (1 - new) * self.weight + new

    @property
    def mean(self) -> float:
        """NaN before the first value."""
        return self.value / self.weight if self.weight else math.nan


class Kfuse:
    """`kfuse.statistics.noise_scale`, as the trainer uses it. decay: weight of the past, 0.99 in the trainer."""

    def __init__(self, decay: float = 0.99) -> None:
        self.noise = NoiseScale(decay)

    def update(self, squares: Sequence[float], total: float, size: int) -> None:
        parts, batch = len(squares), len(squares) * size
        pair = moments(size * sum(squares), total, batch, parts)
        self.noise.update(*pair, (batch, parts), rounding_error(total, batch, parts))

    def estimate(self) -> Estimate:
        return self.noise.estimate()


@dataclass
class KungFu:
    """lsds/KungFu: `global_noise_scale` in srcs/python/kungfu/tensorflow/ops/monitor.py, its operator in
    srcs/cpp/src/tensorflow/ops/cpu/collective.cpp, its mean in srcs/cpp/include/kungfu/utils/ema.hpp.

    A worker uses its own gradient (here the first micro-batch's) and the reduced one: EMA(S_1) / EMA(G2_1). Nothing is
    clamped. alpha: weight of the past, 0.9 in `MonitorGradientNoiseScaleOptimizer`; the means begin with the first
    step's values.
    """

    alpha: float = 0.9
    variance: Mean = field(init=False)
    grad_sq: Mean = field(init=False)

    def __post_init__(self) -> None:
        self.variance, self.grad_sq = Mean(self.alpha, corrected=False), Mean(self.alpha, corrected=False)

    def update(self, squares: Sequence[float], total: float, size: int) -> None:
        small, batch = squares[0], len(squares) * size
        self.variance.update((small - total) / (1 / size - 1 / batch))
        self.grad_sq.update((batch * total - size * small) / (batch - size))

    def estimate(self) -> Estimate:
        return positive(ratio(self.variance.mean, self.grad_sq.mean))


@dataclass
class TwoMeans:
    """What FairScale and AdaptDL average: v = tr(Sigma) / b and m = |G|^2, of micro-batches of `size` samples, b."""

    variance: Mean = field(init=False, default_factory=lambda: Mean(0.0))
    grad_sq: Mean = field(init=False, default_factory=lambda: Mean(0.0))
    size: int = field(init=False, default=0)


@dataclass
class FairScale(TwoMeans):
    """facebookresearch/fairscale: AdaScale in fairscale/optim/adascale.py (Johnson et al. 2020, appendix B.3).

    It estimates the terms of AdaScale's gain, v = tr(Sigma) / b and m = |G|^2, with b the base batch, here one
    micro-batch (scale = M, its default). The noise scale is b v / m. In each step v is raised to 1e-6 and m to 0 before
    the averages. smoothing: weight of the past; None is 1 - M / 1000, at least 0.
    """

    smoothing: float | None = None

    def update(self, squares: Sequence[float], total: float, size: int) -> None:
        parts, self.size = len(squares), size
        decay = max(1 - parts / 1000, 0.0) if self.smoothing is None else self.smoothing
        self.variance.decay = self.grad_sq.decay = decay
        variance = (sum(squares) - parts * total) / (parts - 1)
        self.variance.update(max(variance, 1e-6))
        self.grad_sq.update(max(total - variance / parts, 0.0))

    def estimate(self) -> Estimate:
        return positive(self.size * ratio(self.variance.mean, self.grad_sq.mean))


@dataclass
class AdaptDL(TwoMeans):
    """petuum/adaptdl: `GradientNoiseScale` in adaptdl/adaptdl/torch/gradient_noise_scale.py (Pollux, OSDI 2021).

    v = tr(Sigma) / b and m = |G|^2 as for FairScale, at accum_scale = M, its default, in one parameter group. v is
    raised to 1e-6 and m to 0 after the averages, so that the noise scale is infinite where the mean of m is negative.
    The weight of the past is smoothing^M. With one gradient a step it takes differences of steps: that is not here.

    `AdamGradientNoiseScale`, for the rule AdamScale, is the same formula for gradients that are divided by
    sqrt(v) + eps, with Adam's bias-corrected v; by 1 before Adam's fifth step (here those steps are left out).
    """

    smoothing: float = 0.999

    def update(self, squares: Sequence[float], total: float, size: int) -> None:
        count = scale = len(squares)
        local, self.size = sum(squares) / count, size
        self.variance.decay = self.grad_sq.decay = self.smoothing**scale
        self.grad_sq.update((count * total - local) / (count - 1))
        self.variance.update((local - total) * scale / (count - 1))

    def estimate(self) -> Estimate:
        return positive(self.size * ratio(max(self.variance.mean, 1e-6), max(self.grad_sq.mean, 0.0)))


@dataclass
class KDiffusion:
    """crowsonkb/k-diffusion: `GradientNoiseScale` in k_diffusion/gns.py.

    max(EMA(S), eps) / max(EMA(G2), eps), with means that begin at 0 and are not corrected for that: the correction
    cancels in the ratio, but not in the comparison with eps. beta: weight of the past.
    """

    beta: float = 0.9998
    eps: float = 1e-8
    variance: float = 0.0
    grad_sq: float = 0.0

    def update(self, squares: Sequence[float], total: float, size: int) -> None:
        small, batch = sum(squares) / len(squares), len(squares) * size
        variance = (small - total) / (1 / size - 1 / batch)
        grad_sq = (batch * total - size * small) / (batch - size)
        self.variance = self.beta * self.variance + (1 - self.beta) * variance
        self.grad_sq = self.beta * self.grad_sq + (1 - self.beta) * grad_sq

    def estimate(self) -> Estimate:
        return positive(max(self.variance, self.eps) / max(self.grad_sq, self.eps))


PEERS = {"KungFu": KungFu, "FairScale": FairScale, "AdaptDL": AdaptDL, "k-diffusion": KDiffusion}


def ratio(variance: float, grad_sq: float) -> float:
    return variance / grad_sq if grad_sq else math.inf


def positive(noise_scale: float) -> Estimate:
    """Only a positive, finite number can be compared with the truth."""
    return Estimate(noise_scale if 0 < noise_scale < math.inf else None)
