"""Policies and settings of the learning rate go with what docs/support.md says, and are refused with the rest."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
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
    """A combination: one value of each axis."""

    policy: str = "none"
    scaling: str = "sqrt"
    decay: str = "none"
    micro_batches: str = "as at first"
    scheduler: str = "none"
    optimizer: str = "adamw"
    sync: str = "ssgd"
    state: str = "replicated"
    schedule: str = "auto"
    workers: str = "fixed"
    reproducible: str = "no"
    precision: str = "fp32"
    clip: str = "none"

    @property
    def case(self) -> Case:
        """Its values of the axes of `support`."""
        return Case(**{name: getattr(self, name) for name in Case._fields})


AXES: dict[str, tuple[str, ...]] = {
    "policy": (
        *("none", "gns", "norm_test", "critical_batch", "seesaw", "goodput", "autoscale", "curvature"),
        *("sync_switch", "schedule", "compose"),
    ),
    "scaling": ("none", "linear", "sqrt", "adascale"),
    "decay": ("none", "constant", "cosine", "linear", "wsd"),
    "micro_batches": ("as at first", "grow"),
    "scheduler": ("none", "torch's"),
    **{name: support.AXES[name] for name in ("optimizer", "sync", "state", "schedule")},
    "workers": ("fixed", "elastic, mirror"),
    "reproducible": ("no", "yes"),
    "precision": support.AXES["precision"],
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
        "goodput": lambda: policies.GoodputPolicy(every=1),
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


def covering(is_refused: Callable[[Choice], bool]) -> list[Choice]:
    """Combinations that are not refused, in which each two values occur together that are ever allowed together."""
    chosen, seen, draw = list[Choice](), set[Any](), random.Random(0)
    for (first, one), (second, other) in itertools.combinations(_values(), 2):
        pair = (first, one), (second, other)
        if first == second or pair in seen or is_refused(Choice(**{first: one, second: other})):
            continue
        choice = next(each for each in _drawn(dict(pair), draw) if not is_refused(each))
        chosen.append(choice)
        seen |= set(itertools.combinations(zip(Choice._fields, choice, strict=True), 2))
    return chosen


def _values() -> list[tuple[str, str]]:
    return [(axis, value) for axis in Choice._fields for value in AXES[axis]]


def _drawn(given: dict[str, str], draw: random.Random) -> Iterable[Choice]:
    """Combinations with the given values and others drawn by lot."""
    for _ in range(10_000):
        yield Choice(**{axis: given.get(axis) or draw.choice(values) for axis, values in AXES.items()})


def is_refused(choice: Choice) -> bool:
    """Returns whether a rule refuses the combination, or a mode that its policy sets."""
    try:
        rules.check(facts(choice))
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
        broken = list(rules.broken(facts(choice)))
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
    decide = policy(name).decide
    return [decision for signals in seen if (decision := decide(signals)) is not None]


@pytest.mark.full
def test_rules_by_the_noise_scale_ask_for_nothing_where_there_is_none() -> None:
    for sync in ("local:2", "sma"):
        seen = run_workers(2, watched, sync)[0]
        assert len(seen) >= 78 and {signals.lr for signals in seen} == {0.01}, "AdaScale's gain is 1 all along"
        assert {signals.batch_size for signals in seen} == {16, 32}
        for name in ("gns", "norm_test", "critical_batch", "curvature"):
            assert not decisions(name, seen), f"{name} with {sync}"
        assert all(decision.batch_size is None for decision in decisions("goodput", seen))
    seen = run_workers(2, watched, "ssgd")[0]
    assert len({signals.lr for signals in seen}) > 1
    assert all(signals.fisher_trace is not None for signals in seen[2:])
    assert all(decisions(name, seen) for name in ("gns", "norm_test", "critical_batch"))


def test_autoscale_has_no_effect_on_a_fixed_number_of_workers() -> None:
    plain, scaled = ask_scripts([Choice(), Choice(policy="autoscale")]).values()
    assert plain == scaled


def test_a_policy_that_is_a_decay_is_refused_beside_a_scheduler_in_the_loops_body() -> None:
    net = network()
    opt = kf.FusedAdamW(net.parameters())
    torch.optim.lr_scheduler.StepLR(opt, 3)
    with pytest.raises(ValueError, match="must be None with policy=SeesawPolicy"):
        kf.DataLoader(problem(), net, opt, policy=policies.SeesawPolicy(), batch_size=16, train_steps=3)
