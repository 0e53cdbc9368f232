"""What every policy of kfuse.policies must keep, whatever it decides. A new one needs a recipe here, else a test fails.

Each policy runs in a `World` that answers its decisions: they apply DECISION_LAG steps later, clipped to the bounds.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import pkgutil
import random
from collections import deque
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from policy_signals import STEP

import kfuse.policies
from kfuse.policies.noise_interval import NoisePolicy
from kfuse.policies.signals import BasePolicy, Bounds, ConfiguredPolicy, Decision, Signals

Factory = Callable[[], BasePolicy]
EVERY = ("GNSPolicy", "CriticalBatchPolicy", "NormTestPolicy", "GoodputPolicy")
"""Policies that decide at steps divisible by their argument `every` only."""
OPTIONAL = [each.name for each in fields(Signals) if "None" in str(each.type)]


for module in pkgutil.iter_modules(kfuse.policies.__path__):
    importlib.import_module(f"kfuse.policies.{module.name}")
POLICIES: dict[str, type[BasePolicy]] = {
    each.__name__: each
    for each in [*BasePolicy.__subclasses__(), *ConfiguredPolicy.__subclasses__(), *NoisePolicy.__subclasses__()]
    if each.__module__.startswith("kfuse.policies.") and each not in (ConfiguredPolicy, NoisePolicy)
}


@dataclass(frozen=True)
class Recipe:
    """How to make a policy for these tests, and what its docstring promises."""

    arguments: Callable[[type[BasePolicy]], st.SearchStrategy[Factory]]
    """Of the class: factories. Each call of a factory makes another instance with the same arguments."""
    as_configured: bool = False
    """The user gives the values that it asks for: they may be out of bounds, or in parts of micro-batches."""
    turns: Mapping[str, int] | None = field(default_factory=dict)
    """By setting: how often it may change its direction while the signals stay; one that is not there never. None: any
    number, if it comes to rest."""


def made(**arguments: st.SearchStrategy[Any]) -> Callable[[type[BasePolicy]], st.SearchStrategy[Factory]]:
    """A recipe's arguments, one strategy each."""
    return lambda policy: st.fixed_dictionaries(arguments).map(lambda given: partial(policy, **deepcopy(given)))


_PHASES = st.lists(
    st.fixed_dictionaries(
        {"step": st.integers(0, 200)},
        optional={"batch_size": st.integers(1, 5000), "workers": st.integers(1, 20), "lr_scale": st.floats(0.01, 10)},
    ).filter(lambda phase: len(phase) > 1),
    max_size=5,
    unique_by=lambda phase: phase["step"],
).map(lambda phases: sorted(phases, key=lambda phase: phase["step"]))


def _composed(policy: type[BasePolicy]) -> st.SearchStrategy[Factory]:
    """Three policies as one, a schedule in any place."""
    rules = st.sampled_from(["NoPolicy", "GNSPolicy", "NormTestPolicy"])
    parts = st.tuples(*[rules.flatmap(factories)] * 2, factories("SchedulePolicy")).flatmap(st.permutations)
    return parts.map(lambda chosen: lambda: policy(*(part() for part in chosen)))  # type: ignore[call-arg]


_EVERY = st.integers(1, 20)
_NOISE = {"factor": st.floats(0.05, 20), "every": _EVERY}
# Patience is longer than a decision takes.
_STEPS = {"window": st.integers(1, 8), "settle": st.integers(0, 3), "patience_s": st.floats(10, 100)}
RECIPES: dict[str, Recipe] = {
    "NoPolicy": Recipe(made()),
    "GNSPolicy": Recipe(
        made(**_NOISE, micro_batches_per_worker=st.integers(1, 10), allow_shrink=st.booleans()),
        turns={"workers": 1},  # they follow the batch size: too many for it at first, they come again as it grows
    ),
    "CriticalBatchPolicy": Recipe(made(**_NOISE)),
    "NormTestPolicy": Recipe(made(theta=st.floats(0.05, 2), every=_EVERY)),
    "SeesawPolicy": Recipe(made(cut=st.floats(1.01, 4), curve=st.sampled_from(["cosine", "quarter_cosine"]))),
    "ComposePolicy": Recipe(_composed, as_configured=True, turns=None),
    "SchedulePolicy": Recipe(made(phases=_PHASES), as_configured=True, turns=None),
    "AutoscalePolicy": Recipe(made(**_STEPS, threshold=st.floats(0.01, 2)), turns={"workers": 2}),
    "GoodputPolicy": Recipe(
        made(every=st.integers(20, 60), margin=st.floats(0.01, 0.5), threshold=st.floats(0.01, 2)), turns=None
    ),
    "SyncSwitchPolicy": Recipe(made(step=st.integers(1, 200))),
}


def test_every_policy_has_a_recipe() -> None:
    assert POLICIES.keys() == RECIPES.keys(), "a new policy needs a recipe in tests/test_policy_properties.py"


# -- the world ----------------------------------------------------------------------------------------------------


@dataclass
class World:
    """A training whose gradients, apart from noise, stay as they are; a step's time depends on its settings."""

    bounds: Bounds
    micro: int
    batch_size: int
    workers: int
    noise_scale: float
    width: float
    """S is the mean, and then goes to this many times the noise scale and as far below the mean, by turns."""
    seconds: tuple[float, float, float]
    """A step's time: constant, of each micro-batch of the worker that has most, and of messages for each worker."""
    scatter: random.Random | None = None
    """Of the noise scale, from step to step; None: it stays."""
    unknown: frozenset[str] = frozenset()
    """Signals that are never known."""
    lr_scale: float = 1.0
    step: int = 0
    samples: int = 0

    def __post_init__(self) -> None:
        self._pending: deque[tuple[int, Decision | None]] = deque()
        self.base = self.batch_size

    def signals(self) -> Signals:
        """Makes a step."""
        while self._pending and self._pending[0][0] <= self.step:
            self.apply(self._pending.popleft()[1])
        micro_batches = -(-self.batch_size // self.micro)
        noise = self.noise_scale * (1.0 if self.scatter is None else self.scatter.uniform(0.5, 2))
        constant, micro_batch, message = self.seconds
        took = constant + micro_batch * -(-micro_batches // self.workers) + message * (self.workers - 1)
        self.samples += self.batch_size
        settings = {"batch_size": self.batch_size, "workers": self.workers, "lr_scale": self.lr_scale}
        now = {"step": self.step, "epoch": self.samples // 5000, "samples": self.samples, "lr": 0.1 * self.lr_scale}
        now |= {"previous_step_time_s": took, "micro_batch": self.micro, "micro_batches": micro_batches}
        swing = (self.width - 1) * (self.step % 2 * 2 - 1) * (self.step > 0)
        figures = {
            "grad_sq": 1.0,
            "grad_variance": noise * (1 + swing),
        }
        figures |= {"mean_grad_sq": 1.0, "mean_grad_variance": noise}
        self.step += 1
        given = {**settings, **now, **figures, "done": 0.25, "base_batch_size": self.base, "bounds": self.bounds}
        return replace(STEP, **(given | dict.fromkeys(self.unknown)))

    def answer(self, signals: Signals, decision: Decision | None) -> None:
        self._pending.append((signals.in_force_at, decision))

    def apply(self, decision: Decision | None) -> None:
        granted, _ = (decision or Decision()).clipped(self.bounds)
        self.batch_size = granted.batch_size or self.batch_size
        self.workers = granted.workers or self.workers
        self.lr_scale = granted.lr_scale or self.lr_scale


@st.composite
def worlds(draw: st.DrawFn, scatter: bool = False) -> World:
    micro = draw(st.sampled_from([1, 4, 8, 30]))
    least, workers_min = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    most, workers_max = draw(st.integers(least, 100)), draw(st.integers(workers_min, 8))
    # Bounds that are not whole micro-batches as well: a batch size must keep within them all the same.
    batch_min, batch_max = max(1, least * micro - draw(st.integers(0, micro - 1))), most * micro + micro // 3
    return World(
        Bounds(batch_min, batch_max, workers_min, workers_max),
        micro,
        draw(st.integers(least, most)) * micro,
        draw(st.integers(workers_min, workers_max)),
        draw(st.sampled_from([0.5, 20.0, 100.0, 700.0, 1e5])),
        draw(st.sampled_from([1.0, 1.3, 4.0])),
        draw(st.sampled_from([(0.01, 0.001, 0.0), (0.001, 0.01, 0.001), (0.001, 0.002, 0.05)])),
        random.Random(draw(st.integers(0, 99))) if scatter else None,
    )


def factories(name: str) -> st.SearchStrategy[Factory]:
    return RECIPES[name].arguments(POLICIES[name])


def each_policy(examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The test for each policy, with `data` and so many examples."""

    def of(test: Callable[..., None]) -> Callable[..., None]:
        limited = settings(suppress_health_check=list(HealthCheck), max_examples=examples)
        by_name = pytest.mark.parametrize("name", sorted(POLICIES.keys() & RECIPES.keys()))
        return by_name(limited(given(data=st.data())(test)))

    return of


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("GNSPolicy", {"factor": math.nan}, "factor=nan"),
    ("GNSPolicy", {"every": 2.5}, "every=2.5"),
    ("GNSPolicy", {"allow_shrink": "yes"}, "allow_shrink='yes'"),
    ("SeesawPolicy", {"cut": 1}, "cut=1"),
    ("SeesawPolicy", {"curve": "sine"}, "curve=sine"),
    ("AutoscalePolicy", {"settle": -1}, "settle=-1"),
]


def test_arguments_out_of_range_are_refused_by_name() -> None:
    for name, arguments, said in WRONG:
        with pytest.raises(ValueError, match=f"^policy.{said}: must be"):
            POLICIES[name](**arguments)


# -- what each policy keeps -----------------------------------------------------------------------------------------


@each_policy(30)
def test_decisions_follow_from_signals_and_state_within_bounds(name: str, data: st.DataObject) -> None:
    """Signals are unknown always or now and then, and come twice (after a lost worker a step is decided on again).

    In mid-run a joining worker takes over the state.
    """
    factory, world = data.draw(factories(name)), data.draw(worlds(scatter=True))
    unknown = data.draw(st.sampled_from([[], OPTIONAL, *([each] for each in OPTIONAL)]))
    chance, share = random.Random(data.draw(st.integers(0, 99))), data.draw(st.sampled_from([0.3, 1.0]))
    policy, twin, joins = factory(), factory(), data.draw(st.integers(0, 120))
    begin = policy.initial()
    assert begin == twin.initial()
    world.apply(begin)
    for step in range(150):
        if step == joins:
            state = json.loads(json.dumps(policy.state_dict()))
            if isinstance(policy, ConfiguredPolicy):  # a resumed run takes them from its configuration
                assert not state.keys() & inspect.signature(POLICIES[name]).parameters.keys()
            twin, kept = factory(), deepcopy(state)
            twin.load_state_dict(state)
        world.unknown = frozenset(each for each in unknown if chance.random() < share)
        seen = world.signals()
        decision = policy.decide(seen)
        assert decision == twin.decide(replace(seen)) == policy.decide(seen)
        if decision is not None:
            assert isinstance(decision, Decision) and not decision.is_empty
            assert name not in EVERY or seen.step % policy.every == 0  # type: ignore[attr-defined]
            if not RECIPES[name].as_configured:
                assert decision.clipped(world.bounds) == (decision, [])
                assert (decision.batch_size or 0) % world.micro == 0
        world.answer(seen, decision)
    assert state == kept, "the state is a copy"


@each_policy(20)
def test_with_constant_signals_it_comes_to_rest(name: str, data: st.DataObject) -> None:
    """No setting goes to and fro: each turns round as often as is declared at most, and then all stay."""
    policy, world = data.draw(factories(name))(), data.draw(worlds())
    world.apply(policy.initial())
    passed = []
    for _ in range(700):
        seen = world.signals()
        world.answer(seen, policy.decide(seen))
        passed.append((world.batch_size, world.workers, world.lr_scale))
    assert len(set(passed[-150:])) == 1, f"no rest: {sorted(set(passed[-150:]))}"
    turns = RECIPES[name].turns
    for setting, values in zip(("batch_size", "workers", "lr_scale"), zip(*passed, strict=True), strict=True):
        moves = [after > before for before, after in pairwise(values) if after != before]
        turned = sum(one != other for one, other in pairwise(moves))
        assert turns is None or turned <= turns.get(setting, 0), f"{setting} turns {turned} times"
