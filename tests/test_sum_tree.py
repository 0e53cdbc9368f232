"""Any split over workers adds the same numbers in the same order, that of the canonical tree."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfuse.comm.sum_tree import Node, RangePlan, pieces_of, plan_leaves, plan_merges, plan_range


def canonical_sum(leaves: np.ndarray) -> np.float32:
    """The definition, written the slow way: split at the largest power of two below the length."""
    if len(leaves) == 1:
        return leaves[0]
    half = 1 << ((len(leaves) - 1).bit_length() - 1)
    return np.float32(canonical_sum(leaves[:half]) + canonical_sum(leaves[half:]))


def tree_sum(leaves: np.ndarray, cuts: list[int], on_host: bool = False) -> np.float32:
    """The sum by workers that hold the ranges between `cuts`, then by a receiver. on_host: as for `plan_range`."""
    total = len(leaves)
    nodes: list[Node] = []
    rows: list[np.float32] = []
    for first, end in zip([0, *cuts], [*cuts, total], strict=True):
        plan = plan_range(first, end - first, total, on_host)
        slots, host = np.full(plan.slots, np.nan, np.float32), dict[int, np.float32]()
        for leaf, step in zip(range(first, end), plan.steps, strict=True):
            for slot, place in step.saves:
                host[place] = slots[slot]
            slots[step.slot] = slots[step.slot] + leaves[leaf] if step.accumulate else leaves[leaf]
            for (destination, source), place in itertools.zip_longest(step.merges, step.loads):
                if place is not None:
                    slots[destination] = host.pop(place)
                slots[destination] += slots[source]
        assert not host, "a sum was left on the host"
        nodes += plan.pieces
        rows += list(slots[: len(plan.pieces)])
    for destination, source in plan_merges(nodes, total):
        rows[destination] = np.float32(rows[destination] + rows[source])
    return rows[0]


@given(st.integers(1, 70), st.lists(st.integers(0, 70), max_size=7), st.integers(0, 2**32 - 1), st.booleans())
def test_any_split_gives_the_canonical_bits(total: int, cuts: list[int], seed: int, on_host: bool) -> None:
    rng = np.random.default_rng(seed)
    leaves = (rng.standard_normal(total) * 10.0 ** rng.integers(-6, 6, total)).astype(np.float32)
    workers = sorted(min(cut, total) for cut in cuts)
    assert tree_sum(leaves, workers, on_host).tobytes() == canonical_sum(leaves).tobytes()


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 4), st.data())
def test_workers_that_go_on_from_what_they_have_give_the_canonical_bits(
    total: int, workers: int, losses: int, data: st.DataObject
) -> None:
    """After each loss some have lost all they had; what nobody has is distributed anew, in any way."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    leaves = (rng.standard_normal(total) * 10.0 ** rng.integers(-6, 6, total)).astype(np.float32)
    has: list[set[int]] = [set() for _ in range(workers)]
    slots = [dict[int, np.float32]() for _ in range(workers)]
    plans: list[RangePlan | None] = [None] * workers
    for _ in range(losses):
        for worker in range(workers):
            if rng.random() < 0.5:
                has[worker], slots[worker], plans[worker] = set(), {}, None
        owners = rng.integers(0, workers, total)
        missing = set(range(total)).difference(*has)
        for worker in range(workers):
            mine, before = sorted(j for j in missing if owners[j] == worker), plans[worker]
            plan = plans[worker] = plan_leaves(mine, total, () if before is None else before.held)
            place = slots[worker]
            for leaf, step in zip(mine, plan.steps, strict=True):
                if step.accumulate:
                    place[step.slot] = np.float32(place[step.slot] + leaves[leaf])
                else:
                    assert before is None or step.slot not in place, "a sum was overwritten"
                    place[step.slot] = leaves[leaf]
                for destination, source in step.merges:
                    place[destination] = np.float32(place[destination] + place.pop(source))
            has[worker] |= set(mine)
            assert plan.pieces == pieces_of(tuple(sorted(has[worker])), total), "all ranks must know them"
            assert set(place) == set(plan.places)
            assert max(plan.places, default=0) < plan.slots
    nodes = [node for plan in plans if plan is not None for node in plan.pieces]
    rows = [slots[w][k] for w, plan in enumerate(plans) if plan is not None for k in plan.places]
    for destination, source in plan_merges(nodes, total):
        rows[destination] = np.float32(rows[destination] + rows[source])
    assert rows[0].tobytes() == canonical_sum(leaves).tobytes()


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


@given(st.integers(1, 600), st.data())
def test_with_sums_on_the_host_two_slots_do_for_the_piece_under_way(total: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, total - 1))
    count = data.draw(st.integers(1, total - first))
    here, plan = plan_range(first, count, total), plan_range(first, count, total, on_host=True)
    assert plan.pieces == here.pieces
    assert plan.slots <= min(len(plan.pieces) + 1, here.slots)
    if here.slots <= 2:
        assert plan.steps == here.steps or not any(step.saves for step in plan.steps)


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
