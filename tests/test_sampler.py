"""Every sample of an epoch is used exactly once, for any batch sizes and numbers of workers."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfuse.data.sampler import EpochSampler, micro_batch_sizes, permutation, worker_range

RECORDED = [6, 2, 5, 10, 7, 1, 9, 8, 0, 4, 3, 11]

lengths = st.integers(1, 300)
seeds = st.integers(0, 2**64)
epochs = st.integers(0, 1000)


@given(lengths, seeds, epochs, st.lists(st.integers(1, 80), min_size=1))
def test_each_epoch_is_covered_once_by_any_batch_sizes(length, seed, epoch, sizes):
    sampler = EpochSampler(length, seed)
    seen, batch_sizes = [], itertools.cycle(sizes)
    while len(seen) < length:
        count = next(batch_sizes)
        batch = sampler.indices(epoch, len(seen), count)
        assert batch.dtype == np.int64
        assert len(batch) == min(count, length - len(seen))
        seen += batch.tolist()
    assert sorted(seen) == list(range(length))
    assert len(sampler.indices(epoch, length, 1)) == 0


# A step's batch size, micro-batch, and the weights of its workers (None: equal).
steps = st.tuples(
    st.integers(1, 60),
    st.integers(1, 16),
    st.one_of(
        st.integers(1, 6).map(lambda n: [None] * n),
        st.lists(st.floats(1e-3, 10.0), min_size=1, max_size=6),
    ),
)


@given(lengths, seeds, st.lists(steps, min_size=1, max_size=8))
def test_each_epoch_is_covered_once_through_resizes_and_batch_size_changes(length, seed, plan):
    """Each worker has a sampler of its own, as it has in a process of its own, or after a restart."""
    cursor, seen, schedule = 0, [], itertools.cycle(plan)
    while cursor < length:
        batch, micro, weights = next(schedule)
        batch = min(batch, length - cursor)
        sizes = micro_batch_sizes(batch, micro)
        offsets = [0, *itertools.accumulate(sizes)]
        for rank in range(len(weights)):
            share = worker_range(len(sizes), len(weights), rank, None if weights[0] is None else weights)
            sampler = EpochSampler(length, seed)
            for j in share:
                seen += sampler.indices(3, cursor + offsets[j], sizes[j]).tolist()
        cursor += batch
    assert sorted(seen) == list(range(length))


@given(lengths, seeds, st.lists(st.tuples(epochs, st.floats(0, 1), st.integers(0, 50)), min_size=1))
def test_the_answer_does_not_depend_on_what_was_asked_before(length, seed, queries):
    used = EpochSampler(length, seed)
    for epoch, position, count in queries:
        cursor = int(position * length)
        answer = used.indices(epoch, cursor, count)
        fresh = EpochSampler(length, seed).indices(epoch, cursor, count)
        assert answer.tolist() == fresh.tolist()
        answer[:] = -1  # a caller's own copy: must not reach the cached order


def test_the_order_is_the_same_on_every_machine():
    """Recorded once: another machine, or a newer NumPy, must find the same order."""
    assert permutation(12, seed=7, epoch=2).tolist() == RECORDED
    assert permutation(12, seed=7, epoch=3).tolist() != RECORDED
    assert permutation(12, seed=8, epoch=2).tolist() != RECORDED


def test_seed_and_epoch_do_not_run_into_each_other():
    """SeedSequence pads with zeros, so that its entropy [5, 1] and [5 + 2**32, 0] would be the same."""
    orders = {tuple(permutation(50, seed, epoch)) for seed in (5, 5 + 2**32) for epoch in (0, 1, 2**32)}
    assert len(orders) == 6


def test_the_first_sample_is_uniform():
    """Chi-squared over 10 samples: 9 degrees of freedom, 27.9 is its 0.999 quantile."""
    counts = np.bincount([permutation(10, 0, epoch)[0] for epoch in range(2000)], minlength=10)
    assert ((counts - 200) ** 2 / 200).sum() < 27.9


def test_positions_outside_the_epoch_are_refused():
    for epoch, cursor, count, message in [
        (0, 11, 1, "cursor=11"),
        (0, -1, 1, "cursor=-1"),
        (-1, 0, 1, "epoch=-1"),
        (0, 0, -2, "count=-2"),
    ]:
        with pytest.raises(ValueError, match=message):
            EpochSampler(10, 0).indices(epoch, cursor, count)


def test_a_sampler_needs_samples_and_a_seed():
    with pytest.raises(ValueError, match="length=0"):
        EpochSampler(0, 0)
    with pytest.raises(ValueError, match="seed=-1"):
        EpochSampler(1, -1)


@given(st.integers(0, 1000), st.integers(1, 64))
def test_micro_batches_are_full_except_the_last(count, micro):
    sizes = micro_batch_sizes(count, micro)
    assert sum(sizes) == count
    assert all(size == micro for size in sizes[:-1])
    assert all(1 <= size <= micro for size in sizes[-1:])


def test_micro_batch_sizes_refuses_nonsense():
    with pytest.raises(ValueError, match="micro=0"):
        micro_batch_sizes(4, 0)
    with pytest.raises(ValueError, match="count=-1"):
        micro_batch_sizes(-1, 4)


def shares(micro_batches, workers, weights=None):
    ranges = [worker_range(micro_batches, workers, rank, weights) for rank in range(workers)]
    assert list(itertools.chain.from_iterable(ranges)) == list(range(micro_batches))
    return [len(r) for r in ranges]


@given(st.integers(0, 500), st.integers(1, 20))
def test_equal_shares_differ_by_at_most_one(micro_batches, workers):
    sizes = shares(micro_batches, workers)
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(0, 500), st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=12))
def test_weighted_shares_are_less_than_one_off_their_proportion(micro_batches, weights):
    for size, weight in zip(shares(micro_batches, len(weights), weights), weights, strict=True):
        assert abs(size - micro_batches * weight / sum(weights)) < 1 + 1e-6


@given(st.integers(0, 500), st.integers(1, 12), st.floats(1e-3, 1e3))
def test_equal_weights_are_no_weights(micro_batches, workers, weight):
    """In floating point 0.1 + 0.1 + 0.1 > 0.3 would move a boundary."""
    for rank in range(workers):
        weighted = worker_range(micro_batches, workers, rank, [weight] * workers)
        assert weighted == worker_range(micro_batches, workers, rank)


def test_the_leader_always_has_work():
    assert shares(2, 5)[0] == 1 and shares(2, 5).count(0) == 3
    assert shares(1, 3, [0.001, 1.0, 1.0]) == [1, 0, 0]


@given(st.integers(0, 8), st.integers(0, 5))
def test_powers_of_two_give_aligned_ranges(log_micro, log_workers):
    micro_batches, workers = 2 ** max(log_micro, log_workers), 2**log_workers
    for rank in range(workers):
        share = worker_range(micro_batches, workers, rank)
        assert len(share) == micro_batches // workers
        assert share.start % len(share) == 0


def test_worker_range_refuses_nonsense():
    for workers, rank, weights, message in [
        (2, 2, None, "rank=2"),
        (0, 0, None, "workers=0"),
        (2, 0, [1.0], "1 weights for 2 workers"),
        (2, 0, [1.0, 0.0], "above 0"),
        (2, 0, [1.0, -1.0], "above 0"),
        (2, 0, [1.0, float("nan")], "finite"),
    ]:
        with pytest.raises(ValueError, match=message):
            worker_range(4, workers, rank, weights)
