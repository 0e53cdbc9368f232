"""Micro-batches that grow with the batch (batch.micro_max, max_micro_batch): how large, the same bits, fewer passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from elastic_job import assert_exact, assert_same_training, chaos, run_job, words
from hypothesis import given
from hypothesis import strategies as st
from problems import network, problem

import kfuse as kf
from kfuse.data.fetching import micro_batch_sizes
from kfuse.policies import SchedulePolicy
from kfuse.train.context import Settings


def settings(batch_size: int, micro_batch: int, most: int | None) -> Settings:
    return Settings.of({"batch_size": batch_size, "batch_micro": micro_batch, "batch_micro_max": most})


@pytest.mark.parametrize(
    ("batch_size", "workers", "sizes"),
    [
        (8, 1, [8]),  # smaller than the first batch
        (32, 1, [8] * 4),
        (64, 1, [16] * 4),
        (64, 2, [16] * 4),
        (64, 3, [8] * 8),  # two of 16 for each of three workers would be too many
        (96, 3, [16] * 6),
        (72, 1, [16] * 4 + [8]),  # three of 24 would be too few
        (128, 2, [32] * 4),
        (256, 2, [32] * 8),  # no more than 32 samples
    ],
)
def test_by_hand(batch_size: int, workers: int, sizes: list[int]) -> None:
    size = settings(32, 8, 32).micro_batch_of(batch_size, workers)
    assert micro_batch_sizes(batch_size, size) == sizes


@given(st.data())
def test_bounds(data: st.DataObject) -> None:
    unit = data.draw(st.integers(1, 16), "micro_batch")
    first = data.draw(st.integers(unit, 64 * unit), "first batch size")
    most = unit * data.draw(st.integers(1, 64), "max_micro_batch / micro_batch")
    batch_size, workers = data.draw(st.integers(1, 4096), "batch size"), data.draw(st.integers(1, 9), "workers")
    size = settings(first, unit, most).micro_batch_of(batch_size, workers)
    count = len(micro_batch_sizes(batch_size, size))
    assert unit <= size <= most and size % unit == 0
    at_base = len(micro_batch_sizes(batch_size, unit))
    assert count >= min(at_base, max(-(-first // unit), workers))
    assert settings(first, unit, None).micro_batch_of(batch_size, workers) == unit


PHASES = [{"step": 4, "batch_size": 64}, {"step": 9, "batch_size": 200}, {"step": 14, "batch_size": 48}]


def passes(most: int | None) -> list[int]:
    """The samples of each forward."""
    x, y = problem(3000)
    model, sizes = network(), []
    model.register_forward_hook(lambda module, inputs, output: sizes.append(len(output)))
    opt = kf.FusedAdamW(model.parameters(), lr=0.01)
    given: Any = {"train_steps": 20, "batch_size": 32, "batch_micro": 8, "batch_micro_max": most}
    kf.fit(model, (x, y), opt, kf.Hook(SchedulePolicy(PHASES)), **given)
    return sizes


def test_fewer_passes_over_the_same_samples() -> None:
    small, large = passes(None), passes(64)
    assert sum(small) == sum(large) == 4 * 32 + 5 * 64 + 5 * 200 + 6 * 48
    assert set(large) == {8, 16, 56, 32}, "200 = 3 * 56 + 32; 48 = 6 * 8"
    assert len(large) < 0.7 * len(small)


TRAINING = words(
    "model=mlp data=digits model.hidden=[24] batch.size=32 batch.micro=8 batch.micro_max=32 train.steps=60",
    "train.epochs=100 workers.max=3 workers.count=3 elastic.max_failures=20 comm=reproducible",
)


@pytest.mark.full
@pytest.mark.jobs
def test_a_job_with_losses_and_resizes_has_the_bits_of_an_undisturbed_one(tmp_path: Path) -> None:
    phases = [{"step": 8, "batch_size": 64}, {"step": 20, "batch_size": 136}, {"step": 40, "batch_size": 256}]
    events = [
        {"step": step, "moment": moment, "rank": rank, "how": "kill", "workers": 3}
        for step, moment, rank in ((12, "mid_reduction", 1), (25, "forward", 0), (45, "mid_reduction", 2))
    ]
    jobs = [
        run_job(
            tmp_path / name / "run",
            [*TRAINING, *more, *chaos(tmp_path / name, phases=phases, events=struck, adaptive=False)],
        )
        for name, struck, more in (("alone", [], ["workers.count=1"]), ("lost", events, []))
    ]
    for job in jobs:
        assert job.error is None, job.told()
        assert_exact(job)
    assert_same_training(jobs[1], jobs[0])
    found = {record["batch_size"]: record["micro_batches"] for record in jobs[0].metrics}
    assert found == {32: 4, 64: 4, 136: 5, 256: 8}
