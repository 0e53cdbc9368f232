"""Combinations of a policy, settings of the learning rate and modes: how they are refused, and training with them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import support
import torch
from distributed import run_workers
from support import Case, Refused

import kfuse as kf
from kfuse import policies
from kfuse.comm.group import Group
from kfuse.settings import rules
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
        "none",
        "gns",
        "norm_test",
        "critical_batch",
        "seesaw",
        "goodput",
        "autoscale",
        "curvature",
        "sync_switch",
        "schedule",
        "compose",
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
    """The same as arguments of kf.fit, with policy and scheduler."""
    given = _settings(choice)
    return {
        "hook": kf.Hook(policy(choice.policy)),
        "lr_scaling": given["lr.scaling"],
        "lr_decay": given["lr.decay"],
        "batch_micro_max": given["batch.micro_max"],
        "batch_max": given["batch.max"],
        "scheduler": torch.optim.lr_scheduler.StepLR(opt, 3, 0.5) if choice.scheduler == "torch's" else None,
    }


def facts(choice: Choice) -> dict[str, Any]:
    """Returns what the rules ask of a combination."""
    scheduler = None if choice.scheduler == "none" else "StepLR"
    of_policy = rules.policy_facts(policy(choice.policy))
    run = rules.run_facts(STEPS, choice.decay, 0.1)
    return (
        support.facts(choice.case)
        | _settings(choice)
        | of_policy
        | run
        | {"lr.warmup_steps": 0, "scheduler": scheduler}
    )


def outcomes(choices: list[Choice]) -> dict[Choice, str | Refused]:
    """For a worker of a group: of each combination the hash of the trained model, or how a script is refused it."""

    def trained(choice: Choice, group: Group) -> str:
        model = support.train(choice.case, group, STEPS, BATCH, partial(_arguments, choice))
        assert all(bool(p.isfinite().all()) for p in model.parameters()), choice
        return params_sha256(model)

    return support.asked_by_workers(choices, trained)


def ask_scripts(choices: list[Choice], workers: int = 2) -> dict[Choice, str | Refused]:
    """What becomes of each combination in a script on so many workers, on all of them alike."""
    results = run_workers(workers, outcomes, choices, timeout_s=500)
    found: dict[Choice, str | Refused] = {}
    for choice, outcome in itertools.chain.from_iterable(result.items() for result in results):
        assert found.setdefault(choice, outcome) == outcome, f"{choice}: the workers end with different models"
    return found


def ask_command_line(choice: Choice) -> str | None:
    """How `kfuse` refuses the combination; None: it does not."""
    words = f"policy={choice.policy}", *_OF_POLICY.get(choice.policy, ())
    return support.launched(choice.case, words, {"train.steps": STEPS, **_settings(choice)})


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
