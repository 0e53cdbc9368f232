"""Micro-batches that grow with the batch (batch.micro_max, max_micro_batch): how large, the same bits, fewer passes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import network, problem

import kfuse as kf
from kfuse.data.fetching import micro_batch_sizes
from kfuse.policies import SchedulePolicy
from kfuse.settings.tree import TrainSettings, completed, resolved
from kfuse.train.step import micro_batch_of


def settings(batch_size: int, micro_batch: int, most: int | None) -> Any:
    given = {"batch_size": batch_size, "micro_batch": micro_batch, "micro_batch_max": most}
    return completed(resolved("kf.fit", TrainSettings, given))


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
    size = micro_batch_of(settings(32, 8, 32), batch_size, workers)
    assert micro_batch_sizes(batch_size, size) == sizes


@given(st.data())
def test_bounds(data: st.DataObject) -> None:
    unit = data.draw(st.integers(1, 16), "micro_batch")
    first = data.draw(st.integers(unit, 64 * unit), "first batch size")
    most = unit * data.draw(st.integers(1, 64), "max_micro_batch / micro_batch")
    batch_size, workers = data.draw(st.integers(1, 4096), "batch size"), data.draw(st.integers(1, 9), "workers")
    size = micro_batch_of(settings(first, unit, most), batch_size, workers)
    count = len(micro_batch_sizes(batch_size, size))
    assert unit <= size <= most and size % unit == 0
    at_base = len(micro_batch_sizes(batch_size, unit))
    assert count >= min(at_base, max(-(-first // unit), workers))
    assert micro_batch_of(settings(first, unit, None), batch_size, workers) == unit


PHASES = [{"step": 4, "batch_size": 64}, {"step": 9, "batch_size": 200}, {"step": 14, "batch_size": 48}]


def passes(most: int | None) -> list[int]:
    """The samples of each forward."""
    x, y = problem(3000)
    model, sizes = network(), []
    model.register_forward_hook(lambda module, inputs, output: sizes.append(len(output)))
    opt = kf.FusedAdamW(model.parameters(), lr=0.01)
    given: Any = {"steps": 20, "batch_size": 32, "micro_batch": 8, "micro_batch_max": most}
    kf.fit(model, (x, y), opt, SchedulePolicy(PHASES), **given)
    return sizes


def test_fewer_passes_over_the_same_samples() -> None:
    small, large = passes(None), passes(64)
    assert sum(small) == sum(large) == 4 * 32 + 5 * 64 + 5 * 200 + 6 * 48
    assert set(large) == {8, 16, 56, 32}, "200 = 3 * 56 + 32; 48 = 6 * 8"
    assert len(large) < 0.7 * len(small)
