"""Synchronous model averaging first, synchronous SGD from a given step on."""

from __future__ import annotations

from distributed import run_workers
from policy_signals import signals
from problems import network, problem

import kfuse as kf
from kfuse.policies import SyncSwitchPolicy
from kfuse.policies.signals import Decision


def test_it_asks_once_so_that_the_step_is_the_first() -> None:
    """A decision on step s applies from step s + 4 on."""
    for step, asked_at in [(1, 0), (4, 0), (5, 1), (20, 16)]:
        policy = SyncSwitchPolicy(step)
        assert policy.initial() == Decision(sync="sma")
        asked = []
        for now in range(40):
            decision = policy.decide(signals(step=now))
            assert decision == policy.decide(signals(step=now))
            if decision is not None:
                asked.append((now, decision))
        assert asked == [(asked_at, Decision(sync="ssgd"))]


def test_it_asks_where_its_step_was_passed_in_another_mode() -> None:
    """As after a resumption with another policy."""
    assert SyncSwitchPolicy(20).decide(signals(step=100)) == Decision(sync="ssgd")


class Kept(SyncSwitchPolicy):
    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.known: list[bool] = []

    def decide(self, signals: kf.Signals) -> kf.Decision | None:
        self.known.append(signals.grad_norm is not None)
        return super().decide(signals)


def switched(step: int) -> tuple[list[bool], bytes]:
    """In which steps the mean gradient's norm is known, which it is with ssgd; the model."""
    kf.init()
    net, policy = network(), Kept(step)
    kf.fit(net, problem(), kf.FusedAdamW(net.parameters()), kf.Hook(policy), batch_size=16, train_steps=24)
    return policy.known, b"".join(param.detach().numpy().tobytes() for param in net.parameters())


def test_workers_average_models_up_to_the_step_and_gradients_from_it_on() -> None:
    results = run_workers(2, switched, 14)
    assert results[0] == results[1]
    assert results[0][0] == [False] * 14 + [True] * 10
