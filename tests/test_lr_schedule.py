"""The learning rate is scaled, warmed up and decayed as configured."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfuse.settings import rules
from kfuse.settings.tree import AT_SHELL
from kfuse.train.lr_schedule import LRSchedule, gain

batch = st.integers(1, 1 << 20)
moment = st.one_of(st.none(), st.floats(-1e12, 1e12))


def factor(schedule: LRSchedule, step: float) -> float:
    """The factor at this step of the base batch size, if the batch size never changes."""
    return schedule.factor(step, schedule.done(step, step * schedule.base_batch_size), schedule.base_batch_size)


def test_gain_by_rule() -> None:
    assert gain("none", 512, 128) == 1.0
    assert gain("linear", 512, 128) == 4.0
    assert gain("sqrt", 512, 128) == 2.0


def test_adascale_known_answer() -> None:
    # sigma2 = 256 / 128 = 2, mu2 = 1, s = 4: (2 + 1) / (2 / 4 + 1)
    assert gain("adascale", 512, 128, mean_grad_sq=1.0, mean_grad_variance=256.0) == pytest.approx(2.0)


@given(batch, batch, moment, moment)
def test_adascale_lies_between_one_and_the_ratio(
    batch_size: int, base: int, grad_sq: float | None, variance: float | None
) -> None:
    ratio = batch_size / base
    r = gain("adascale", batch_size, base, grad_sq, variance)
    assert min(1.0, ratio) <= r <= max(1.0, ratio)


@given(batch, st.integers(1, 64), st.floats(1e-6, 1e6), st.floats(1e-6, 1e6))
def test_adascale_grows_with_batch_and_noise(base: int, s: int, grad_sq: float, variance: float) -> None:
    r = gain("adascale", base * s, base, grad_sq, variance)
    assert gain("adascale", base * s * 2, base, grad_sq, variance) >= r
    assert gain("adascale", base * s, base, grad_sq, variance * 2) >= r * (1 - 1e-12)


def test_adascale_limits() -> None:
    assert gain("adascale", 512, 128, mean_grad_sq=1.0, mean_grad_variance=0.0) == 1.0
    assert gain("adascale", 512, 128, mean_grad_sq=1.0, mean_grad_variance=-5.0) == 1.0
    assert gain("adascale", 512, 128, mean_grad_sq=-0.5, mean_grad_variance=3.0) == 4.0
    assert gain("adascale", 128, 128, mean_grad_sq=1.0, mean_grad_variance=3.0) == 1.0


@pytest.mark.parametrize(("batch_size", "expected"), [(512, 1.0), (128, 1.0), (32, 0.25)])
def test_adascale_without_statistics_is_cautious(batch_size: int, expected: float) -> None:
    assert gain("adascale", batch_size, 128) == expected
    assert gain("adascale", batch_size, 128, mean_grad_sq=1.0) == expected
    assert gain("adascale", batch_size, 128, mean_grad_sq=-1.0, mean_grad_variance=0.0) == expected


def test_warmup_then_constant() -> None:
    schedule = LRSchedule(warmup_steps=4)
    rates = [schedule.factor(progress, 0.0, 1) for progress in range(6)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


def test_cosine_from_the_end_of_warmup_to_zero() -> None:
    schedule = LRSchedule(warmup_steps=10, decay="cosine", steps=110)
    assert factor(schedule, 10) == pytest.approx(1.0)
    assert factor(schedule, 60) == pytest.approx(0.5)
    assert factor(schedule, 110) == pytest.approx(0.0, abs=1e-15)
    assert factor(schedule, 1_000_000) == pytest.approx(0.0, abs=1e-15)


@pytest.mark.parametrize(
    ("decay", "options", "expected"),
    [
        ("none", {}, [1, 1, 1, 1, 1]),
        ("constant", {}, [1, 1, 1, 1, 1]),
        ("linear", {}, [1, 0.75, 0.5, 0.25, 0]),
        ("cosine", {}, [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0]),
        ("wsd", {"decay_fraction": 0.5}, [1, 1, 1, 1 - math.sqrt(0.5), 0]),
        ("wsd", {"decay_fraction": 1.0}, [1, 0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75), 0]),
        ("wsd", {"decay_fraction": 0.01}, [1, 1, 1, 1, 0]),
    ],
)
def test_decays_have_known_values(decay: Any, options: dict[str, float], expected: list[float]) -> None:
    schedule = LRSchedule(decay=decay, steps=40, **options)
    assert [factor(schedule, step) for step in (0, 10, 20, 30, 40)] == pytest.approx(expected, abs=1e-12)


@given(
    sizes=st.lists(st.integers(1, 512), min_size=2, max_size=40),
    scaling=st.sampled_from(AT_SHELL["lr.scaling"].setting.choices),
    decay=st.sampled_from(["cosine", "linear", "wsd"]),
    by_steps=st.booleans(),
    warmup=st.floats(0, 0.5),
)
def test_a_decay_ends_with_the_run_whatever_the_batch_does(
    sizes: list[int], scaling: str, decay: Any, by_steps: bool, warmup: float
) -> None:
    """It falls steadily, is above zero at each step, and zero after the last one: in epochs as in steps."""
    length: dict[str, Any] = {"steps": len(sizes)} if by_steps else {"samples": sum(sizes)}
    total = len(sizes) if by_steps else sum(sizes) / sizes[0]
    schedule = LRSchedule(scaling, warmup * total, decay, sizes[0], decay_fraction=0.5, **length)
    progress, samples, decays = 0.0, 0, []
    for step, size in enumerate(sizes):
        plain = LRSchedule("none", 0, decay, sizes[0], decay_fraction=0.5, **length)
        decays.append(plain.factor(progress, schedule.done(step, samples), size))
        progress, samples = schedule.advance(progress, size, size, 1.0, 50.0), samples + size
    assert all(before >= after > 0 for before, after in itertools.pairwise(decays))
    assert schedule.done(len(sizes), samples) == 1.0
    assert schedule.factor(progress, 1.0, sizes[-1]) == pytest.approx(0.0, abs=1e-12)


@given(
    progress=st.floats(0, 2e4),
    more=st.floats(0, 100),
    warmup=st.floats(0, 1e3),
    length=st.floats(1, 1e4),
)
def test_schedule_rises_then_falls(progress: float, more: float, warmup: float, length: float) -> None:
    schedule = LRSchedule(warmup_steps=warmup, decay="cosine", samples=warmup + length)
    now, later = factor(schedule, progress), factor(schedule, progress + more)
    assert 0 <= now <= 1
    if progress >= warmup:
        assert later <= now
    elif progress + more + 1 < warmup:
        assert later >= now > 0


def test_factors_multiply() -> None:
    schedule = LRSchedule(scaling="linear", warmup_steps=4, base_batch_size=32)
    assert schedule.factor(1, 0.0, 64, lr_scale=0.5) == pytest.approx((2 / 4) * 2 * 0.5)


@pytest.mark.parametrize("scaling", ["none", "linear", "sqrt"])
def test_progress_follows_samples(scaling: str) -> None:
    schedule = LRSchedule(scaling=scaling, base_batch_size=32)
    progress = 0.0
    for batch_size in (32, 64, 16, 128):
        progress = schedule.advance(progress, batch_size, batch_size)
    assert progress == (32 + 64 + 16 + 128) / 32


def test_adascale_progress_follows_the_gain() -> None:
    schedule = LRSchedule(scaling="adascale", base_batch_size=128)
    assert schedule.advance(10.0, 512, 512, mean_grad_sq=1.0, mean_grad_variance=256.0) == pytest.approx(12.0)
    assert schedule.advance(10.0, 512, 512) == 11.0
    assert schedule.factor(10.0, 0.0, 512, 1.0, 1.0, 256.0) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("decay", "warmup_steps", "total", "key"),
    [
        ("cosine", 0, None, "lr.decay"),
        ("cosine", 5, 5.0, "lr.warmup_steps"),
        ("wsd", 10, 10.0, "lr.warmup_steps"),
        ("wsd", 9, 10.0, None),
        ("constant", 5, None, None),
    ],
)
def test_a_decay_needs_room_after_the_warm_up(
    decay: str, warmup_steps: int, total: float | None, key: str | None
) -> None:
    facts = {"lr.decay": decay, "lr.warmup_steps": warmup_steps, **rules.run_facts(total, decay, 0.1)}
    assert [rule.key for rule in rules.broken(facts)] == ([] if key is None else [key])
