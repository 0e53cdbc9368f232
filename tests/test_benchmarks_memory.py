"""The bytes of real tensors are those that the ranges are chosen by, and the stored table is that of this code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from kfuse.comm.group import Pending
from kfuse.comm.ranges import aligned_ranges, bound, bytes_a_parameter
from kfuse.comm.sum_tree import plan_range
from kfuse.data import worker_range

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
PADDING = 0.15  # bytes a parameter: the tail, tables of chunks, and shards that are not all of one size


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import memory

    return memory


def expected(ranges: Sequence[range]) -> float:
    """By the formula. Two workers on CPUs do not copy their own contributions to their shard."""
    if len(ranges) > 2:
        return bytes_a_parameter(ranges)
    plans = [plan_range(r.start, len(r), ranges[-1].stop) for r in ranges]
    return bytes_a_parameter(ranges) - 4 * len(max(plans, key=lambda plan: plan.slots).pieces) / 2


@pytest.mark.parametrize(("total", "workers"), [(7, 2), (20, 3), (13, 8)])
def test_a_worker_holds_what_the_formula_says(memory: ModuleType, total: int, workers: int) -> None:
    row = memory.reproducible(workers, total)
    assert row["counted"] == pytest.approx(expected(aligned_ranges(total, workers)), abs=PADDING)
    assert row["counted"] <= bound(total, workers) + PADDING


def test_equal_ranges_hold_what_the_formula_says(memory: ModuleType) -> None:
    """Shares that nothing aligns, as those of stragglers are: the formula holds, the bound does not."""
    ranges = [worker_range(21, 3, rank, [7, 6, 8]) for rank in range(3)]
    counted = max(memory.measure(memory.REPRODUCIBLE, ranges, rank) for rank in range(3))
    assert counted == pytest.approx(bytes_a_parameter(ranges), abs=PADDING)
    assert counted > bound(21, 3)


def test_buckets_share_their_receive_buffers(memory: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are messages under way: the rows of two of the four buckets, or those of one."""
    monkeypatch.setattr(memory, "TENSORS", 4)
    ranges = aligned_ranges(40, 4)
    rows = 4 * sum(len(plan_range(r.start, len(r), 40).pieces) for r in ranges) / 4
    slow, quick = (memory.measure(memory.REPRODUCIBLE, ranges, 0, message) for message in (memory.Slow, Pending))
    assert slow - quick == pytest.approx(1 / 4 * rows, abs=PADDING)


@pytest.mark.full
def test_other_transports_hold_one_gradient_and_their_messages(memory: ModuleType) -> None:
    row = memory.without_order(2)
    assert row["allreduce"] == pytest.approx(16, abs=PADDING)
    assert row["allreduce, bf16 wire"] == pytest.approx(18, abs=PADDING)
    assert row["all_to_all"] == pytest.approx(16 + 2, abs=PADDING)  # and what is received for half of them
    assert row["all_to_all, bf16 wire"] == pytest.approx(18 + 1, abs=PADDING)
    assert row["sharded"] == pytest.approx(8 + 2 + 8 / 2, abs=PADDING)  # parameter, gradient, received; moments
    row = memory.without_order(3)
    assert row["all_to_all"] == pytest.approx(20, abs=PADDING)
    assert row["all_to_all, bf16 wire"] == pytest.approx(20, abs=PADDING)
    assert row["sharded"] == pytest.approx(12 + 8 / 3, abs=2 * PADDING)  # whole blocks


def test_the_stored_table_is_of_this_code() -> None:
    """If it is not: python benchmarks/memory.py --json benchmarks/results/memory.json, and the table in docs/gpu.md."""
    stored = json.loads((BENCHMARKS / "results" / "memory.json").read_text())
    assert {row["workers"] for row in stored["reproducible"]} == {2, 3, 4, 8, 16, 32, 64}
    for row in stored["reproducible"]:
        ranges = aligned_ranges(row["micro_batches"], row["workers"])
        assert row["formula"] == pytest.approx(bytes_a_parameter(ranges))
        assert row["counted"] == pytest.approx(expected(ranges), abs=PADDING)
        assert row["load"] == pytest.approx(max(map(len, ranges)) * row["workers"] / row["micro_batches"])
        assert row["formula"] <= row["bound"] == bound(row["micro_batches"], row["workers"])
    for row in stored["without_order"]:
        assert row["allreduce"] == pytest.approx(16, abs=PADDING)
        received = 4 if row["workers"] > 2 else 2
        assert row["sharded"] == pytest.approx(8 + received + 8 / row["workers"], abs=2 * PADDING)  # whole blocks
