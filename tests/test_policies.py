"""Decisions stay within bounds, and policies are pure, limited in their rate of change, and do not oscillate."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from kfuse.policies import BasePolicy, GNSPolicy, NoPolicy, SchedulePolicy
from kfuse.policies.signals import Bounds, Decision, Signals

BOUNDS = Bounds(batch_min=8, batch_max=1024, workers_min=1, workers_max=8)


def signals(batch_size: int = 64, noise: tuple[float, float, float] | None = None, **changes: Any) -> Signals:
    """A step with micro-batches of 8; `noise` is (low, noise scale, high)."""
    low, middle, high = noise or (None, None, None)
    base = Signals(
        step=20,
        epoch=0,
        samples=1280,
        lr=0.1,
        lr_scale=1.0,
        batch_size=batch_size,
        micro_batch=8,
        micro_batches=math.ceil(batch_size / 8),
        workers=1,
        noise_scale=middle,
        noise_scale_low=low,
        noise_scale_high=high,
        bounds=BOUNDS,
    )
    return replace(base, **changes)


@st.composite
def any_signals(draw: st.DrawFn) -> Signals:
    """Signals as a run can produce them: the batch size is whole micro-batches within the bounds."""
    micro = draw(st.integers(1, 32))
    least = draw(st.integers(1, 8))
    most = draw(st.integers(least, 200))
    workers_min = draw(st.integers(1, 4))
    workers_max = draw(st.integers(workers_min, 16))
    micro_batches = draw(st.integers(least, most))
    low, noise, high = sorted(draw(st.tuples(*[st.floats(0, 1e5)] * 3)))
    return signals(
        micro_batches * micro,
        (low, noise, high),
        step=draw(st.integers(1, 100)),
        micro_batch=micro,
        micro_batches=micro_batches,
        workers=draw(st.integers(workers_min, workers_max)),
        bounds=Bounds(least * micro, most * micro, workers_min, workers_max),
    )


any_gns = st.builds(
    GNSPolicy,
    factor=st.floats(0.05, 20),
    every=st.integers(1, 5),
    micro_batches_per_worker=st.integers(1, 10),
    allow_shrink=st.booleans(),
)


# Decision and Bounds


def test_decision_clipped_says_so() -> None:
    decision, notes = Decision(batch_size=5000, workers=0, lr_scale=math.nan, sync=3).clipped(BOUNDS)
    assert decision == Decision(batch_size=1024, workers=1, sync=3)
    assert notes == [
        "batch_size 5000 clipped to 1024: must be 8 to 1024",
        "workers 0 clipped to 1: must be 1 to 8",
        "lr_scale nan dropped: it must be finite and positive",
    ]


@pytest.mark.parametrize(("asked", "given"), [(0, 1), (-3, 1), (2**30, 2**20)])
def test_decision_clips_sync(asked: int, given: int) -> None:
    decision, notes = Decision(sync=asked).clipped(BOUNDS)
    assert decision == Decision(sync=given)
    assert notes == [f"sync {asked} clipped to {given}: must be 1 to {2**20}"]


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_decision_drops_impossible_lr_scale(scale: float) -> None:
    decision, notes = Decision(lr_scale=scale).clipped(BOUNDS)
    assert decision.is_empty
    assert len(notes) == 1


def test_decision_in_bounds_is_unchanged() -> None:
    decision = Decision(batch_size=8, workers=8, lr_scale=0.5, topology="ring")
    assert decision.clipped(BOUNDS) == (decision, [])
    assert Decision().clipped(BOUNDS) == (Decision(), [])


def test_decision_merged() -> None:
    first, second = Decision(batch_size=8, workers=2), Decision(workers=3, sync=4)
    assert first.merged(second) == Decision(batch_size=8, workers=3, sync=4)
    assert first.merged(Decision()) == first
    assert Decision().is_empty
    assert not Decision(workers=1).is_empty


def test_decision_takes_whole_numbers_of_any_kind() -> None:
    decision = Decision(batch_size=np.int64(32), lr_scale=np.float32(0.5))  # type: ignore[arg-type]
    assert (type(decision.batch_size), type(decision.lr_scale)) == (int, float)
    with pytest.raises(TypeError, match=r"workers=1\.5: must be a whole number"):
        Decision(workers=1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("values", [(0, 8, 1, 1), (8, 4, 1, 1), (1, 8, 0, 1), (1, 8, 3, 2)])
def test_bounds_are_checked(values: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="must be 1 <= min <= max"):
        Bounds(*values)


# BasePolicy


def test_base_policy_does_nothing() -> None:
    for policy in (BasePolicy(), NoPolicy()):
        policy.before_train()
        policy.before_epoch()
        policy.before_step()
        policy.after_step()
        policy.after_epoch()
        policy.after_train()
        assert policy.decide(signals(noise=(900, 1000, 1100))) is None
        assert policy.state_dict() == {}


class Counting(BasePolicy):
    prev = math.inf

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {"losses": [1.0, None], "pair": (1, "a")}
        self.scratch = object()

    def after_step(self) -> None:
        self.prev = np.float64(2.5)


def test_policy_state_carries_over() -> None:
    policy, joiner = Counting(), Counting()
    policy.after_step()
    state = policy.state_dict()
    assert state == {"seen": {"losses": [1.0, None], "pair": (1, "a")}, "prev": 2.5}
    assert type(state["prev"]) is float
    joiner.load_state_dict(state)
    assert joiner.prev == 2.5
    policy.seen["losses"].append(3.0)
    assert state["seen"]["losses"] == joiner.seen["losses"] == [1.0, None]


# GNSPolicy


def test_gns_grows_when_the_whole_interval_is_above() -> None:
    assert GNSPolicy().decide(signals(64, (90, 100, 120))) == Decision(batch_size=96, workers=3)


def test_gns_at_most_doubles() -> None:
    assert GNSPolicy().decide(signals(64, (900, 1000, 1100))) == Decision(batch_size=128, workers=4)


def test_gns_factor_scales_the_target() -> None:
    assert GNSPolicy(factor=0.1).decide(signals(64, (900, 1000, 1100), workers=4)) == Decision(batch_size=96)


@pytest.mark.parametrize("allow_shrink", [False, True])
def test_gns_stays_inside_the_interval(allow_shrink: bool) -> None:
    policy = GNSPolicy(allow_shrink=allow_shrink)
    assert policy.decide(signals(64, (60, 100, 1000), workers=2)) is None
    assert policy.decide(signals(64, (10, 20, 70), workers=2)) is None


def test_gns_shrinks_only_when_allowed() -> None:
    quiet = signals(64, (10, 20, 30), workers=2)
    assert GNSPolicy().decide(quiet) is None
    assert GNSPolicy(allow_shrink=True).decide(quiet) == Decision(batch_size=32, workers=1)


def test_gns_never_moves_against_its_evidence() -> None:
    """Rounding to whole micro-batches must not turn growth into shrinking, or shrinking into growth."""
    growing = signals(60, (61, 62, 63), workers=2)
    assert GNSPolicy().decide(growing) is None
    tight = replace(BOUNDS, batch_min=58)
    assert GNSPolicy(allow_shrink=True).decide(signals(60, (1, 2, 3), workers=2, bounds=tight)) is None


@pytest.mark.parametrize("noise", [None, (math.nan, math.nan, math.nan), (900, 1000, math.inf)])
def test_gns_waits_for_a_known_interval(noise: tuple[float, float, float] | None) -> None:
    assert GNSPolicy(allow_shrink=True).decide(signals(64, noise)) is None


def test_gns_needs_both_ends() -> None:
    assert GNSPolicy().decide(signals(64, (900, 1000, 1100), noise_scale_high=None)) is None


def test_gns_grows_to_the_low_end_where_the_noise_scale_may_be_anything_above_it() -> None:
    unbounded = {"workers": 2, "noise_scale_low": 100.0}
    assert GNSPolicy().decide(signals(64, **unbounded)) == Decision(batch_size=96, workers=3)
    assert GNSPolicy(factor=8).decide(signals(64, **unbounded)) == Decision(batch_size=128, workers=4)
    for policy in (GNSPolicy(), GNSPolicy(factor=0.5, allow_shrink=True)):
        assert policy.decide(signals(104, workers=4, noise_scale_low=100.0)) is None


def test_gns_decides_every_so_often() -> None:
    policy = GNSPolicy(every=20)
    decided = [s for s in range(1, 101) if policy.decide(signals(64, (900, 1000, 1100), step=s))]
    assert decided == [20, 40, 60, 80, 100]


def test_gns_asks_again_for_workers_that_are_missing() -> None:
    assert GNSPolicy().decide(signals(64, (60, 64, 70), workers=1)) == Decision(workers=2)


@given(any_gns, any_signals())
def test_gns_decisions_are_pure_bounded_and_gradual(policy: GNSPolicy, seen: Signals) -> None:
    decision = policy.decide(seen)
    assert decision == policy.decide(seen)
    if decision is None:
        return
    assert seen.step % policy.every == 0
    assert decision.clipped(seen.bounds) == (decision, [])
    assert not decision.is_empty
    if decision.batch_size is not None:
        assert decision.batch_size % seen.micro_batch == 0
        assert seen.batch_size / 2 <= decision.batch_size <= 2 * seen.batch_size
        assert decision.batch_size != seen.batch_size
        if not policy.allow_shrink:
            assert decision.batch_size > seen.batch_size
    if decision.workers is not None and not policy.allow_shrink:
        assert decision.workers > seen.workers


@given(any_gns, any_signals())
def test_gns_settles(policy: GNSPolicy, seen: Signals) -> None:
    """With a steady noise scale the batch size moves one way, and then stays."""
    seen = replace(seen, step=policy.every)
    sizes = [seen.batch_size]
    for _ in range(12):  # enough doublings for any bounds drawn
        decision = policy.decide(seen) or Decision()
        seen = replace(
            seen,
            batch_size=decision.batch_size or seen.batch_size,
            workers=decision.workers or seen.workers,
        )
        sizes.append(seen.batch_size)
    assert policy.decide(seen) is None
    assert sizes in (sorted(sizes), sorted(sizes, reverse=True))


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("factor=0", {"factor": 0}),
        ("factor=nan", {"factor": math.nan}),
        ("factor='a'", {"factor": "a"}),
        ("every=0", {"every": 0}),
        ("every=2.5", {"every": 2.5}),
        ("micro_batches_per_worker=-1", {"micro_batches_per_worker": -1}),
        ("allow_shrink='yes'", {"allow_shrink": "yes"}),
    ],
)
def test_gns_options_are_checked(key: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^policy\.{key}: must be"):
        GNSPolicy(**options)


# SchedulePolicy


PHASES: list[dict[str, Any]] = [
    {"step": 10, "batch_size": 128, "lr_scale": 0.5},
    {"step": 20, "workers": 4},
    {"step": 30, "lr_scale": 0.3},
]


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (5, None),
        (6, Decision(batch_size=128, lr_scale=0.5)),  # so that it is in force at step 10
        (15, Decision(batch_size=128, lr_scale=0.5)),
        (16, Decision(batch_size=128, lr_scale=0.5, workers=4)),
        (500, Decision(batch_size=128, lr_scale=0.3, workers=4)),
    ],
)
def test_schedule_phases_in_force(step: int, expected: Decision | None) -> None:
    policy = SchedulePolicy(PHASES)
    assert policy.decide(signals(step=step)) == expected
    assert policy.decide(signals(step=step)) == expected


def test_schedule_asks_only_for_what_differs() -> None:
    policy = SchedulePolicy(PHASES)
    fp32_scale = float(np.float32(0.3))
    assert policy.decide(signals(128, step=30, workers=4, lr_scale=0.5)) == Decision(lr_scale=0.3)
    assert policy.decide(signals(128, step=30, workers=4, lr_scale=fp32_scale)) is None


def test_schedule_by_epoch() -> None:
    policy = SchedulePolicy([{"epoch": 0, "batch_size": 64}, {"epoch": 2, "batch_size": 256}])
    assert policy.decide(signals(epoch=1)) is None
    assert policy.decide(signals(epoch=2)) == Decision(batch_size=256)


def test_schedule_gives_up_on_what_is_out_of_reach() -> None:
    policy = SchedulePolicy([{"step": 0, "batch_size": 9999, "workers": 99}])
    asked = policy.decide(signals())
    assert asked == Decision(batch_size=9999, workers=99)  # unclipped, so that the clipping is reported
    reached, notes = asked.clipped(BOUNDS)
    assert len(notes) == 2
    assert policy.decide(signals(reached.batch_size or 0, workers=reached.workers)) is None


@pytest.mark.parametrize(("now", "goal"), [(64, 127), (65, 100), (127, 64), (96, 97)])
def test_schedule_changes_the_batch_by_less_than_a_micro_batch(now: int, goal: int) -> None:
    policy = SchedulePolicy([{"step": 0, "batch_size": goal}])
    assert policy.decide(signals(now, micro_batch=64)) == Decision(batch_size=goal)
    assert policy.decide(signals(goal, micro_batch=64)) is None


def test_schedule_takes_hydra_configs() -> None:
    policy = SchedulePolicy(OmegaConf.create([{"step": 5, "workers": 2}]))
    assert policy.decide(signals(step=5)) == Decision(workers=2)
    assert SchedulePolicy(OmegaConf.create([])).decide(signals()) is None


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ("step", r"phases='step': must be a list"),
        ([7], r"phases\[0\]=7: must have step or epoch"),
        ([{"batch_size": 8}], r"phases\[0\]=.*: must have step or epoch"),
        ([{"step": 8}], r"phases\[0\]=.*: must have step or epoch, and one of"),
        ([{"step": 1, "workers": 1, "momentum": 0.9}], r"phases\[0\]: unknown momentum; must have step or epoch"),
        ([{"step": 1, "workers": 1}, {"epoch": 2, "workers": 2}], r"phases: must have step or epoch in all phases"),
        ([{"step": 5, "workers": 1}, {"step": 5, "workers": 2}], r"phases: step=\[5, 5\]: must incr"),
        ([{"step": -1, "workers": 1}], r"phases\[0\]\.step=-1: must be a whole number, at least 0"),
        ([{"step": 1, "workers": 0}], r"phases\[0\]\.workers=0: must be a whole number, at least 1"),
        ([{"step": 1, "batch_size": 8.5}], r"phases\[0\]\.batch_size=8\.5: must be"),
        ([{"step": 1, "lr_scale": 0}], r"phases\[0\]\.lr_scale=0: must be a finite number above 0"),
        ([{"step": 1, "lr_scale": math.inf}], r"phases\[0\]\.lr_scale=inf: must be"),
    ],
)
def test_schedule_phases_are_checked(phases: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^policy\.{message}"):
        SchedulePolicy(phases)
