"""Synchronous model averaging first, synchronous SGD from a given step on."""

from __future__ import annotations

from kfuse.policies.signals import ConfiguredPolicy, Decision, Signals, check_whole


class SyncSwitchPolicy(ConfiguredPolicy):
    """sma up to a step, ssgd from it on: KungFu's AdaptiveSGDOptimizer (Mai et al., OSDI 2020; lsds/KungFu,
    srcs/python/kungfu/tensorflow/optimizers/ada_sgd.py: its `change_step`).

    At the change all workers take the central model, and the mean of their optimizer states (docs/synchronisation.md),
    where KungFu's take rank 0's model. It asks once, so a mode that the script sets later stays.

    step: the first step with ssgd; at least 1. From 4 on it is that step, below it is step 4: a decision takes so long.
    """

    modes = ("sma", "ssgd")
    owned_fields = ("sync",)

    def __init__(self, step: int) -> None:
        check_whole("policy.step", step, 1)
        self.step = step
        self.asked_at: int | None = None
        """The step on whose signals it has asked for ssgd."""

    def initial(self) -> Decision:
        return Decision(sync="sma")

    def decide(self, signals: Signals) -> Decision | None:
        """Returns ssgd once, as soon as that applies to no step before the given one."""
        if self.asked_at is None and signals.in_force_at >= self.step:
            self.asked_at = signals.step
        return Decision(sync="ssgd") if self.asked_at == signals.step else None
