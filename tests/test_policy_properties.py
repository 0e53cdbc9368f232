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

import kfuse.policies
from kfuse.policies.signals import BasePolicy, Bounds, ConfiguredPolicy, Decision, Signals

Factory = Callable[[], BasePolicy]
EVERY = ("GNSPolicy", "CriticalBatchPolicy", "NormTestPolicy", "GoodputPolicy")
"""Policies that decide at steps divisible by their argument `every` only."""
OPTIONAL = [each.name for each in fields(Signals) if "None" in str(each.type)]


def _found() -> dict[str, type[BasePolicy]]:
    """All policies of the package, by name."""
    found = {}
    for module in pkgutil.iter_modules(kfuse.policies.__path__):
        contents = vars(importlib.import_module(f"kfuse.policies.{module.name}"))
        for name, each in contents.items():
            is_policy = inspect.isclass(each) and issubclass(each, BasePolicy)
            is_policy = is_policy and each not in (BasePolicy, ConfiguredPolicy)
            if is_policy and each.__module__ == f"kfuse.policies.{module.name}":
                found[name] = each
    return found


POLICIES = _found()


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


RECIPES: dict[str, Recipe] = {
    "NoPolicy": Recipe(made()),
    "GNSPolicy": Recipe(
        made(
            factor=st.floats(0.05, 20),
            every=st.integers(1, 20),
            micro_batches_per_worker=st.integers(1, 10),
            allow_shrink=st.booleans(),
            dead_band=st.floats(0, 0.5),
        ),
        turns={"workers": 1},  # they follow the batch size: too many for it at first, they come again as it grows
    ),
    "CriticalBatchPolicy": Recipe(made(factor=st.floats(0.05, 20), every=st.integers(1, 20))),
    "NormTestPolicy": Recipe(made(theta=st.floats(0.05, 2), every=st.integers(1, 20))),
    "SeesawPolicy": Recipe(made(cut=st.floats(1.01, 4), curve=st.sampled_from(["cosine", "quarter_cosine"]))),
    "ComposePolicy": Recipe(_composed, as_configured=True, turns=None),
    "SchedulePolicy": Recipe(made(phases=_PHASES), as_configured=True, turns=None),
    "AutoscalePolicy": Recipe(
        made(
            window=st.integers(1, 8),
            settle=st.integers(0, 3),
            threshold=st.floats(0.01, 2),
            patience_s=st.floats(10, 100),  # longer than a decision takes
        ),
        turns={"workers": 2},
    ),
    "CurvaturePolicy": Recipe(
        made(
            every=st.integers(1, 20),
            rise=st.floats(1.01, 4),
            factor=st.floats(0.1, 0.9),
            least=st.floats(0.01, 1),
        )
    ),
    "GoodputPolicy": Recipe(made(every=st.integers(20, 60), margin=st.floats(0.01, 0.5)), turns=None),
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
    """The interval's ends are the noise scale divided and multiplied by it."""
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
        self._pending: deque[tuple[int, Decision]] = deque()
        self.asked: list[Decision] = []
        self.base = self.batch_size

    def begin(self, decision: Decision | None) -> None:
        if decision is not None:
            self._apply(decision)

    def signals(self) -> Signals:
        """Makes a step."""
        while self._pending and self._pending[0][0] <= self.step:
            self._apply(self._pending.popleft()[1])
        micro_batches = -(-self.batch_size // self.micro)
        noise = self.noise_scale * (1.0 if self.scatter is None else self.scatter.uniform(0.5, 2))
        constant, micro_batch, message = self.seconds
        took = constant + micro_batch * -(-micro_batches // self.workers) + message * (self.workers - 1)
        self.samples += self.batch_size
        figures: dict[str, Any] = {
            "step": self.step,
            "epoch": self.samples // 5000,
            "samples": self.samples,
            "lr": 0.1 * self.lr_scale,
            "lr_scale": self.lr_scale,
            "batch_size": self.batch_size,
            "workers": self.workers,
            "micro_batch": self.micro,
            "micro_batches": micro_batches,
            "mean_grad_sq": 1.0,
            "mean_grad_variance": noise,
            "noise_scale": noise,
            "noise_scale_low": noise / self.width,
            "noise_scale_high": noise * self.width,
            "previous_step_time_s": took,
            "fisher_trace": noise,
            "fisher_max": noise / 10,
            "done": 0.25,
            "base_batch_size": self.base,
            "bounds": self.bounds,
        }
        figures |= dict.fromkeys(self.unknown)
        self.step += 1
        return Signals(**figures)

    def answer(self, signals: Signals, decision: Decision | None) -> None:
        """Takes a decision."""
        if decision is not None:
            self.asked.append(decision)
            self._pending.append((signals.in_force_at, decision))

    def _apply(self, decision: Decision) -> None:
        granted, _ = decision.clipped(self.bounds)
        self.batch_size = granted.batch_size or self.batch_size
        self.workers = granted.workers or self.workers
        self.lr_scale = granted.lr_scale or self.lr_scale

    @property
    def settings(self) -> tuple[int, int, float]:
        return self.batch_size, self.workers, self.lr_scale


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


def play(policy: BasePolicy, world: World, steps: int, begins: bool = True) -> list[Decision | None]:
    """What it decides on so many steps."""
    if begins:
        world.begin(policy.initial())
    decisions = []
    for _ in range(steps):
        seen = world.signals()
        decision = policy.decide(seen)
        world.answer(seen, decision)
        decisions.append(decision)
    return decisions


def each_policy(**arguments: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The test for each policy, with `data` and so many examples."""

    def of(test: Callable[..., None]) -> Callable[..., None]:
        limited = settings(deadline=None, suppress_health_check=list(HealthCheck), **arguments)
        by_name = pytest.mark.parametrize("name", sorted(POLICIES.keys() & RECIPES.keys()))
        return by_name(limited(given(data=st.data())(test)))

    return of


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("GNSPolicy", {"factor": math.nan}, "factor=nan"),
    ("GNSPolicy", {"every": 2.5}, "every=2.5"),
    ("GNSPolicy", {"allow_shrink": "yes"}, "allow_shrink='yes'"),
    ("GNSPolicy", {"dead_band": 1}, "dead_band=1"),
    ("CriticalBatchPolicy", {"factor": 0}, "factor=0"),
    ("NormTestPolicy", {"theta": 0}, "theta=0"),
    ("SeesawPolicy", {"cut": 1}, "cut=1"),
    ("SeesawPolicy", {"cut": math.inf}, "cut=inf"),
    ("SeesawPolicy", {"curve": "sine"}, "curve=sine"),
    ("AutoscalePolicy", {"window": 0}, "window=0"),
    ("AutoscalePolicy", {"settle": -1}, "settle=-1"),
    ("AutoscalePolicy", {"threshold": 0}, "threshold=0"),
    ("AutoscalePolicy", {"value_per_hour": -1, "price_per_worker_hour": 1}, "value_per_hour=-1"),
    ("AutoscalePolicy", {"value_per_hour": 1}, "price_per_worker_hour=None"),
    ("CurvaturePolicy", {"rise": 1}, "rise=1"),
    ("CurvaturePolicy", {"factor": 1}, "factor=1"),
    ("CurvaturePolicy", {"least": 2}, "least=2"),
    ("GoodputPolicy", {"margin": 0}, "margin=0"),
    ("SyncSwitchPolicy", {"step": 0}, "step=0"),
]


def test_arguments_out_of_range_are_refused_by_name() -> None:
    for name, arguments, said in WRONG:
        with pytest.raises(ValueError) as error:
            POLICIES[name](**arguments)
        assert str(error.value).startswith(f"policy.{said}: must be"), error.value


# -- what each policy keeps -----------------------------------------------------------------------------------------


@each_policy(max_examples=30)
def test_decisions_are_within_bounds_and_in_whole_micro_batches(name: str, data: st.DataObject) -> None:
    world = data.draw(worlds(scatter=True))
    play(data.draw(factories(name))(), world, 150)
    for decision in world.asked:
        assert isinstance(decision, Decision) and not decision.is_empty
        if RECIPES[name].as_configured:
            continue
        assert decision.clipped(world.bounds) == (decision, [])
        assert (decision.batch_size or 0) % world.micro == 0
    low, high = world.bounds.batch_min, world.bounds.batch_max
    assert low <= world.batch_size <= high and math.isfinite(world.lr_scale) and world.lr_scale > 0
    assert world.bounds.workers_min <= world.workers <= world.bounds.workers_max


@each_policy(max_examples=20)
def test_with_constant_signals_it_comes_to_rest(name: str, data: st.DataObject) -> None:
    """No setting goes to and fro: each turns round as often as is declared at most, and then all stay."""
    policy, world = data.draw(factories(name))(), data.draw(worlds())
    play(policy, world, 1)
    passed = [world.settings]
    for _ in range(700):
        play(policy, world, 1, begins=False)
        passed.append(world.settings)
    assert len(set(passed[-150:])) == 1, f"no rest: {sorted(set(passed[-150:]))}"
    turns = RECIPES[name].turns
    for setting, values in zip(("batch_size", "workers", "lr_scale"), zip(*passed, strict=True), strict=True):
        moves = [after > before for before, after in pairwise(values) if after != before]
        turned = sum(one != other for one, other in pairwise(moves))
        met = [now for before, now in pairwise([None, *values]) if now != before]
        assert turns is None or turned <= turns.get(setting, 0), f"{setting} turns {turned} times: {met}"


@each_policy(max_examples=20)
def test_the_same_signals_give_the_same_decisions(name: str, data: st.DataObject) -> None:
    """Also where they are given again: after a lost worker a step may be decided on twice."""
    factory, world = data.draw(factories(name)), data.draw(worlds(scatter=True))
    one, other = factory(), factory()
    begin = one.initial()
    assert begin == other.initial()
    world.begin(begin)
    for _ in range(150):
        seen = world.signals()
        decision = one.decide(seen)
        assert decision == other.decide(replace(seen)) == one.decide(seen)
        assert decision is None or name not in EVERY or seen.step % one.every == 0  # type: ignore[attr-defined]
        world.answer(seen, decision)


@each_policy(max_examples=40)
def test_it_survives_signals_that_are_unknown_always_or_now_and_then(name: str, data: st.DataObject) -> None:
    policy, world = data.draw(factories(name))(), data.draw(worlds(scatter=True))
    unknown = data.draw(st.sampled_from([OPTIONAL, *([each] for each in OPTIONAL)]))
    chance, share = random.Random(data.draw(st.integers(0, 99))), data.draw(st.sampled_from([0.3, 1.0]))
    for _ in range(100):
        world.unknown = frozenset(each for each in unknown if chance.random() < share)
        play(policy, world, 1, begins=False)


@each_policy(max_examples=20)
def test_its_state_carries_over_in_mid_run(name: str, data: st.DataObject) -> None:
    factory, world = data.draw(factories(name)), data.draw(worlds(scatter=True))
    policy = factory()
    play(policy, world, data.draw(st.integers(0, 120)))
    state = json.loads(json.dumps(policy.state_dict()))
    kept = deepcopy(state)
    successor = factory()
    if isinstance(policy, ConfiguredPolicy):  # a resumed run takes them from its configuration
        assert not state.keys() & {*inspect.signature(POLICIES[name]).parameters, "fisher_every"}
    successor.load_state_dict(state)
    twin = deepcopy(world)
    assert play(policy, world, 120, begins=False) == play(successor, twin, 120, begins=False)
    assert state == kept, "the state is a copy"
