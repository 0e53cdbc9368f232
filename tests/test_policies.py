"""Decisions stay within bounds; policies are deterministic, limited in their rate of change, and do not oscillate."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from elastic_job import read_lines
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_signals import BOUNDS, signals

import kfuse as kf
from kfuse.policies import BasePolicy, GNSPolicy, SchedulePolicy
from kfuse.policies.signals import ConfiguredPolicy, Decision, Signals
from kfuse.train.progress import Progress

# Decision and Bounds


def test_decision_clipped_says_so() -> None:
    """An lr_scale that fp32 cannot hold is dropped."""
    decision, notes = Decision(batch_size=5000, workers=0, sync="local:3").clipped(BOUNDS)
    assert decision == Decision(batch_size=1024, workers=1, sync="local:3")
    assert notes == ["batch_size 5000 clipped to 1024: must be 8 to 1024", "workers 0 clipped to 1: must be 1 to 8"]
    for scale in (3.5e38, 1e-38, 0.0, -1.0, math.inf, math.nan):
        decision, [note] = Decision(lr_scale=scale).clipped(BOUNDS)
        assert decision.is_empty and note.startswith(f"lr_scale {scale} dropped: it must be ")
    assert Decision(lr_scale=3.4e38).clipped(BOUNDS)[1] == Decision(lr_scale=1.18e-38).clipped(BOUNDS)[1] == []


def test_decision_changes_what_the_signals_do_not_show() -> None:
    for asked, expected in (
        (Decision(), None),
        (Decision(batch_size=64, lr_scale=1.0, workers=2), None),  # as they are
        (Decision(batch_size=72, lr_scale=1.0, workers=2), Decision(batch_size=72)),
        (Decision(batch_size=64, lr_scale=0.5, workers=3), Decision(lr_scale=0.5, workers=3)),
        (Decision(lr_scale=1.0 + 1e-7), None),  # fp32 on the way
        (Decision(lr_scale=1.0 + 1e-5), Decision(lr_scale=1.0 + 1e-5)),
        (Decision(batch_size=64, sync="sma"), Decision(sync="sma")),  # which no signal shows
        (Decision(batch_size=2048), Decision(batch_size=2048)),  # so that it is reported as clipped
    ):
        assert asked.changes(signals(64, workers=2)) == expected
    assert Decision(batch_size=5000, workers=99).changes(signals(1024, workers=8)) is None, "the bounds are reached"
    assert Decision(batch_size=4).changes(signals(4)) is None, "nor where the present one is outside"


def test_decision_takes_whole_numbers_of_any_kind() -> None:
    decision = Decision(batch_size=np.int64(32), lr_scale=np.float32(0.5))  # type: ignore[arg-type]
    assert (type(decision.batch_size), type(decision.lr_scale)) == (int, float)
    with pytest.raises(TypeError, match=r"workers=1\.5: must be a whole number"):
        Decision(workers=1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Decision sync=4: must be one of ssgd, local:N, sma, pair, or None"):
        Decision(sync=4)  # type: ignore[arg-type]


# BasePolicy


class Asked(ConfiguredPolicy):
    def __init__(self, other: BasePolicy | None = None) -> None:
        self.other, self.count = other, 0


class Counting(BasePolicy):
    prev = math.inf

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {"losses": [1.0, None], "pair": (1, "a")}
        self.scratch, self.asks = object(), Asked(Asked())
        self.asks.other.parent = self  # type: ignore[union-attr]

    def after_step(self) -> None:
        self.prev = np.float64(2.5)
        self.asks.other.count = 7  # type: ignore[union-attr]


def test_policy_state_carries_over(caplog: pytest.LogCaptureFixture) -> None:
    policy, joiner = Counting(), Counting()
    policy.after_step()
    state = policy.state_dict()
    asked = {"other.Asked": {"count": 7, "parent.Counting": {}}, "count": 0}
    assert state == {"seen": {"losses": [1.0, None], "pair": (1, "a")}, "asks.Asked": asked, "prev": 2.5}
    assert type(state["prev"]) is float
    joiner.load_state_dict(state)
    assert joiner.prev == 2.5 and joiner.state_dict() == state
    policy.seen["losses"].append(3.0)
    assert state["seen"]["losses"] == joiner.seen["losses"] == [1.0, None]
    late = Counting()
    late.asks = None  # type: ignore[assignment]  # made when it is first asked
    late.load_state_dict(state)
    assert late.asks is None and "state of Counting.asks (Asked there, NoneType here) is not taken over" in caplog.text

    class Derived(GNSPolicy):
        def __init__(self, least: int = 2) -> None:
            super().__init__(factor=0.5)
            self.least, self.count = least, 3

    assert Derived().state_dict() == {"count": 3, **GNSPolicy().state_dict()}, "arguments are no state"


# SchedulePolicy


def test_schedule_takes_megatrons_text() -> None:
    """Megatron-LM's StepBatchsizeNumMicroBatchesCalculator has the same batch sizes, without seq_length."""
    policy, wide = SchedulePolicy("0:768 250M:1536 500M:3072 0.75B:6144"), replace(BOUNDS, batch_max=2**24)
    assert policy.initial() == Decision(batch_size=768)
    for samples, expected in ((249_999_999, 768), (250_000_000, 1536), (499_999_999, 1536), (750_000_000, 6144)):
        # Three more steps of 64 samples begin before a decision on these signals applies.
        assert policy.decide(signals(64, samples=samples - 3 * 64, bounds=wide)) == Decision(batch_size=expected)
        assert policy.decide(signals(expected, samples=samples - 3 * expected, bounds=wide)) is None


def in_force(
    policy: SchedulePolicy, batch_size: int, steps: int, epoch: int | None = None, is_told: bool = False
) -> list[tuple[int, int, float]]:
    """(samples before it, batch size, lr_scale) of each step of a run with these decisions. epoch: its samples.

    is_told: the signals have them.
    """
    pending = {0: policy.initial()}
    now, samples, out = Decision(batch_size, 1.0), 0, []
    for step in range(steps):
        now = now.merged((pending.pop(step, None) or Decision()).clipped(BOUNDS)[0])
        assert now.batch_size is not None and now.lr_scale is not None
        out.append((samples, now.batch_size, now.lr_scale))
        number = 0 if epoch is None else samples // epoch
        samples += now.batch_size if epoch is None else min(now.batch_size, epoch - samples % epoch)
        seen = signals(now.batch_size, step=step, epoch=number, samples=samples, lr_scale=now.lr_scale)
        seen = replace(seen, epoch_samples=epoch if is_told else None)
        pending[seen.in_force_at] = policy.decide(seen)
        assert pending[seen.in_force_at] == policy.decide(seen)
    return out


SETTINGS = st.fixed_dictionaries({}, optional={"batch_size": st.integers(1, 2000), "lr_scale": st.floats(0.1, 10)})


@given(
    unit=st.sampled_from(["step", "samples", "epoch"]),
    phases=st.lists(st.tuples(st.integers(0, 100), SETTINGS.filter(bool)), max_size=12, unique_by=lambda each: each[0]),
    begin=st.integers(8, 64),
    epoch=st.none() | st.integers(1, 200),
)
@settings(max_examples=60)
def test_schedule_phases_start_where_they_are_written(unit: str, phases: Any, begin: int, epoch: int | None) -> None:
    """Any phases, however close: each step has what was written for it, but for the first ones. epoch: its samples,
    which may be fewer than a step's.
    """
    phases.sort(key=lambda each: each[0])
    run = in_force(SchedulePolicy([{unit: start, **own} for start, own in phases]), begin, 120, epoch, is_told=True)
    for step, (samples, *found) in enumerate(run):
        places = {"step": step, "samples": samples, "epoch": 0 if epoch is None else samples // epoch}
        at = places[unit] if step >= 4 else 0
        wanted = {"batch_size": begin, "lr_scale": 1.0}
        for start, own in phases:
            wanted |= own if start <= at else {}
        wanted["batch_size"] = min(max(wanted["batch_size"], BOUNDS.batch_min), BOUNDS.batch_max)
        assert found == [wanted["batch_size"], wanted["lr_scale"]], f"step {step}, with {samples} samples before it"


BY_EPOCH = [{"epoch": at, "batch_size": size} for at, size in ((0, 300), (1, 400), (2, 1000), (3, 2000), (4, 500))]


@pytest.mark.parametrize(
    "phases", [BY_EPOCH, "0:300 990:400 1801:128 2000:1000 2001:2000 4000:500"], ids=["epochs", "samples"]
)
def test_schedule_phases_are_exact_in_a_training(phases: Any, tmp_path: Path) -> None:
    """An epoch has 1000 samples: steps of 300, 300, 300, 100; 400, 400, 200; 1000; 1000; 500, 500."""
    sizes = [300] * 4 + [400] * 3 + [1000, 2000, 500, 500]
    torch.manual_seed(0)
    model, data = torch.nn.Linear(3, 1), (torch.randn(1000, 3), torch.randn(1000, 1))
    hook = SchedulePolicy(phases)
    opt = kf.FusedSGD(model.parameters(), lr=0.01)
    length = {"epochs": 50, "steps": len(sizes), "batch_max": 2000}
    kf.fit(model, data, opt, hook, batch_size=8, micro_batch=4, run_dir=tmp_path / "run", **length)
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["batch_size"] for line in lines] == sizes
    assert {Signals.of_record(line).epoch_samples for line in lines} == {1000}


def test_how_long_an_epoch_is_is_told_where_all_so_far_were_as_long() -> None:
    # The second: epochs before had 900 samples; the third: a stream.
    for length, samples, told in ((1000, 2000 + 300, 1000), (1000, 2 * 900 + 300, None), (None, 300, None)):
        at = Progress(8, epoch=0 if length is None else 2, cursor=300, samples=samples)
        at.began_with = {"dataset size": length}
        assert at.epoch_samples == told


def test_schedule_phases_are_checked() -> None:
    wrong: list[tuple[Any, str]] = [
        (8, "phases=8: must be a list of mappings, or a text"),
        ("0:32 1.5:64", "phases=0:32 1.5:64: 1.5:64 must be"),
        ("0:32 1K:64 1000:128", "phases: samples=[0, 1000, 1000]: must increase"),
        ([{"step": 8}], "phases[0]={'step': 8}: must have step, epoch or samples, and one of"),
        ([{"step": 1, "workers": 1, "momentum": 0.9}], "phases[0]: unknown momentum; must have step, epoch or s"),
        ([{"step": 1, "workers": 1}, {"epoch": 2, "workers": 2}], "phases: must have step, epoch or samples in all"),
        ([{"step": 1, "batch_size": 8.5}], "phases[0].batch_size=8.5: must be"),
    ]
    for phases, message in wrong:
        with pytest.raises(ValueError, match=re.escape(f"policy.{message}")):
            SchedulePolicy(phases)
