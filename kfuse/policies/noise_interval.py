"""The noise scale of the newest steps, with its interval, as policies decide by it."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from kfuse.policies.signals import ConfiguredPolicy, Signals
from kfuse.statistics.noise_scale import fieller

LEAST_STEPS, MOST_STEPS = 20, 60
"""Steps that a decision rests on. More would follow a rising noise scale too late; fewer than 20 tell too little of how
much S and G2 vary."""
LEAST_MICRO_BATCHES = 2
"""Of a smaller batch: with one micro-batch the noise scale would be unknown from then on."""
_TOO_LARGE = 1e100  # of S or G2: squares of larger ones could overflow
_T = 2.0  # standard errors on either side: 97.5 % of Student's t with 60 steps, 97.0 % with 20


class NoiseInterval(NamedTuple):
    """Both ends of the noise scale in samples: of the ratio of the mean S and the mean G2. NaN is unknown.

    Where the mean of G2 is not significantly above zero, `high` is unknown: it may be any number above `low`.
    """

    low: float = math.nan
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
        if signals.step <= self.last_step:
            return
        self.last_step = signals.step
        variance, grad_sq = signals.grad_variance, signals.grad_sq
        if variance is not None and grad_sq is not None and abs(variance) + abs(grad_sq) < _TOO_LARGE:
            self.newest = [*self.newest, (variance, grad_sq)][-MOST_STEPS:]
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
        return NoiseInterval(*(math.nan if end is None else end for end in (low, high)))
