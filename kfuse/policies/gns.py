"""Batch size and worker count that follow the gradient noise scale."""

from __future__ import annotations

import math

from kfuse.policies.signals import ConfiguredPolicy, Decision, Signals, check_positive, check_whole


class GNSPolicy(ConfiguredPolicy):
    """Keeps the batch size at `factor` times the gradient noise scale, and the worker count in proportion to it.

        batch = factor * noise scale,    noise scale B_simple = S / G2, in samples

    Batches larger than B_simple save few steps (McCandlish et al. 2018). `factor` is the critical batch size over
    B_simple; `kfuse cbs` measures it. B_simple is an estimate, with a confidence interval [low, high]. So there is
    hysteresis:

    - It grows only where factor * low is above the batch size, and shrinks only where factor * high is below
      (1 - dead_band) of it. It goes to factor * noise scale, which lies inside the interval.
    - By at most a factor of two at a time, in whole micro-batches.
    - The dead band is for shrinking alone: the interval of a noise scale that stands still excludes the batch size now
      and then. In 40 runs of 200 decisions each on simulated gradients (tests/test_policies.py has some) the batch size
      turned around 134 times without a dead band, 11 times with one of 0.1, never with 0.2.
    - Where only `low` is known, the noise scale may be any number above it: it grows to factor * low, never shrinks.

    The learning rate follows the batch size as lr.scaling says.

    factor: the batch size to have, over the noise scale; finite, above 0. 1: the noise scale itself.
    every: it decides at steps divisible by this number; at least 1. 20: an interval needs 20 steps after a change.
    micro_batches_per_worker: micro-batches of a step that are the work of one worker; at least 1.
    allow_shrink: whether batch size and worker count may also fall; otherwise they only grow.
    dead_band: part of the batch size by which factor * high must lie below it before it shrinks; at least 0, below 1.
    """

    owned_fields = ("batch_size", "workers")

    def __init__(
        self,
        factor: float = 1.0,
        every: int = 20,
        micro_batches_per_worker: int = 4,
        allow_shrink: bool = False,
        dead_band: float = 0.2,
    ) -> None:
        check_positive("policy.factor", factor)
        check_whole("policy.every", every, 1)
        check_whole("policy.micro_batches_per_worker", micro_batches_per_worker, 1)
        if not isinstance(allow_shrink, bool):
            raise ValueError(f"policy.allow_shrink={allow_shrink!r}: must be true or false")
        if not isinstance(dead_band, int | float) or isinstance(dead_band, bool) or not 0 <= dead_band < 1:
            raise ValueError(f"policy.dead_band={dead_band!r}: must be a number, at least 0 and below 1")
        self.factor, self.every = factor, every
        self.micro_batches_per_worker, self.allow_shrink = micro_batches_per_worker, allow_shrink
        self.dead_band = dead_band

    def decide(self, signals: Signals) -> Decision | None:
        """Returns the batch size and worker count to move to; None at other steps, and where none is to change."""
        if signals.step % self.every or (batch_size := self._batch_size(signals)) is None:
            return None
        return Decision(batch_size=batch_size, workers=self._workers(signals, batch_size)).changes(signals)

    def _batch_size(self, signals: Signals) -> int | None:
        """Returns the batch size to have, which may be the present one; None while the noise scale is unknown."""
        noise, low, high = signals.noise_scale, signals.noise_scale_low, signals.noise_scale_high
        known = [value for value in (noise, low, high) if value is not None]
        if low is None or len(known) == 2 or not all(map(math.isfinite, known)):
            return None
        batch, micro = signals.batch_size, signals.micro_batch
        target = math.floor(self.factor * (low if noise is None else noise) / micro)
        least = math.ceil(signals.bounds.batch_min / micro)
        most = signals.bounds.batch_max // micro
        if self.factor * low > batch:
            grown = min(target, 2 * batch // micro, most) * micro
            return max(grown, batch)
        if self.allow_shrink and high is not None and self.factor * high < (1 - self.dead_band) * batch:
            shrunk = max(target, math.ceil(batch / 2 / micro), least) * micro
            return min(shrunk, batch)
        return batch

    def _workers(self, signals: Signals, batch_size: int) -> int:
        micro_batches = math.ceil(batch_size / signals.micro_batch)
        wanted = math.ceil(micro_batches / self.micro_batches_per_worker)
        if not self.allow_shrink:
            wanted = max(wanted, signals.workers)
        return min(max(wanted, signals.bounds.workers_min), signals.bounds.workers_max)
