"""Batch sizes that follow the noise in the gradient."""

from __future__ import annotations

import math

from kfuse.policies.noise_interval import LEAST_MICRO_BATCHES, NoisePolicy
from kfuse.policies.signals import ConfiguredPolicy, Decision, Signals, check_number, check_whole


class GNSPolicy(NoisePolicy):
    """Doubles the batch size where `factor` times the gradient noise scale is clearly above it.

        double the batch where factor * low > sqrt(2) * batch,    noise scale B_simple = S / G2, in samples

    Batches larger than B_simple save few steps (McCandlish et al. 2018). `factor` is the critical batch size over
    B_simple; `kfuse cbs` measures it. [low, high] is the interval of B_simple over the newest steps (`NoisePolicy`).
    sqrt(2) batch is the geometric mean of the batch and its double. If the limit were the batch itself, it would now
    and then double by chance. How often it still does: benchmarks/README.md, growth_evidence.

    With allow_shrink the batch is halved where factor * high < batch / sqrt(2), but not to one micro-batch: then the
    noise scale would be unknown from there on. Batch sizes are whole micro-batches. The worker count follows the batch
    size; the learning rate follows it as lr.scaling says.

    factor: the batch size to have, over the noise scale; finite, above 0. 1: the noise scale itself.
    every: it decides at steps divisible by this number; at least 1.
    micro_batches_per_worker: micro-batches of a step that are the work of one worker; at least 1.
    allow_shrink: whether batch size and worker count may also fall; otherwise they only grow.
    """

    owned_fields = ("batch_size", "workers")

    def __init__(
        self, factor: float = 1.0, every: int = 10, micro_batches_per_worker: int = 4, allow_shrink: bool = False
    ) -> None:
        super().__init__()
        check_number("policy.factor", factor)
        check_whole("policy.every", every, 1)
        check_whole("policy.micro_batches_per_worker", micro_batches_per_worker, 1)
        if not isinstance(allow_shrink, bool):
            raise ValueError(f"policy.allow_shrink={allow_shrink!r}: must be true or false")
        self.factor, self.every = factor, every
        self.micro_batches_per_worker, self.allow_shrink = micro_batches_per_worker, allow_shrink

    def decide(self, signals: Signals) -> Decision | None:
        self.observe(signals)
        if signals.step % self.every:
            return None
        low, high = self.noise_interval()
        if math.isnan(low):
            return None
        batch_size = self._batch_size(signals, self.factor * low, self.factor * high)
        return Decision(batch_size=batch_size, workers=self._workers(signals, batch_size)).changes(signals)

    def _batch_size(self, signals: Signals, low: float, high: float) -> int:
        """Returns the batch size to have. low, high: the ends of what it should be, NaN where unknown."""
        batch, micro, bounds = signals.batch_size, signals.micro_batch, signals.bounds
        if low > math.sqrt(2) * batch:
            return max(min(2 * batch, bounds.batch_max) // micro * micro, batch)
        if self.allow_shrink and high < batch / math.sqrt(2):
            return min(math.ceil(max(batch / 2, bounds.batch_min, LEAST_MICRO_BATCHES * micro) / micro) * micro, batch)
        return batch

    def _workers(self, signals: Signals, batch_size: int) -> int:
        micro_batches = math.ceil(batch_size / signals.micro_batch)
        wanted = math.ceil(micro_batches / self.micro_batches_per_worker)
        least = 0 if self.allow_shrink else signals.workers
        return min(max(wanted, least, signals.bounds.workers_min), signals.bounds.workers_max)


class CriticalBatchPolicy(NoisePolicy):
    """Doubles the batch size whenever the critical batch size exceeds twice of it (Merrill et al. 2025, section 4.1).

        B* > 2 B:    B <- 2 B,    learning rate <- sqrt(2) learning rate,    B* = factor * noise scale

    B* is the largest batch size with which the loss still falls as fast by samples. Merrill et al. measure it in
    branches of the run, at a few checkpoints; the noise scale is measured in each step, and `factor` is the ratio of
    both. So that noise does not double the batch size, the low end of the newest steps' noise scale must exceed
    2 B / factor (`NoisePolicy`). It never shrinks. A batch size whose double is above batch.max stays as it is.

    The learning rate is lr.scaling's: sqrt (the default), Merrill et al.'s choice, suits Adam, linear and adascale suit
    SGD. lr.scaling=none is refused: without it this is not their method.

    factor: critical batch size over noise scale; finite, above 0. 1 until it is measured.
    every: it decides at steps divisible by this number; at least 1.
    """

    owned_fields = ("batch_size",)

    def __init__(self, factor: float = 1.0, every: int = 10) -> None:
        super().__init__()
        check_number("policy.factor", factor)
        check_whole("policy.every", every, 1)
        self.factor, self.every = factor, every
        self.lr_settings = {"scaling": ("sqrt", "linear", "adascale")}

    def decide(self, signals: Signals) -> Decision | None:
        self.observe(signals)
        double = 2 * signals.batch_size
        if signals.step % self.every or double > signals.bounds.batch_max:
            return None
        return Decision(batch_size=double) if self.factor * self.noise_interval().low > double else None


class NormTestPolicy(ConfiguredPolicy):
    """Grows the batch size until the norm test holds (Byrd et al. 2012; AdAdaGrad: Lau et al. 2024).

        S / B <= theta^2 |G|^2,    so B = S / (theta^2 |G|^2) where it fails

    S / B is the variance of a gradient over B samples. The test says that its error is at most `theta` times its norm.

    1) |G|^2 is the running mean of G2, and S that of S, which are unbiased. Byrd et al. and AdAdaGrad take |gbar|^2 of
       one batch instead, whose mean is |G|^2 + S / B: their test passes too easily, for theta >= 1 always.
    2) A mean of G2 that is not above zero tells nothing of |G|^2: then nothing is decided.
    3) It never shrinks. It at most doubles at a time, because the means lag behind, in whole micro-batches.

    The target is that of policy=gns with factor = 1 / theta^2. This policy takes the running means, without an interval
    or a margin: it grows sooner, and by chance too. The learning rate follows the batch size as lr.scaling says.

    theta: the largest error, over the gradient's norm; finite, above 0. AdAdaGrad's experiments have 0.1 to 0.5.
    every: it decides at steps every, 2 every, ... (not at step 0); at least 1. 20: fewer steps are no mean.
    """

    owned_fields = ("batch_size",)

    def __init__(self, theta: float = 0.5, every: int = 20) -> None:
        check_number("policy.theta", theta)
        check_whole("policy.every", every, 1)
        self.theta, self.every = theta, every

    def decide(self, signals: Signals) -> Decision | None:
        variance, grad_sq = signals.mean_grad_variance, signals.mean_grad_sq
        if signals.step == 0 or signals.step % self.every or variance is None or grad_sq is None:
            return None
        least = self.theta**2 * grad_sq
        if not (least > 0 and math.isfinite(variance)):
            return None
        batch, micro = signals.batch_size, signals.micro_batch
        needed = min(variance / least, 2.0 * batch)
        grown = min(math.ceil(needed / micro), 2 * batch // micro, signals.bounds.batch_max // micro) * micro
        return Decision(batch_size=grown) if grown > batch and needed > batch else None
