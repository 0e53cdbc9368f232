"""The ranges of reproducible sums: each micro-batch once, even loads, few bytes, the bits of the canonical tree."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_sum_tree import canonical_sum, tree_sum

from kfuse.comm.ranges import aligned_ranges, bound, bytes_a_parameter
from kfuse.data.sampler import EpochSampler, micro_batch_sizes, worker_range
from kfuse.train.step import StepSamples

steps = st.integers(1, 64).flatmap(lambda workers: st.tuples(st.integers(workers, 256), st.just(workers)))
large_steps = st.integers(1, 300).flatmap(lambda workers: st.tuples(st.integers(workers, 5000), st.just(workers)))


def largest(ranges: tuple[range, ...]) -> int:
    return max(map(len, ranges))


def check(total: int, workers: int) -> None:
    """What holds for every step: one range each, in order, and no load that is too large."""
    ranges = aligned_ranges(total, workers)
    assert len(ranges) == workers
    assert list(itertools.chain.from_iterable(ranges)) == list(range(total))
    assert all(ranges), "a worker has nothing to do"
    equal = -(-total // workers)
    assert largest(ranges) <= max(equal, 5 * total // (4 * workers))
    if total <= 4 * workers:
        assert largest(ranges) == equal


def check_bytes(total: int, workers: int) -> None:
    assert bytes_a_parameter(aligned_ranges(total, workers)) <= bound(total, workers)


@given(large_steps)
def test_every_worker_has_its_own_micro_batches(step: tuple[int, int]) -> None:
    check(*step)


@given(steps)
def test_the_bytes_are_bounded(step: tuple[int, int]) -> None:
    total, workers = step
    check(total, workers)
    if workers > 1:
        check_bytes(total, workers)


def test_the_hardest_steps_are_bounded() -> None:
    """With equal shares some of these need up to 51 bytes."""
    for step in ((64, 3), (100, 8), (18, 2), (20, 3), (33, 5), (65, 5), (129, 5), (255, 63), (256, 64)):
        check_bytes(*step)


@pytest.mark.long
def test_all_steps_of_up_to_256_micro_batches_on_up_to_64_workers_are_bounded() -> None:
    worst_equal, larger = 0.0, 0
    for workers in range(2, 65):
        for total in range(workers, 257):
            check(total, workers)
            check_bytes(total, workers)
            equal = tuple(worker_range(total, workers, rank) for rank in range(workers))
            worst_equal = max(worst_equal, bytes_a_parameter(equal))
            larger += largest(aligned_ranges(total, workers)) > largest(equal)
    assert worst_equal > 70, "equal ranges would do: the bound says nothing"
    assert 0 < larger < 2700, "shares are larger than equal ones where there is no need"


@pytest.mark.parametrize(("workers", "most"), [(2, 30), (3, 20)])
def test_no_other_ranges_are_better(workers: int, most: int) -> None:
    """Against every way to cut a step: first the largest share, then the bytes."""
    for total in range(workers, most):
        tried: dict[int, float] = {}
        for cuts in itertools.combinations(range(1, total), workers - 1):
            ranges = tuple(map(range, (0, *cuts), (*cuts, total)))
            load, needed = largest(ranges), bytes_a_parameter(ranges)
            tried[load] = min(needed, tried.get(load, needed))
        enough = [load for load in sorted(tried) if tried[load] <= bound(total, workers)]
        found = aligned_ranges(total, workers)
        assert largest(found) == enough[0]
        assert bytes_a_parameter(found) == min(needed for load, needed in tried.items() if load <= enough[0])


@given(steps, st.integers(0, 2**32 - 1))
def test_the_sum_has_the_canonical_bits(step: tuple[int, int], seed: int) -> None:
    total, workers = step
    rng = np.random.default_rng(seed)
    leaves = (rng.standard_normal(total) * 10.0 ** rng.integers(-6, 6, total)).astype(np.float32)
    cuts = [r.start for r in aligned_ranges(total, workers)[1:]]
    assert tree_sum(leaves, cuts).tobytes() == canonical_sum(leaves).tobytes()


def test_too_few_micro_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="2 micro-batches for 3 workers"):
        aligned_ranges(2, 3)
    with pytest.raises(ValueError, match="0 workers"):
        aligned_ranges(2, 0)


# -- where they are used ----------------------------------------------------------------------------------------------


def test_only_reproducible_sums_without_weights_take_them() -> None:
    equal = [worker_range(20, 3, rank) for rank in range(3)]
    aligned = [worker_range(20, 3, rank, aligned=True) for rank in range(3)]
    assert [len(r) for r in equal] == [7, 7, 6] and max(map(len, aligned)) == 8
    weights = [16, 16, 4]
    for rank in range(3):
        assert worker_range(20, 3, rank, weights, aligned=True) == worker_range(20, 3, rank, weights)
    few = [worker_range(2, 5, rank, aligned=True) for rank in range(5)]
    assert few == [worker_range(2, 5, rank) for rank in range(5)] and len(few[0]) == 1


@given(st.integers(1, 6), st.integers(1, 90), st.booleans(), st.sampled_from([None, (16, 9, 4, 16, 16, 16)]))
def test_what_is_fetched_ahead_is_what_the_step_runs(
    workers: int, batch_size: int, aligned: bool, weights: tuple[int, ...] | None
) -> None:
    """Every task that a rank predicts is one of its micro-batches, at all steps of an epoch, in their order."""
    length, micro, shares = 200, 3, weights and weights[:workers]
    sampler = EpochSampler(length, 0)
    for rank in range(workers):
        ran = []
        for cursor in range(0, length, batch_size):
            indices = sampler.indices(0, cursor, batch_size)
            samples = StepSamples(0, cursor, indices, micro, workers, shares, aligned)
            ran += [samples.task(j) for j in samples.range_of(rank)]
            assert len(samples.sizes) == len(micro_batch_sizes(len(indices), micro))
        start = StepSamples(0, 0, sampler.indices(0, 0, batch_size), micro, workers, shares, aligned)
        assert list(start.task_plan(rank, batch_size, length, 1).tasks()) == ran
