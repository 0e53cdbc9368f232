"""The rules of critical_batch, norm_test and sync_switch, by figures computed by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
from distributed import run_workers
from policy_signals import signals
from problems import network, problem

import kfuse as kf
from kfuse.policies import CriticalBatchPolicy, NormTestPolicy, SyncSwitchPolicy
from kfuse.policies.signals import Decision, Signals


def decided(policy: kf.BasePolicy, seen: Signals) -> int | None:
    """The batch size that it asks for, and nothing else."""
    decision = policy.decide(seen)
    assert decision is None or decision == Decision(batch_size=decision.batch_size)
    return None if decision is None else decision.batch_size


@pytest.mark.parametrize(
    ("factor", "batch_size", "low", "expected"),
    [
        # B* = 1 * low = 128 does not exceed 2 * 64; 129 does, and 300 doubles once at a time.
        (1.0, 64, 128.0, None),
        (1.0, 64, 129.0, 128),
        (1.0, 64, 300.0, 128),
        # Half of B* is the noise scale: 0.5 * 250 = 125 is not enough, 0.5 * 260 = 130 is.
        (0.5, 64, 250.0, None),
        (0.5, 64, 260.0, 128),
        # 512 doubles to batch.max = 1024; 520 would double beyond it, and stays. It never shrinks.
        (1.0, 512, 5000.0, 1024),
        (1.0, 520, 5000.0, None),
        (1.0, 512, 1.0, None),
        *((1.0, 64, unknown, None) for unknown in (None, math.nan, math.inf)),
    ],
)
def test_critical_batch(factor: float, batch_size: int, low: float | None, expected: int | None) -> None:
    assert decided(CriticalBatchPolicy(factor), signals(batch_size, noise_scale_low=low)) == expected


@pytest.mark.parametrize(
    ("theta", "batch_size", "variance", "grad_sq", "expected"),
    [
        # theta 0.5: S / (0.25 G2) = 100 / (0.25 * 4) = 100 samples, 12.5 micro-batches of 8, so 13.
        (0.5, 64, 100.0, 4.0, 104),
        (0.5, 100, 100.0, 4.0, None),  # it holds exactly
        # theta 1: 100 / 4 = 25 samples; theta 0.1: 100 / (0.01 * 4) = 2500, of which 64 may double only.
        (1.0, 16, 100.0, 4.0, 32),
        (0.1, 64, 100.0, 4.0, 128),
        (0.1, 1000, 1e6, 1.0, 1024),  # batch.max
        (0.5, 60, 15.5, 1.0, 64),  # 62 samples, in whole micro-batches
        (0.5, 64, 100.0, 0.0, None),  # a mean that is not above zero tells nothing
        (0.5, 64, 100.0, -3.0, None),
        # AdAdaGrad's norm_test (tests.py) is ceil(S / (eta^2 |gbar|^2)): 12 / (0.25 * 0.5) = 96, 12 / 0.5 = 24.
        (0.5, 64, 12.0, 0.5, 96),
        (1.0, 64, 12.0, 0.5, None),
    ],
)
def test_norm_test(theta: float, batch_size: int, variance: float, grad_sq: float, expected: int | None) -> None:
    seen = signals(batch_size, mean_grad_variance=variance, mean_grad_sq=grad_sq)
    assert decided(NormTestPolicy(theta), seen) == expected


def test_sync_switch_asks_once_so_that_the_step_is_the_first() -> None:
    """A decision on step s applies from step s + 4 on. The last: it was resumed with another policy before."""
    for step, first, asked_at in [(1, 0, 0), (4, 0, 0), (5, 0, 1), (20, 0, 16), (20, 100, 100)]:
        policy = SyncSwitchPolicy(step)
        assert policy.initial() == Decision(sync="sma")
        asked = []
        for now in range(first, first + 40):
            decision = policy.decide(signals(step=now))
            assert decision == policy.decide(signals(step=now))
            asked += [] if decision is None else [(now, decision)]
        assert asked == [(asked_at, Decision(sync="ssgd"))]


def switched(step: int) -> tuple[list[bool], bytes]:
    """In which steps the mean gradient's norm is known, which it is with ssgd; the model."""
    known: list[bool] = []

    class Kept(SyncSwitchPolicy):
        def decide(self, signals: Signals) -> Any:
            known.append(signals.grad_norm is not None)
            return super().decide(signals)

    kf.init()
    net = network()
    kf.fit(net, problem(), kf.FusedAdamW(net.parameters()), kf.Hook(Kept(step)), batch_size=16, train_steps=24)
    return known, b"".join(param.detach().numpy().tobytes() for param in net.parameters())


def test_workers_average_models_up_to_the_step_and_gradients_from_it_on() -> None:
    results = run_workers(2, switched, 14)
    assert results[0] == results[1]
    assert results[0][0] == [False] * 14 + [True] * 10
