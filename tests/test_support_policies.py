"""Policies and settings of the learning rate go with what docs/support.md says, and are refused with the rest."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import support
import torch
from distributed import run_workers
from problems import network, problem
from support import Case, Refused

import kfuse as kf
from kfuse import policies
from kfuse.comm.group import Group
from kfuse.settings import rules
from kfuse.settings.tree import ConfigError
from kfuse.train.evaluation import params_sha256


class Choice(NamedTuple):
    """A combination: one value of each axis, those of `support` in `case`."""

    policy: str = "none"
    scaling: str = "sqrt"
    decay: str = "none"
    micro_batches: str = "as at first"
    scheduler: str = "none"
    case: Case = Case()

    @classmethod
    def of(cls, values: dict[str, str]) -> Choice:
        """values: by axis; the others have their defaults."""
        own = {name: value for name, value in values.items() if name in cls._fields}
        return cls(**own, case=Case(**{name: value for name, value in values.items() if name not in own}))

    def values(self) -> dict[str, str]:
        """By axis."""
        own = self._asdict()
        return own | own.pop("case")._asdict()

    @property
    def workers(self) -> str:
        return self.case.workers


AXES: dict[str, tuple[str, ...]] = {
    "policy": (
        *("none", "gns", "norm_test", "critical_batch", "seesaw", "goodput", "autoscale", "curvature"),
        *("sync_switch", "schedule", "compose"),
    ),
    "scaling": ("none", "linear", "sqrt", "adascale"),
    "decay": ("none", "constant", "cosine", "linear", "wsd"),
    "micro_batches": ("as at first", "grow"),
    "scheduler": ("none", "torch's"),
    **support.AXES,
    "workers": ("fixed", "elastic, mirror"),
    "clip": ("none", "clip_norm"),
}
"""The values of each axis. `policy`, `_settings` and `support.overrides` have what gives them."""

BATCH, STEPS = 8, 9
_PHASES = [{"step": 0, "batch_size": 16}, {"step": 6, "batch_size": 8, "lr_scale": 0.5}]
_OF_POLICY = {
    "sync_switch": ("policy.step=5",),
    "schedule": ("policy.phases=[{step: 0, batch_size: 16}, {step: 6, batch_size: 8, lr_scale: 0.5}]",),
    "compose": ("policy@policy.first=seesaw", "policy@policy.second=gns"),
}


def policy(name: str) -> kf.BasePolicy:
    """The policy of that name, which decides as often as it can."""
    made: dict[str, Callable[[], kf.BasePolicy]] = {
        "none": policies.NoPolicy,
        "gns": lambda: policies.GNSPolicy(every=1),
        "norm_test": lambda: policies.NormTestPolicy(every=1),
        "critical_batch": lambda: policies.CriticalBatchPolicy(every=1),
        "seesaw": policies.SeesawPolicy,
        "goodput": lambda: policies.GoodputPolicy(every=4),
        "autoscale": lambda: policies.AutoscalePolicy(window=1, settle=0),
        "curvature": lambda: policies.CurvaturePolicy(every=1),
        "sync_switch": lambda: policies.SyncSwitchPolicy(5),
        "schedule": lambda: policies.SchedulePolicy(_PHASES),
        "compose": lambda: policies.ComposePolicy(policies.SeesawPolicy(), policies.GNSPolicy(every=1)),
    }
    return made[name]()


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
    given = {key.replace(".", "_"): value for key, value in _settings(choice).items() if key != "batch.size"}
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 3, 0.5) if choice.scheduler == "torch's" else None
    return given | {"hook": kf.Hook(policy(choice.policy)), "scheduler": scheduler}


def facts(choice: Choice) -> dict[str, Any]:
    """Returns what the rules ask of a combination."""
    scheduler = {"lr.warmup_steps": 0, "scheduler": None if choice.scheduler == "none" else "StepLR"}
    asked = rules.policy_facts(policy(choice.policy)) | rules.run_facts(STEPS, choice.decay, 0.1)
    return support.facts(choice.case) | _settings(choice) | asked | scheduler


def outcomes(values: list[tuple[str, ...]]) -> dict[tuple[str, ...], str | Refused]:
    """For a worker of a group: of each combination the hash of the trained model, or how a script is refused it.

    values: the combinations' values, as plain tuples: a worker cannot import this file by its module's name.
    """
    choices = [Choice(*each) for each in values]

    def trained(choice: Choice, group: Group) -> str:
        model = support.train(choice.case, group, STEPS, BATCH, partial(_arguments, choice))
        assert all(bool(p.isfinite().all()) for p in model.parameters()), choice
        return params_sha256(model)

    return {tuple(choice): outcome for choice, outcome in support.asked_by_workers(choices, trained).items()}


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
    words = f"policy={choice.policy}", *_OF_POLICY.get(choice.policy, ())
    return support.ask_command_line(choice.case, words, {"train.steps": STEPS, **_settings(choice)})


Value = tuple[str, str]
"""An axis, and a value of it."""


def pairs() -> Iterator[tuple[Value, Value]]:
    """Each two values of different axes."""
    values = [(axis, value) for axis in AXES for value in AXES[axis]]
    return ((one, other) for one, other in itertools.combinations(values, 2) if one[0] != other[0])


def covering() -> list[Choice]:
    """Combinations that are not refused, in which each two values occur together that are ever allowed together."""
    chosen, seen, draw = list[Choice](), set[Any](), random.Random(0)
    for pair in pairs():
        if pair in seen or is_refused(Choice.of(dict(pair))):
            continue
        drawn = ({axis: draw.choice(values) for axis, values in AXES.items()} | dict(pair) for _ in range(10_000))
        choice = next(each for each in map(Choice.of, drawn) if not is_refused(each))
        chosen.append(choice)
        seen |= set(itertools.combinations(choice.values().items(), 2))
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
    for choice in (Choice.of(dict(pair)) for pair in pairs()):
        broken = list(rules.broken(facts(choice)))
        if len(broken) == 1:
            found.setdefault(id(broken[0]), choice)
    return list(found.values())


def test_each_value_is_supported_somewhere() -> None:
    for axis, known in AXES.items():
        assert {choice.values()[axis] for choice in SUPPORTED} == set(known), axis


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
    same = [each for each in SUPPORTED if each.workers == "fixed" and each.case.reproducible == "yes"]
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
        kf.DataLoader(problem(), net, opt, policy=policies.SeesawPolicy(), batch_size=16, train_steps=3)
