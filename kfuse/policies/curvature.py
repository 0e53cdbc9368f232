"""A learning rate that falls where the curvature rises, by the diagonal Fisher information."""

from __future__ import annotations

import math

from kfuse.policies.signals import ConfiguredPolicy, Decision, Signals, check_positive, check_whole


class CurvaturePolicy(ConfiguredPolicy):
    """Lowers the learning rate where trace and largest entry of the diagonal Fisher information rise.

    The diagonal is v, the bias-corrected second moments of AdamW (Kingma & Ba 2015), which K-FAC (Martens & Grosse
    2015) has in blocks: an estimate of the curvature. The largest stable learning rate falls as the largest curvature
    rises. With the factor s = lr_scale, and a reference pair of trace and largest entry:

        both above rise x reference:    s = max(factor x s, least), and the reference is the present pair
        both below reference / rise:    s = min(s / factor, 1), and the reference is the present pair

    In between nothing changes: that is the hysteresis. The first pair seen, and the first one after the batch size
    changed, is a reference only: noise in v falls as 1 / batch size, which is no change of the curvature. v takes some
    1 / (1 - beta2) steps to follow the batch size, so this policy is for batch sizes that seldom change.

    It needs kf.FusedAdamW or kf.FusedLAMB with comm.state=replicated. In local steps (comm.sync) v is unknown, and
    nothing changes.

    every: it decides at steps divisible by this number; at least 1.
    rise: above 1. 2 is above the noise of v with beta2 = 0.999, a mean over some thousand steps.
    factor: above 0, below 1. 1 / rise would keep learning rate x curvature; the default is that for rise = 2.
    least: the least lr_scale that it asks for; above 0, at most 1.
    """

    owned_fields = ("lr_scale",)

    def __init__(self, every: int = 20, rise: float = 2.0, factor: float = 0.5, least: float = 0.1) -> None:
        check_whole("policy.every", every, 1)
        for name, value, right, allowed in (
            ("rise", rise, rise > 1, "above 1"),
            ("factor", factor, factor < 1, "below 1"),
            ("least", least, least <= 1, "at most 1"),
        ):
            check_positive(f"policy.{name}", value)
            if not right:
                raise ValueError(f"policy.{name}={value}: must be {allowed}")
        self.every = self.fisher_every = every
        self.rise, self.factor, self.least = rise, factor, least
        self.reference: list[float] | None = None
        """Trace and largest entry."""
        self.batch_size = 0
        """Batch size with which the reference was seen."""
        self.scale = 1.0
        self.last_step = -1

    def decide(self, signals: Signals) -> Decision | None:
        """Returns the factor on the learning rate to move to; None where that is the present one."""
        # In a ComposePolicy other steps have the figures too. A step before the last one is decided on again.
        if signals.step % self.every == 0 and signals.step > self.last_step:
            self.last_step = signals.step
            self._follow(signals)
        return Decision(lr_scale=self.scale).changes(signals)

    def _follow(self, signals: Signals) -> None:
        seen = [signals.fisher_trace, signals.fisher_max]
        now = [value for value in seen if value is not None and 0 < value < math.inf]
        if len(now) < 2:
            return
        if self.reference is None or signals.batch_size != self.batch_size:
            self.reference, self.batch_size = now, signals.batch_size
            return
        ratios = [value / before for value, before in zip(now, self.reference, strict=True)]
        if min(ratios) > self.rise:
            self.scale, self.reference = max(self.factor * self.scale, self.least), now
        elif max(ratios) < 1 / self.rise:
            self.scale, self.reference = min(self.scale / self.factor, 1.0), now
