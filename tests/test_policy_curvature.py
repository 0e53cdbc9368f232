"""The diagonal Fisher information by AdamW's second moments, and the learning rate that falls where it rises."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed import run_workers
from policy_signals import signals
from problems import network, problem
from torch import nn

import kfuse as kf
from kfuse.optim.flat_updates import FlatUpdates
from kfuse.policies import CurvaturePolicy
from kfuse.policies.signals import Decision
from kfuse.session import reset

# -- the figures -----------------------------------------------------------------------------------------------------


def expected(opt: torch.optim.Optimizer) -> tuple[float, float]:
    """Trace and largest entry from torch's per-parameter state, in float64."""
    entries = []
    for group in opt.param_groups:
        for p in group["params"]:
            if "exp_avg_sq" in opt.state[p] and opt.state[p]["step"] > 0:
                v, updates = opt.state[p]["exp_avg_sq"].double(), float(opt.state[p]["step"])
                entries.append((v / (1 - group["betas"][1] ** updates)).flatten())
    diagonal = torch.cat(entries)
    return float(diagonal.sum()), float(diagonal.max())


def test_trace_and_largest_entry_are_those_of_torchs_state() -> None:
    """Two groups with their own beta2; a layer that has a gradient in each second step, and one that has none."""
    for optimizer in [kf.FusedAdamW, kf.FusedLAMB]:
        torch.manual_seed(0)
        layers = nn.ModuleList([nn.Linear(4, 3) for _ in range(4)])
        groups = [
            {"params": [*layers[0].parameters(), *layers[2].parameters()]},
            {"params": [*layers[1].parameters(), *layers[3].parameters()], "betas": (0.9, 0.95)},
        ]
        opt = optimizer(groups, lr=0.01)
        assert opt.updates.fisher() is None
        for step in range(6):
            x = torch.randn(8, 4)
            used = layers[:2] if step % 2 else layers[:3]
            F.mse_loss(sum(layer(x) for layer in used), torch.zeros(8, 3)).backward()
            opt.step()
            opt.zero_grad()
            fisher = opt.updates.fisher()
            assert fisher is not None and fisher.tolist() == pytest.approx(expected(opt), rel=1e-5)


class Seeing(kf.BasePolicy):
    fisher_every = 3

    def __init__(self) -> None:
        self.seen: list[tuple[float | None, float | None]] = []

    def decide(self, signals: kf.Signals) -> kf.Decision | None:
        self.seen.append((signals.fisher_trace, signals.fisher_max))
        return None


def trained(sync: str, reproducible: bool) -> tuple[list[tuple[float | None, float | None]], tuple[float, float]]:
    kf.init(comm_sync=sync, comm_reproducible=reproducible)
    net, policy = network(), Seeing()
    opt = kf.FusedAdamW(net.parameters(), betas=(0.9, 0.95))
    kf.fit(net, problem(), opt, kf.Hook(policy), batch_size=16, train_steps=10)
    return policy.seen, expected(opt)


def test_all_workers_see_the_leaders_figures_with_the_same_bits_for_any_number_of_them() -> None:
    """In each third step, as they were before it: after 9 updates in step 9. None before the first update."""
    two, again = run_workers(2, trained, "ssgd", True)
    try:
        assert two == again == trained("ssgd", True)  # one worker
    finally:
        reset()
    seen, after = two
    assert [step for step, (trace, _) in enumerate(seen) if trace is not None] == [3, 6, 9]
    assert all((trace is None) == (top is None) for trace, top in seen)
    assert seen[9] == pytest.approx(after, rel=0.2) and seen[9] != after  # one update later


@pytest.mark.full
def test_in_local_steps_they_are_unknown() -> None:
    for seen, _ in run_workers(2, trained, "local:4", False):
        assert seen == [(None, None)] * 10


def test_without_a_policy_that_needs_them_they_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object) -> None:
        raise AssertionError

    monkeypatch.setattr(FlatUpdates, "fisher", refuse)
    net = network()
    kf.fit(net, problem(), kf.FusedAdamW(net.parameters()), kf.Hook(kf.BasePolicy()), batch_size=16, train_steps=3)


# -- the rule --------------------------------------------------------------------------------------------------------


def scales(policy: CurvaturePolicy, pairs: list[tuple[float | None, float | None]], **changes: Any) -> list[float]:
    """What it asks for after each pair; what it asks for comes."""
    scale, out = policy.scale, []
    for number, (trace, top) in enumerate(pairs, policy.last_step // policy.every + 1):
        seen = signals(step=number * policy.every, lr_scale=scale, fisher_trace=trace, fisher_max=top, **changes)
        decision = policy.decide(seen)
        assert decision == policy.decide(seen)
        if decision is not None:
            assert decision == Decision(lr_scale=decision.lr_scale)
        scale = scale if decision is None or decision.lr_scale is None else decision.lr_scale
        out.append(scale)
    return out


def test_decisions_by_hand() -> None:
    for pairs, expected in [
        ([(1, 0.1), (1.9, 0.19), (2.1, 0.21), (4.1, 0.41), (4.3, 0.43)], [1, 1, 0.5, 0.5, 0.25]),  # 2.1, 1.95, 2.05
        ([(1, 0.1), (3, 0.1), (1, 0.3), (3, 0.3)], [1, 1, 1, 0.5]),  # both must rise
        ([(1, 0.1), (3, 0.3), (1.6, 0.16), (1.4, 0.16), (1.4, 0.14)], [1, 0.5, 0.5, 0.5, 1]),  # below half of 3
        ([(4, 0.4), (1, 0.1), (3, 0.3)], [1, 1, 0.5]),  # the reference follows downwards; never above 1
        ([(2.5**k, 2.5**k) for k in range(6)], [1, 0.5, 0.25, 0.125, 0.1, 0.1]),  # the least
        ([(1, 1), (2.5, 2.5), *[(1.3, 1.3), (4.9, 4.9)] * 9], [1] + [0.5] * 19),  # inside of the hysteresis
        ([(1, 0.1), (None, None), (3, None), (math.nan, 0.3), (math.inf, 0.3), (0, 0.3), (3, 0.3)], [1] * 6 + [0.5]),
    ]:
        assert scales(CurvaturePolicy(), pairs) == pytest.approx(expected)
    policy = CurvaturePolicy()
    assert scales(policy, [(1, 1)]) == [1]
    assert scales(policy, [(9, 9), (17, 17), (19, 19)], batch_size=8) == [1, 1, 0.5], "that is a new reference"


def test_it_decides_at_its_own_steps_only() -> None:
    """Beside a policy with every=30 the figures are there at steps divisible by 10, their greatest common divisor."""
    policy = CurvaturePolicy(every=20)
    seen = {step: 10.0**step for step in (0, 10, 20, 30, 40)}  # above twice the reference at each step
    decided = {step: policy.decide(signals(step=step, fisher_trace=f, fisher_max=f)) for step, f in seen.items()}
    half, quarter = Decision(lr_scale=0.5), Decision(lr_scale=0.25)
    assert decided == {0: None, 10: None, 20: half, 30: half, 40: quarter}  # at 30 it asks for the same again
