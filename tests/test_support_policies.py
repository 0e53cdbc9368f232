"""Policies and settings of the learning rate go with what docs/support.md says, and are refused with the rest."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import support_policies
import torch
from distributed import run_workers
from problems import network, problem
from support_policies import AXES, Choice, ask_command_line, ask_scripts, covering

import kfuse as kf
from kfuse.policies import SeesawPolicy
from kfuse.settings import rules
from kfuse.settings.tree import ConfigError


def is_refused(choice: Choice) -> bool:
    """Returns whether a rule refuses the combination, or a mode that its policy sets."""
    try:
        rules.check(support_policies.facts(choice))
    except ConfigError:
        return True
    return False


SUPPORTED = covering(is_refused)


def refused_by_one_rule() -> list[Choice]:
    """Returns, of each two values that exclude each other, a combination that nothing else refuses."""
    pairs = itertools.combinations([(axis, value) for axis in AXES for value in AXES[axis]], 2)
    choices = [Choice(**dict(pair)) for pair in pairs if pair[0][0] != pair[1][0]]
    found: dict[int, Choice] = {}
    for choice in choices:
        broken = list(rules.broken(support_policies.facts(choice)))
        if len(broken) == 1:
            found.setdefault(id(broken[0]), choice)
    return list(found.values())


def test_each_value_is_supported_somewhere() -> None:
    for axis, known in AXES.items():
        assert {getattr(choice, axis) for choice in SUPPORTED} == set(known), axis


def test_scripts_and_the_command_line_refuse_what_the_rules_do_and_nothing_else() -> None:
    refused = refused_by_one_rule()
    assert len(refused) >= 6
    assert all(not isinstance(outcome, str) for outcome in ask_scripts(refused).values())
    assert all(ask_command_line(choice) for choice in refused if choice.scheduler == "none")
    said = {choice: ask_command_line(choice) for choice in SUPPORTED}
    assert set(said.values()) == {None}, said


@pytest.mark.full
def test_each_two_values_train() -> None:
    """The workers end with one model: `ask_scripts` compares them."""
    found = ask_scripts(SUPPORTED)
    failed = {choice: str(outcome) for choice, outcome in found.items() if not isinstance(outcome, str)}
    assert not failed and found.keys() == set(SUPPORTED)
    same = [each for each in SUPPORTED if each.workers == "fixed" and each.reproducible == "yes"]
    same = [each for each in same if each.policy != "goodput"]
    assert ask_scripts(same, workers=1) == {choice: found[choice] for choice in same}


# -- what has no effect ------------------------------------------------------------------------------------------------


class Watching(kf.BasePolicy):
    """Keeps the signals, and changes the batch size."""

    fisher_every = 1

    def __init__(self) -> None:
        self.seen: list[kf.Signals] = []

    def decide(self, signals: kf.Signals) -> kf.Decision | None:
        self.seen.append(signals)
        return kf.Decision(batch_size=32) if signals.step == 60 else None


def watched(sync: str) -> list[kf.Signals]:
    kf.init(comm_sync=sync)
    net, policy = network(), Watching()
    opt = kf.FusedAdamW(net.parameters(), lr=0.01)
    options: dict[str, Any] = {"batch_size": 16, "batch_micro": 2, "lr_scaling": "adascale"}
    kf.fit(net, problem(), opt, kf.Hook(policy), train_steps=80, batch_max=64, **options)
    return policy.seen


def decisions(name: str, seen: list[kf.Signals]) -> list[kf.Decision]:
    policy = support_policies.policy(name)
    return [decision for signals in seen if (decision := policy.decide(signals)) is not None]


@pytest.mark.full
def test_rules_by_the_noise_scale_ask_for_nothing_where_there_is_none() -> None:
    for sync in ("local:2", "sma"):
        seen = run_workers(2, watched, sync)[0]
        assert len(seen) >= 78 and {signals.lr for signals in seen} == {0.01}, "AdaScale's gain is 1 all along"
        assert {signals.batch_size for signals in seen} == {16, 32}
        for name in ("gns", "norm_test", "critical_batch", "curvature"):
            assert not decisions(name, seen), f"{name} with {sync}"
        assert all(decision.batch_size is None for decision in decisions("goodput", seen))


def test_with_ssgd_they_do() -> None:
    seen = run_workers(2, watched, "ssgd")[0]
    assert len({signals.lr for signals in seen}) > 1
    assert all(signals.fisher_trace is not None for signals in seen[2:])
    for name in ("gns", "norm_test", "critical_batch"):
        assert decisions(name, seen), name


def test_autoscale_has_no_effect_on_a_fixed_number_of_workers() -> None:
    plain, scaled = ask_scripts([Choice(), Choice(policy="autoscale")]).values()
    assert plain == scaled


def test_a_policy_that_is_a_decay_is_refused_beside_a_scheduler_in_the_loops_body() -> None:
    net = network()
    opt = kf.FusedAdamW(net.parameters())
    torch.optim.lr_scheduler.StepLR(opt, 3)
    message = "must be None with policy=SeesawPolicy"
    with pytest.raises(ValueError, match=message):
        kf.DataLoader(problem(), net, opt, policy=SeesawPolicy(), batch_size=16, train_steps=3)
