"""Every sample of an epoch is used once, and what is fetched depends on (seed, epoch, indices) alone."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kfuse.data import Dataset, EpochSampler, MapData
from kfuse.data.fetching import Fetcher, Task, fetch, micro_batch_sizes, permutation, random_key, worker_range

lengths, seeds, epochs = st.integers(1, 300), st.integers(0, 2**64), st.integers(0, 1000)

# A step's batch size, micro-batch, and the weights of its workers (None: equal).
steps = st.tuples(
    st.integers(1, 60),
    st.integers(1, 16),
    st.one_of(st.integers(1, 6).map(lambda n: [None] * n), st.lists(st.integers(1, 16), min_size=1, max_size=6)),
)


@given(lengths, seeds, epochs, st.lists(steps, min_size=1, max_size=8))
def test_each_epoch_is_covered_once_through_resizes_and_batch_size_changes(
    length: int, seed: int, epoch: int, plan: list[tuple[int, int, Any]]
) -> None:
    """Each worker has a sampler of its own, as it has in a process of its own, or after a restart."""
    cursor, seen, schedule = 0, [], itertools.cycle(plan)
    while cursor < length:
        batch, micro, weights = next(schedule)
        sizes = micro_batch_sizes(min(batch, length - cursor), micro)
        assert all(size == micro for size in sizes[:-1]) and 1 <= sizes[-1] <= micro
        offsets = [0, *itertools.accumulate(sizes)]
        for rank in range(len(weights)):
            sampler = EpochSampler(length, seed)
            for j in worker_range(len(sizes), len(weights), rank, None if weights[0] is None else weights):
                seen += sampler.indices(epoch, cursor + offsets[j], sizes[j]).tolist()
        cursor += offsets[-1]
    assert sorted(seen) == list(range(length))


@given(lengths, seeds, st.lists(st.tuples(epochs, st.floats(0, 1), st.integers(0, 50)), min_size=1))
def test_the_order_does_not_depend_on_what_was_asked_before(length: int, seed: int, queries: Any) -> None:
    used = EpochSampler(length, seed)
    for epoch, position, count in queries:
        cursor = int(position * length)
        answer = used.indices(epoch, cursor, count)
        assert answer.tolist() == EpochSampler(length, seed).indices(epoch, cursor, count).tolist()
        assert len(answer) == min(count, length - cursor) and answer.dtype == np.int64
        answer[:] = -1  # a caller's own copy: must not reach the cached order


def test_the_order_is_the_same_on_every_machine() -> None:
    """Recorded once: another machine, or a newer NumPy, must find the same order."""
    assert permutation(12, seed=7, epoch=2).tolist() == [6, 2, 5, 10, 7, 1, 9, 8, 0, 4, 3, 11]
    # SeedSequence pads with zeros, so that its entropy [5, 1] and [5 + 2**32, 0] would be the same.
    orders = {tuple(permutation(50, seed, epoch)) for seed in (5, 5 + 2**32) for epoch in (0, 1, 2**32)}
    assert len(orders) == 6
    # Chi-squared over 10 samples: 9 degrees of freedom, 27.9 is its 0.999 quantile.
    counts = np.bincount([permutation(10, 0, epoch)[0] for epoch in range(2000)], minlength=10)
    assert ((counts - 200) ** 2 / 200).sum() < 27.9
    with pytest.raises(ValueError, match="length=0"):
        EpochSampler(0, 0)


def shares(micro_batches: int, workers: int, weights: Any = None) -> list[int]:
    ranges = [worker_range(micro_batches, workers, rank, weights) for rank in range(workers)]
    assert list(itertools.chain.from_iterable(ranges)) == list(range(micro_batches))
    return [len(r) for r in ranges]


@given(st.integers(0, 500), st.lists(st.integers(1, 10**6), min_size=1, max_size=12))
def test_weighted_shares_are_less_than_one_off_their_proportion(micro_batches: int, weights: list[int]) -> None:
    for size, weight in zip(shares(micro_batches, len(weights), weights), weights, strict=True):
        assert abs(size - micro_batches * weight / sum(weights)) < 1 + 1e-6
    assert not micro_batches or shares(micro_batches, len(weights), weights)[0] >= 1  # the leader always has work


@given(st.integers(0, 500), st.integers(1, 20), st.integers(1, 1000))
def test_equal_shares_differ_by_at_most_one_and_equal_weights_are_no_weights(
    micro_batches: int, workers: int, weight: int
) -> None:
    sizes = shares(micro_batches, workers)
    assert max(sizes) - min(sizes) <= 1 and sizes[0] == max(sizes)
    assert shares(micro_batches, workers, [weight] * workers) == sizes


class Noise(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Draws from all three global generators, a number of times that depends on the sample."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        draws = [float(torch.rand(())) + np.random.rand() + random.random() for _ in range(1 + i % 3)]
        return torch.tensor([float(i), sum(draws)], dtype=torch.float64), i


class Drawing(Dataset):
    """A data set of the second kind: it fetches a micro-batch as a whole, with the generator that it is given."""

    def __len__(self) -> int:
        return 40

    def fetch(self, indices: np.ndarray, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        rows = torch.as_tensor(indices)
        return torch.rand(len(rows), 2, generator=generator) + np.random.rand(), rows


def disturb() -> None:
    """As whatever ran before in this process may leave the generators."""
    torch.rand(random.randrange(5)), np.random.rand(3)


@given(seeds, epochs, st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), min_size=1))
def test_a_samples_noise_depends_on_seed_epoch_and_index_alone(
    seed: int, epoch: int, steps: list[tuple[int, int]]
) -> None:
    """Any batch sizes and micro-batches, from step to step: each sample comes out as it does alone."""
    fetcher = Fetcher(MapData(Noise()), EpochSampler(40, seed))
    alone = {i: fetch(MapData(Noise()), np.array([i]), seed, epoch)[0][0] for i in range(40)}
    cursor, sizes = 0, itertools.cycle(steps)
    while cursor < 40:
        batch, micro = next(sizes)
        for size in micro_batch_sizes(min(batch, 40 - cursor), micro):
            disturb()
            x, y = fetcher.fetch(Task(epoch, cursor, size))
            assert all(torch.equal(row, alone[i]) for row, i in zip(x, y.tolist(), strict=True))
            cursor += size


def test_a_whole_micro_batch_is_drawn_by_its_first_index_and_each_seed_and_epoch_have_their_own() -> None:
    first = fetch(Drawing(), np.arange(5, 9), 1, 0)
    disturb()
    assert all(map(torch.equal, first, fetch(Drawing(), np.arange(5, 9), 1, 0)))
    for data in (MapData(Noise()), Drawing()):
        one, *others = (fetch(data, np.arange(6), seed, epoch)[0] for seed, epoch in ((1, 0), (1, 1), (2, 0)))
        assert all(not torch.equal(one, other) for other in others)


@given(st.lists(st.tuples(st.integers(0, 2**64), st.integers(0, 2**40), st.integers(0, 2**40)), unique=True))
def test_keys_are_63_bits_and_do_not_meet(numbers: list[tuple[int, int, int]]) -> None:
    keys = [random_key(*each) for each in numbers]
    assert all(0 <= key < 2**63 for key in keys)
    assert len({seed % 2**64 for seed, *_ in numbers}) < len(numbers) or len(set(keys)) == len(keys)
