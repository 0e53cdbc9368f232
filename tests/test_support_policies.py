"""Policies and settings of the learning rate go with what docs/support.md says, and are refused with the rest."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import support_policies
import torch
from distributed import run_workers
from problems import network, problem
from support_page import POLICY_RULES, is_said_by, refusing_choice
from support_policies import AXES, Choice, ask_command_line, ask_scripts, covering

import kfuse as kf
from kfuse.policies import SeesawPolicy

REFUSED = [
    (rule, Choice(**dict(zip(rule.together, values, strict=True))))
    for rule in POLICY_RULES
    for values in itertools.product(*rule.together.values())
]
"""Of each two values that exclude each other a combination that nothing else refuses."""
SUPPORTED = covering(lambda choice: bool(refusing_choice(choice)))


def test_no_rule_is_there_for_nothing() -> None:
    assert all(refusing_choice(choice) == [rule] for rule, choice in REFUSED)


def test_each_value_is_supported_somewhere() -> None:
    for axis, known in AXES.items():
        assert {getattr(choice, axis) for choice in SUPPORTED} == set(known), axis


def test_scripts_are_refused_what_the_page_says() -> None:
    found = ask_scripts([choice for _, choice in REFUSED])
    for rule, choice in REFUSED:
        refused = found[choice]
        assert not isinstance(refused, str), f"{choice} trains"
        assert refused.when == rule.when and is_said_by(rule.message, refused.message), f"{choice}: {refused}"


def test_the_command_line_refuses_what_the_page_says() -> None:
    for rule, choice in REFUSED:
        if choice.scheduler == "none":
            said = ask_command_line(choice)
            assert said is not None and is_said_by(rule.command_line or rule.message, said), f"{choice}: {said}"


def test_the_command_line_takes_all_else() -> None:
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
    kf.init(kf.CommOptions(sync=sync))
    net, policy = network(), Watching()
    opt = kf.FusedAdamW(net.parameters(), lr=0.01)
    options: dict[str, Any] = {"batch_size": 16, "micro_batch": 2, "lr_scaling": "adascale"}
    kf.fit(net, problem(), opt, kf.Hook(policy), steps=80, max_batch_size=64, **options)
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


def test_a_warm_up_after_a_change_has_no_effect_on_a_rate_that_does_not_follow_the_batch() -> None:
    still, follows = (Choice(policy="schedule", scaling=scaling) for scaling in ("none", "sqrt"))
    choices = [still, still._replace(change="warm-up"), follows, follows._replace(change="warm-up")]
    plain, warm, followed, followed_warm = ask_scripts(choices).values()
    assert plain == warm and followed != followed_warm


def test_autoscale_has_no_effect_on_a_fixed_number_of_workers() -> None:
    plain, scaled = ask_scripts([Choice(), Choice(policy="autoscale")]).values()
    assert plain == scaled


def test_a_policy_that_is_a_decay_is_refused_beside_a_scheduler_in_the_loops_body() -> None:
    net = network()
    opt = kf.FusedAdamW(net.parameters())
    torch.optim.lr_scheduler.StepLR(opt, 3)
    message = "^a torch scheduler that was made for this optimizer: must be None with SeesawPolicy, a decay of its own$"
    with pytest.raises(ValueError, match=message):
        kf.DataLoader(problem(), net, opt, policy=SeesawPolicy(), batch_size=16, steps=3)
