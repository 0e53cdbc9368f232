"""Any split over workers adds numbers in the order of the canonical tree; the one that is taken needs few bytes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfuse.comm.sum_tree import Node, aligned_ranges, bound, bytes_a_parameter, plan_merges, plan_range
from kfuse.data.fetching import EpochSampler, micro_batch_sizes, worker_range
from kfuse.train.step import StepSamples


def canonical_sum(leaves: np.ndarray) -> np.float32:
    """The definition, written the slow way: split at the largest power of two below the length."""
    if len(leaves) == 1:
        return leaves[0]
    half = 1 << ((len(leaves) - 1).bit_length() - 1)
    return np.float32(canonical_sum(leaves[:half]) + canonical_sum(leaves[half:]))


def tree_sum(leaves: np.ndarray, cuts: list[int]) -> np.float32:
    """The sum by workers that hold the ranges between `cuts`, then by a receiver."""
    total = len(leaves)
    nodes: list[Node] = []
    rows: list[np.float32] = []
    for first, end in zip([0, *cuts], [*cuts, total], strict=True):
        plan = plan_range(first, end - first, total)
        slots = np.full(plan.slots, np.nan, np.float32)
        for leaf, step in zip(range(first, end), plan.steps, strict=True):
            slots[step.slot] = slots[step.slot] + leaves[leaf] if step.accumulate else leaves[leaf]
            for destination, source in step.merges:
                slots[destination] += slots[source]
        nodes += plan.pieces
        rows += list(slots[: len(plan.pieces)])
    for destination, source in plan_merges(nodes, total):
        rows[destination] = np.float32(rows[destination] + rows[source])
    return rows[0]


@given(st.integers(1, 70), st.lists(st.integers(0, 70), max_size=7), st.integers(0, 2**32 - 1))
def test_any_split_gives_the_canonical_bits(total: int, cuts: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    leaves = (rng.standard_normal(total) * 10.0 ** rng.integers(-6, 6, total)).astype(np.float32)
    workers = sorted(min(cut, total) for cut in cuts)
    assert tree_sum(leaves, workers).tobytes() == canonical_sum(leaves).tobytes()
    # Guards the oracle: from left to right such numbers have another sum.
    leaves = np.float32([1e8, 1.0, -1e8, 1.0])
    assert canonical_sum(leaves) != np.float32(np.float32(np.float32(1e8 + 1.0) - np.float32(1e8)) + np.float32(1.0))


def test_slots_and_pieces_are_few() -> None:
    """The last leaf is added in place to the subtree that is its sibling: it needs no slot of its own."""
    assert [plan_range(0, total, total).slots for total in (1, 2, 3, 4, 5, 8, 9, 63, 64)] == [1, 1, 1, 2, 2, 3, 3, 5, 6]
    for workers in (1, 2, 4, 8):
        for rank in range(workers):
            assert len(plan_range(rank * 8 // workers, 8 // workers, 8).pieces) == 1


def test_wrong_ranges_and_gaps_are_refused() -> None:
    with pytest.raises(ValueError, match=r"do not lie in 0\.\.3"):
        plan_range(2, 3, 4)
    for nodes, total in (
        ([(0, 0), (0, 2)], 4),
        ([(0, 0), (0, 0), (0, 1)], 2),
        ([(1, 0), (0, 0), (0, 1)], 2),
        ([(0, 0), (1, 0), (0, 1)], 2),
    ):
        with pytest.raises(ValueError, match="do not cover"):
            plan_merges(nodes, total)
    for total, workers in ((2, 3), (2, 0)):
        with pytest.raises(ValueError, match=f"{total} micro-batches for {workers} workers"):
            aligned_ranges(total, workers)


def counted_bytes(ranges: tuple[range, ...]) -> float:
    """By the plans of all workers, as they are executed."""
    plans = [plan_range(r.start, len(r), ranges[-1].stop) for r in ranges]
    received = sum(len(plan.pieces) for plan in plans) / len(plans) if len(plans) > 1 else 0.0
    return 12 + 4 * max(plan.slots for plan in plans) + 4 * received


@given(st.integers(1, 300).flatmap(lambda workers: st.tuples(st.integers(workers, 5000), st.just(workers))))
def test_loads_are_even_and_bytes_bounded(step: tuple[int, int]) -> None:
    total, workers = step
    ranges = aligned_ranges(total, workers)
    assert len(ranges) == workers and all(ranges), "a worker has nothing to do"
    assert list(itertools.chain.from_iterable(ranges)) == list(range(total))
    equal, largest = -(-total // workers), max(map(len, ranges))
    assert largest <= (equal if total <= 4 * workers else max(equal, 5 * total // (4 * workers)))
    assert counted_bytes(ranges) == pytest.approx(bytes_a_parameter(ranges))
    assert bytes_a_parameter(ranges) <= bound(total, workers) or workers == 1


def test_only_reproducible_sums_without_weights_take_them() -> None:
    equal = [worker_range(100, 8, rank) for rank in range(8)]
    assert [worker_range(100, 8, rank, aligned=True) for rank in range(8)] == list(aligned_ranges(100, 8)) != equal
    weights = [16, 16, 4]
    for rank in range(3):
        assert worker_range(20, 3, rank, weights, aligned=True) == worker_range(20, 3, rank, weights)
    few = [worker_range(2, 5, rank, aligned=True) for rank in range(5)]
    assert few == [worker_range(2, 5, rank) for rank in range(5)] and len(few[0]) == 1


@given(
    st.integers(1, 6),
    st.integers(1, 90),
    st.booleans(),
    st.sampled_from([None, (16, 9, 4, 16, 16, 16)]),
    st.sampled_from([1, 2, 3]),
)
def test_what_is_fetched_ahead_is_what_the_step_runs(
    workers: int, batch_size: int, aligned: bool, weights: tuple[int, ...] | None, ranks: int
) -> None:
    """Every task that a rank predicts is one of its micro-batches, at all steps of an epoch, in their order.

    ranks: processes of each worker, which have equal parts of each micro-batch, or all its only sample.
    """
    length, micro, shares = 200, 6, weights and weights[:workers]
    sampler = EpochSampler(length, 0)
    for rank in range(workers):
        ran = []
        for cursor in range(0, length, batch_size):
            indices = sampler.indices(0, cursor, batch_size)
            samples = StepSamples(0, cursor, indices, micro, workers, shares, aligned, ranks)
            ran += [samples.task(j) for j in samples.ranges[rank]]
            assert samples.sizes == micro_batch_sizes(len(indices), micro, ranks)
            assert all(size % ranks == 0 or size == 1 for size in samples.sizes)
            parts = [samples.of(j) for j in range(len(samples.sizes))]
            assert np.concatenate(parts).tolist() == indices.tolist()
        start = StepSamples(0, 0, sampler.indices(0, 0, batch_size), micro, workers, shares, aligned, ranks)
        assert list(start.task_plan(rank, batch_size, length, 1).tasks()) == ran
