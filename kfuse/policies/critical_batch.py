"""A batch size that doubles as the critical batch size grows."""

from __future__ import annotations

import math

from kfuse.policies.signals import ConfiguredPolicy, Decision, Signals, check_positive, check_whole


class CriticalBatchPolicy(ConfiguredPolicy):
    """Doubles the batch size whenever the critical batch size exceeds twice of it (Merrill et al. 2025, section 4.1).

        B* > 2 B:    B <- 2 B,    learning rate <- sqrt(2) learning rate,    B* = factor * noise scale

    B* is the largest batch size with which the loss still falls as fast by samples. Merrill et al. measure it in
    branches of the run, at a few checkpoints; the noise scale is measured in each step, and `factor` is the ratio of
    both. So that noise does not double the batch size, the low end of the noise scale's interval must exceed
    2 B / factor. It never shrinks. A batch size whose double is above batch.max stays as it is.

    The learning rate is lr.scaling's: sqrt (the default), Merrill et al.'s choice, suits Adam, linear and adascale suit
    SGD. lr.scaling=none is refused: without it this is not their method.

    factor: critical batch size over noise scale; finite, above 0. 1 until it is measured.
    every: it decides at steps divisible by this number; at least 1. 20: an interval needs 20 steps after a change.
    """

    owned_fields = ("batch_size",)

    def __init__(self, factor: float = 1.0, every: int = 20) -> None:
        check_positive("policy.factor", factor)
        check_whole("policy.every", every, 1)
        self.factor, self.every = factor, every
        self.lr_settings = {"scaling": ("sqrt", "linear", "adascale")}

    def decide(self, signals: Signals) -> Decision | None:
        """Returns twice the batch size where it is due; None elsewhere, and while the interval is unknown."""
        low, double = signals.noise_scale_low, 2 * signals.batch_size
        if signals.step % self.every or low is None or not math.isfinite(low):
            return None
        due = self.factor * low > double and double <= signals.bounds.batch_max
        return Decision(batch_size=double) if due else None
