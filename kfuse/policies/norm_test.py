"""A batch size that keeps the gradient's error below a part of the gradient."""

from __future__ import annotations

import math

from kfuse.policies.signals import ConfiguredPolicy, Decision, Signals, check_positive, check_whole


class NormTestPolicy(ConfiguredPolicy):
    """Grows the batch size until the norm test holds (Byrd et al. 2012; AdAdaGrad: Lau et al. 2024).

        S / B <= theta^2 |G|^2,    so B = S / (theta^2 |G|^2) where it fails

    S / B is the variance of a gradient over B samples. The test says that its error is at most `theta` times its norm.

    1) |G|^2 is the running mean of G2, and S that of S, which are unbiased. Byrd et al. and AdAdaGrad take |gbar|^2 of
       one batch instead, whose mean is |G|^2 + S / B: their test passes too easily, for theta >= 1 always.
    2) A mean of G2 that is not above zero tells nothing of |G|^2: then nothing is decided.
    3) It never shrinks. It at most doubles at a time, because the means lag behind, in whole micro-batches.

    The test is that of policy=gns with factor = 1 / theta^2, on the estimate itself, without its interval: it grows
    sooner, and by chance too. The learning rate follows the batch size as lr.scaling says.

    theta: the largest error, over the gradient's norm; finite, above 0. AdAdaGrad's experiments have 0.1 to 0.5.
    every: it decides at steps every, 2 every, ... (not at step 0); at least 1. 20: fewer steps are no mean.
    """

    owned_fields = ("batch_size",)

    def __init__(self, theta: float = 0.5, every: int = 20) -> None:
        check_positive("policy.theta", theta)
        check_whole("policy.every", every, 1)
        self.theta, self.every = theta, every

    def decide(self, signals: Signals) -> Decision | None:
        """Returns the batch size to grow to; None at other steps, where the test holds, and while it is unknown."""
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
