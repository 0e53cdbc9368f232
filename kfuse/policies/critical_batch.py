"""A batch size that doubles as the critical batch size grows."""

from __future__ import annotations

import math
from collections.abc import Mapping

from kfuse.policies.signals import ConfiguredPolicy, Decision, Signals, check_positive, check_whole


class CriticalBatchPolicy(ConfiguredPolicy):
    """Doubles the batch size whenever the critical batch size exceeds twice of it (Merrill et al. 2025, section 4.1).

        B* > 2 B:    B <- 2 B,    learning rate <- sqrt(2) learning rate,    B* = factor * noise scale

    B* is the largest batch size with which the loss still falls as fast by samples. It is near zero at first, grows
    quickly, and levels off. Merrill et al. measure it in branches of the run, at a few checkpoints; the noise scale is
    measured in each step, and `factor` is the ratio of both. So that noise does not double the batch size, the low end
    of the noise scale's interval must exceed 2 B / factor. It never shrinks, hence never oscillates. A batch size
    whose double is above batch.max stays as it is.

    The learning rate is lr.scaling's: sqrt (the default), which is Merrill et al.'s choice and suits Adam, makes it
    sqrt(2) times as large at each doubling, linear and adascale suit SGD. This policy sets no lr_scale beside it, so
    the change of the batch size counts once. lr.scaling=none is refused: without it this is not their method.

    factor: critical batch size over noise scale; finite, above 0. 1 until it is measured.
    every: it decides at steps divisible by this number; at least 1. 20: an interval needs 20 steps after a change.

    Raises ValueError for an argument out of its range.
    """

    def __init__(self, factor: float = 1.0, every: int = 20) -> None:
        check_positive("policy.factor", factor)
        check_whole("policy.every", every, 1)
        self.factor, self.every = factor, every

    def decide(self, signals: Signals) -> Decision | None:
        """Returns twice the batch size where it is due; None at other steps, and while the interval is unknown."""
        low, double = signals.noise_scale_low, 2 * signals.batch_size
        if signals.step % self.every or low is None or not math.isfinite(low):
            return None
        due = self.factor * low > double and double <= signals.bounds.batch_max
        return Decision(batch_size=double) if due else None

    def lr_settings(self) -> Mapping[str, tuple[str, ...]]:
        """Returns the scalings that follow the batch size."""
        return {"scaling": ("sqrt", "linear", "adascale")}

    def owned_fields(self) -> tuple[str, ...]:
        return ("batch_size",)
