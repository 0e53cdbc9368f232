"""Batch size and worker count that follow the gradient noise scale."""

from __future__ import annotations

import math
from typing import Any

from kfuse.policies.signals import BasePolicy, Decision, Signals, check_positive, check_whole


class GNSPolicy(BasePolicy):
    """Keeps the batch size at `factor` times the gradient noise scale, and the worker count in proportion to it.

    Batches larger than the noise scale B_simple save few steps (McCandlish et al. 2018). B_simple is an estimate. So
    the policy changes the batch size only when the whole confidence interval lies on one side of it, by at most a
    factor of two at a time, in whole micro-batches. After a change to `factor * noise_scale` the batch size lies inside
    the interval, so the policy does not oscillate. Where only the interval's low end is known, the noise scale may be
    any number above it: the policy grows to `factor` times the low end, and never shrinks.

    factor: the batch size to have, over the noise scale; finite, above 0.
    every: it decides at steps divisible by this number; at least 1.
    micro_batches_per_worker: micro-batches of a step that are the work of one worker; at least 1.
    allow_shrink: whether batch size and worker count may also fall; otherwise they only grow.

    Raises ValueError for an argument out of its range.
    """

    def __init__(
        self, factor: float = 1.0, every: int = 20, micro_batches_per_worker: int = 4, allow_shrink: bool = False
    ) -> None:
        check_positive("policy.factor", factor)
        check_whole("policy.every", every, 1)
        check_whole("policy.micro_batches_per_worker", micro_batches_per_worker, 1)
        if not isinstance(allow_shrink, bool):
            raise ValueError(f"policy.allow_shrink={allow_shrink!r}: must be true or false")
        self.factor, self.every = factor, every
        self.micro_batches_per_worker, self.allow_shrink = micro_batches_per_worker, allow_shrink

    def decide(self, signals: Signals) -> Decision | None:
        """Returns the batch size and worker count to move to; None at other steps, and where none is to change."""
        if signals.step % self.every:
            return None
        batch_size = self._batch_size(signals)
        if batch_size is None:
            return None
        workers = self._workers(signals, batch_size)
        decision = Decision(
            batch_size=batch_size if batch_size != signals.batch_size else None,
            workers=workers if workers != signals.workers else None,
        )
        return None if decision.is_empty else decision

    def _batch_size(self, signals: Signals) -> int | None:
        """The batch size to have, which may be the present one; None while the noise scale is unknown."""
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
        if self.allow_shrink and high is not None and self.factor * high < batch:
            shrunk = max(target, math.ceil(batch / 2 / micro), least) * micro
            return min(shrunk, batch)
        return batch

    def _workers(self, signals: Signals, batch_size: int) -> int:
        """The worker count for this batch size, within bounds."""
        micro_batches = math.ceil(batch_size / signals.micro_batch)
        wanted = math.ceil(micro_batches / self.micro_batches_per_worker)
        if not self.allow_shrink:
            wanted = max(wanted, signals.workers)
        return min(max(wanted, signals.bounds.workers_min), signals.bounds.workers_max)

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing: decisions depend on the signals alone, and the arguments come from the configuration."""
        return {}
