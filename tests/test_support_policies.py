"""Policies and settings of the learning rate go with what docs/support.md says, and are refused with the rest."""

from __future__ import annotations

import itertools
import random
from collections import namedtuple
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import pytest
import support
import torch
from distributed import run_workers
from omegaconf import OmegaConf
from problems import network, problem
from support import Case, Refused

import kfuse as kf
from kfuse.cli.classes import make_policy
from kfuse.comm.group import Group
from kfuse.policies import SeesawPolicy
from kfuse.settings import rules
from kfuse.settings.tree import AT_SHELL, ConfigError
from kfuse.train.evaluation import params_sha256

AXES: dict[str, tuple[str, ...]] = {
    "policy": (
        *("none", "gns", "norm_test", "critical_batch", "seesaw", "goodput", "autoscale"),
        *("sync_switch", "schedule", "compose"),
    ),
    "scaling": ("sqrt", "none", "linear", "adascale"),
    "decay": ("none", "constant", "cosine", "linear", "wsd"),
    "micro_batches": ("as at first", "grow"),
    "scheduler": ("none", "torch's"),
    **support.AXES,
    "workers": ("fixed", "elastic, mirror"),
    "clip": ("none", "clip_norm"),
}
"""The values of each axis, the default first. `POLICIES`, `_settings` and `support.overrides` have what gives them."""


class Choice(namedtuple("Choice", AXES, defaults=[values[0] for values in AXES.values()])):  # type: ignore[misc]
    """A combination: one value of each axis."""

    @property
    def case(self) -> Case:
        return Case(**{axis: getattr(self, axis) for axis in Case._fields})


BATCH, STEPS = 8, 9
POLICIES = {
    "gns": ("policy.every=1",),
    "norm_test": ("policy.every=1",),
    "critical_batch": ("policy.every=1",),
    "goodput": ("policy.every=4",),
    "autoscale": ("policy.window=1", "policy.settle=0"),
    "sync_switch": ("policy.step=5",),
    "schedule": ("policy.phases=[{step: 0, batch_size: 16}, {step: 6, batch_size: 8, lr_scale: 0.5}]",),
    "compose": ("policy@policy.first=seesaw", "policy@policy.second=gns", "policy.second.every=1"),
}
"""How a policy is configured to decide as often as it can."""


def chosen_policy(name: str) -> tuple[str, ...]:
    """The overrides that choose it."""
    return f"policy={name}", *POLICIES.get(name, ())


def policy(name: str) -> kf.BasePolicy:
    return make_policy(OmegaConf.to_container(support.composed(*chosen_policy(name)).policy))


def _settings(choice: Choice) -> dict[str, Any]:
    """The combination's settings, by the command line's keys."""
    return {
        "lr.scaling": choice.scaling,
        "lr.decay": choice.decay,
        "batch.size": BATCH,
        "batch.micro": support.MICRO,
        "batch.min": support.MICRO,
        "batch.micro_max": 8 if choice.micro_batches == "grow" else None,
        "batch.max": 8 * BATCH,
    }


def _arguments(choice: Choice, opt: Any) -> dict[str, Any]:
    """The same as arguments of kf.fit, with policy and scheduler; `support.train` gives the batch."""
    given = {AT_SHELL[key].name: value for key, value in _settings(choice).items() if key != "batch.size"}
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 3, 0.5) if choice.scheduler == "torch's" else None
    return given | {"policy": policy(choice.policy), "scheduler": scheduler}


@cache
def _policy_facts(name: str) -> dict[str, Any]:
    return rules.policy_facts(policy(name))


def facts(choice: Choice) -> dict[str, Any]:
    """Returns what the rules ask of a combination."""
    scheduler = {"lr.warmup_steps": 0, "scheduler": None if choice.scheduler == "none" else "StepLR"}
    asked = _policy_facts(choice.policy) | rules.run_facts(STEPS, choice.decay, 0.1)
    return support.facts(choice.case) | _settings(choice) | asked | scheduler


def outcomes(values: list[tuple[str, ...]]) -> dict[tuple[str, ...], str | Refused]:
    """For a worker of a group: of each combination the hash of the trained model, or how a script is refused it.

    values: the combinations' values, as plain tuples: a worker cannot import this file by its module's name.
    """

    def trained(choice: Choice, group: Group) -> str:
        model = support.train(choice.case, group, STEPS, BATCH, partial(_arguments, choice))
        assert all(bool(p.isfinite().all()) for p in model.parameters()), choice
        return params_sha256(model)

    asked = support.asked_by_workers([Choice(*each) for each in values], trained)
    return {tuple(choice): outcome for choice, outcome in asked.items()}


def ask_scripts(choices: list[Choice], workers: int = 2) -> dict[Choice, str | Refused]:
    """What becomes of each combination in a script on so many workers, on all of them alike."""
    results = run_workers(workers, outcomes, [tuple(choice) for choice in choices], timeout_s=500)
    found: dict[Choice, str | Refused] = {}
    for values, outcome in itertools.chain.from_iterable(result.items() for result in results):
        choice = Choice(*values)
        assert found.setdefault(choice, outcome) == outcome, f"{choice}: the workers end with different models"
    return found


def ask_command_line(choice: Choice) -> str | None:
    """How `kfuse` refuses the combination; None: it does not."""
    more = {"train.steps": STEPS, **_settings(choice)}
    return support.ask_command_line(choice.case, chosen_policy(choice.policy), more)


def pairs() -> Iterator[dict[str, str]]:
    """Each two values of different axes."""
    for axes in itertools.combinations(AXES, 2):
        yield from (dict(zip(axes, pair, strict=True)) for pair in itertools.product(*(AXES[axis] for axis in axes)))


def covering() -> list[Choice]:
    """Combinations that are not refused, in which each two values occur together that are ever allowed together."""
    chosen, seen, draw = list[Choice](), set[Any](), random.Random(0)
    for pair in pairs():
        if tuple(pair.items()) in seen or is_refused(Choice(**pair)):
            continue
        drawn = ({axis: draw.choice(values) for axis, values in AXES.items()} | pair for _ in range(10_000))
        choice = next(each for each in (Choice(**values) for values in drawn) if not is_refused(each))
        chosen.append(choice)
        seen |= set(itertools.combinations(choice._asdict().items(), 2))
    return chosen


def is_refused(choice: Choice) -> bool:
    """Returns whether a rule refuses the combination, or a mode that its policy sets."""
    try:
        rules.check(facts(choice))
    except ConfigError:
        return True
    return False


SUPPORTED = covering()


def refused_by_one_rule() -> list[Choice]:
    """Returns, of each two values that exclude each other, a combination that nothing else refuses."""
    found: dict[int, Choice] = {}
    for choice in (Choice(**pair) for pair in pairs()):
        if len(broken := list(rules.broken(facts(choice)))) == 1:
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
    same = [each for each in SUPPORTED if (each.workers, each.reproducible) == ("fixed", "yes")]
    same = [each for each in same if each.policy != "goodput"]
    assert ask_scripts(same, workers=1) == {choice: found[choice] for choice in same}


# -- what has no effect ------------------------------------------------------------------------------------------------


def test_autoscale_has_no_effect_on_a_fixed_number_of_workers() -> None:
    plain, scaled = ask_scripts([Choice(), Choice(policy="autoscale")]).values()
    assert plain == scaled


def test_a_policy_that_is_a_decay_is_refused_beside_a_scheduler_in_the_loops_body() -> None:
    net = network()
    opt = kf.FusedAdamW(net.parameters())
    torch.optim.lr_scheduler.StepLR(opt, 3)
    with pytest.raises(ValueError, match="must be None with policy=SeesawPolicy"):
        kf.DataLoader(net, problem(), opt, policy=SeesawPolicy(), batch_size=16, steps=3)
