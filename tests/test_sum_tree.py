"""Any split over workers adds the same numbers in the same order, that of the canonical tree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfuse.comm.sum_tree import Node, plan_merges, plan_range


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


@given(st.integers(1, 2000), st.data())
def test_pieces_and_buffers_stay_logarithmic(total: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, total - 1))
    count = data.draw(st.integers(1, total - first))
    plan = plan_range(first, count, total)
    bits = (total - 1).bit_length()
    assert len(plan.pieces) <= max(1, 2 * bits)
    assert plan.slots <= len(plan.pieces) + count.bit_length() + 1


def test_powers_of_two_send_one_piece_each() -> None:
    for workers in (1, 2, 4, 8):
        for rank in range(workers):
            assert len(plan_range(rank * 8 // workers, 8 // workers, 8).pieces) == 1


def test_a_complete_tree_needs_its_depth_in_slots() -> None:
    """The last leaf is added in place to the subtree that is its sibling: it needs no slot of its own."""
    assert [plan_range(0, total, total).slots for total in (1, 2, 3, 4, 5, 8, 9, 63, 64)] == [1, 1, 1, 2, 2, 3, 3, 5, 6]


def test_a_plain_left_to_right_sum_has_other_bits() -> None:
    """Guards the oracle: the order matters for these numbers, so equality above says something."""
    leaves = np.float32([1e8, 1.0, -1e8, 1.0])
    assert canonical_sum(leaves) != np.float32(np.float32(np.float32(1e8 + 1.0) - np.float32(1e8)) + np.float32(1.0))


def test_wrong_ranges_and_gaps_are_refused() -> None:
    with pytest.raises(ValueError, match=r"do not lie in 0\.\.3"):
        plan_range(2, 3, 4)
    with pytest.raises(ValueError, match="do not cover"):
        plan_merges([(0, 0), (0, 2)], 4)
    for nodes in ([(0, 0), (0, 0), (0, 1)], [(1, 0), (0, 0), (0, 1)], [(0, 0), (1, 0), (0, 1)]):
        with pytest.raises(ValueError, match="do not cover"):
            plan_merges(nodes, 2)
