"""The noise scale of the newest steps, with its interval, as policies decide by it."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from kfuse.policies.signals import ConfiguredPolicy, Signals
from kfuse.statistics.noise_scale import fieller

LEAST_STEPS, MOST_STEPS = 20, 60
"""Steps that a decision rests on. 60 follow a noise scale that rises by half in a hundred steps; fewer than 20 tell too
little of how much S and G2 vary."""
_T = 2.0  # standard errors on either side: 97.5 % of Student's t with 60 degrees of freedom


class NoiseInterval(NamedTuple):
    """The noise scale in samples: the ratio of the mean S and the mean G2, and both ends. NaN is unknown.

    Where the mean of G2 is not significantly above zero, `high` is unknown: it may be any number above `low`.
    """

    low: float = math.nan
    middle: float = math.nan
    high: float = math.nan


class NoisePolicy(ConfiguredPolicy):
    """A policy that decides by the noise scale of the newest 20 to 60 steps.

    It computes that itself from each step's S and G2 (`signals.grad_variance`, `signals.grad_sq`), which are per-sample
    quantities, unbiased with any batch size. `signals.noise_scale` and its interval are made to be shown: they rest on
    about 200 steps. A decision must come in time, and must not be made by chance: the interval is Fieller's (1954), by
    the variance that S and G2 had from step to step, so a step that stands out widens it.
    """

    def __init__(self) -> None:
        self.last_step = -1
        self.newest: list[tuple[float, float]] = []
        """S and G2 of the newest steps, the latest last."""

    def observe(self, signals: Signals) -> None:
        """Takes in a step, once: it may be decided on again after a failure.

        One whose S and G2 are unknown takes the oldest one away, so that old steps do not count for ever.
        """
        variance, grad_sq = signals.grad_variance, signals.grad_sq
        if signals.step <= self.last_step:
            return
        self.last_step = signals.step
        if variance is not None and grad_sq is not None and math.isfinite(variance + grad_sq):
            self.newest = [*self.newest[1 - MOST_STEPS :], (variance, grad_sq)]
        else:
            self.newest = self.newest[1:]

    def noise_interval(self) -> NoiseInterval:
        """Returns the interval now."""
        steps = len(self.newest)
        if steps < LEAST_STEPS:
            return NoiseInterval()
        values = np.array(self.newest)
        variance, grad_sq = values.mean(0).tolist()
        (ss, sg), (_, gg) = (np.cov(values.T) / steps).tolist()
        low, high = fieller(variance, grad_sq, (ss, sg, gg), _T, _T)
        if low is None:
            return NoiseInterval()
        if high is None:
            return NoiseInterval(low)
        return NoiseInterval(low, variance / grad_sq, high)
