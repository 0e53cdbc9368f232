"""Trees of workers: the least spanning tree of measured links, checked lists of parents, and how links are measured."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from distributed import run_workers
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse.csgraph import minimum_spanning_tree

import kfuse as kf
from kfuse.comm.measurement import DECISION, RECORD_SLOTS, TAIL_SLOTS, Measurement
from kfuse.comm.step import MicroBatch, Step, StepPlan
from kfuse.comm.sum_tree import ADD, WRITE
from kfuse.comm.topology import (
    SAME,
    Links,
    alike,
    best_tree,
    check_parents,
    chunks,
    depths,
    duration,
    measure,
    rooted,
    rounds,
    spanning_tree,
)

Times = list[list[float]]


@st.composite
def symmetric_times(draw: st.DrawFn, values: st.SearchStrategy[float]) -> Times:
    size = draw(st.integers(1, 6))
    times = [[0.0] * size for _ in range(size)]
    for a, b in itertools.combinations(range(size), 2):
        times[a][b] = times[b][a] = draw(values)
    return times


def links_of(parents: Sequence[int]) -> list[tuple[int, int]]:
    return [(r, parent) for r, parent in enumerate(parents) if r != parent]


ANY = st.floats(1e-6, 10.0)
FEW = st.sampled_from([1.0, 2.0, 10.0])  # many trees are equally good


@given(symmetric_times(ANY) | symmetric_times(FEW))
def test_no_tree_takes_less_time_than_the_spanning_tree(times: Times) -> None:
    parents = spanning_tree(times)
    check_parents(parents, len(times))
    least = minimum_spanning_tree(np.array(times)).sum()
    assert sum(times[a][b] for a, b in links_of(parents)) == pytest.approx(least)


@given(symmetric_times(ANY))
def test_no_other_root_of_the_tree_is_faster(times: Times) -> None:
    parents = spanning_tree(times)
    others = [rooted(parents, root) for root in range(len(times))]
    for root, other in enumerate(others):
        assert other[root] == root
        assert {frozenset(link) for link in links_of(other)} == {frozenset(link) for link in links_of(parents)}
    assert duration(parents, times) == min(duration(other, times) for other in others)


@pytest.mark.parametrize("size", [1, 3, 64])
def test_equal_links_give_a_tree_of_few_levels(size: int) -> None:
    parents = spanning_tree([[float(a != b) for b in range(size)] for a in range(size)])
    assert max(depths(parents)) <= math.ceil(math.log2(size))
    assert max(map(parents.count, parents)) <= 1 + math.ceil(math.log2(size))


def test_the_time_of_a_tree() -> None:
    times = [[0, 3, 4, 9], [3, 0, 9, 7], [4, 9, 0, 9], [9, 7, 9, 0]]
    assert duration([0, 0, 0, 1], times) == 7 + (3 + 4) + (3 + 4) + 7  # a round for each level, up and down
    assert duration([0, 0, 0, 1], times, count=2) == (7 + 7 + 7 + 7 + 7) / 2  # five rounds of half the buffer
    assert duration([0, 0, 1, 2], times) == 2 * (9 + 9 + 3)
    assert duration([0], [[0]]) == 0
    assert [chunks(nbytes) for nbytes in (0, 2**19, 2**30)] == [1, 2, 8]


def test_times_that_noise_may_have_set_apart_are_equal() -> None:
    times = [[0.0, 1.0, 1.4, 1.6], [1.0, 0.0, 2.2, 30.0], [1.4, 2.2, 0.0, 2.5], [1.6, 30.0, 2.5, 0.0]]
    assert SAME == 1.5
    assert alike(times) == [[0.0, 1.0, 1.0, 1.6], [1.0, 0.0, 1.6, 30.0], [1.0, 1.6, 0.0, 2.5], [1.6, 30.0, 2.5, 0.0]]


def test_a_small_message_and_a_large_one_have_different_trees() -> None:
    """Rank 2 is near rank 0 for a short message, and behind a slow link for a long one."""
    near, far, slow, fast = 1e-4, 1e-2, 1e6, 1e9
    links = Links(
        ((0.0, near, near), (near, 0.0, far), (near, far, 0.0)),
        ((None, fast, slow), (fast, None, fast), (slow, fast, None)),
    )
    assert links.seconds(10**6) == [
        [0.0, pytest.approx(1.1e-3), pytest.approx(1.0001)],
        [pytest.approx(1.1e-3), 0.0, pytest.approx(1.1e-2)],
        [pytest.approx(1.0001), pytest.approx(1.1e-2), 0.0],
    ]
    assert {frozenset(link) for link in links_of(best_tree(links, 8))} == {frozenset((0, 1)), frozenset((0, 2))}
    assert {frozenset(link) for link in links_of(best_tree(links, 10**6))} == {frozenset((0, 1)), frozenset((1, 2))}


@pytest.mark.parametrize("size", [1, 2, 7, 8])
def test_the_rounds_of_pairs(size: int) -> None:
    found = rounds(size)
    pairs = [pair for each in found for pair in each]
    assert sorted(pairs) == list(itertools.combinations(range(size), 2)), "each pair once"
    assert all(len({rank for pair in each for rank in pair}) == 2 * len(each) for each in found), "disjoint"
    assert len(found) == (size - 1 if size % 2 == 0 else size if size > 1 else 1)


@given(st.integers(1, 6).flatmap(lambda size: st.lists(st.integers(0, size - 1), min_size=size, max_size=size)))
def test_each_list_that_is_a_tree_is_taken(parents: list[int]) -> None:
    size = len(parents)
    reached = {r for r, parent in enumerate(parents) if r == parent}
    is_tree = len(reached) == 1
    for _ in range(size):
        reached |= {r for r, parent in enumerate(parents) if parent in reached}
    no_trees = [parents[1:], [*parents[1:], size], [*parents[1:], -1]]
    for given_, right in ((parents, is_tree and len(reached) == size), *((each, False) for each in no_trees)):
        with contextlib.nullcontext() if right else pytest.raises(ValueError, match="must have one parent for each"):
            check_parents(given_, size)


def links_of_the_group() -> tuple[Links, list[float], Links | None, Links | None]:
    group = kf.init().group
    measured = measure(group)
    row = kf.peer_latencies()
    links, of_lane = group.links, group.lane(1).links
    kf.barrier()  # none ends while another one still connects its lane
    return measured, row, links, of_lane


@pytest.mark.full
@pytest.mark.parametrize("workers", [1, 3])
def test_all_workers_measure_the_same_links(workers: int) -> None:
    results = run_workers(workers, links_of_the_group)
    first = results[0][0]
    assert all(measured == first for measured, *_ in results)
    for a, b in itertools.product(range(workers), repeat=2):
        latency, rate = first.latencies[a][b], first.throughputs[a][b]
        assert latency == first.latencies[b][a] and rate == first.throughputs[b][a]
        assert (latency == 0 and rate is None) if a == b else (latency > 0 and rate is not None and rate > 0)
    for rank, (_, row, again, of_lane) in enumerate(results):
        assert again is not None and row == list(again.latencies[rank]) and of_lane == again
        assert again == results[0][2], "measured anew, the same on all workers"


@given(st.integers(1, 64), st.integers(0, 2**24))
def test_what_one_rank_writes_arrives_in_the_tail_as_it_was_sent(ranks: int, decision: int) -> None:
    tail, place = Measurement([], 3, torch.device("cpu")), np.zeros(3 + TAIL_SLOTS + ranks + 2, np.float32)
    for rank in range(ranks):
        tail.set_group(rank, ranks, 2, in_pack=False, rounds=False)
        tail.stopwatch.seconds_before, of_rank, now = 0.5 + rank, np.zeros_like(place), Step()
        now.plan = StepPlan(1, (), decision=decision)
        for now.done in range(2):  # micro-batches
            micro_batch = MicroBatch(1.0, last=False)
            micro_batch.loss, micro_batch.figures, micro_batch.leaf = 1.0, [7.0, 8.0], ADD if now.done else WRITE
            tail.write(of_rank, now, micro_batch)
        place += of_rank
    values = tail.record(place, SimpleNamespace(alone=False, plan=None)).tolist()  # type: ignore[arg-type]
    assert values[DECISION] == decision and values[-2:] == [14.0 * ranks, 16.0 * ranks]
    assert values[RECORD_SLOTS:-2] == [0.5 + rank for rank in range(ranks)]
