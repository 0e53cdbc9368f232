"""Streams by number, torch DataLoaders given as data, and what is refused of both."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, get_worker_info

from kfuse.data import DataError, IterableStream, SourceStream, as_stream, place


class Shards:
    """Shards of the given lengths; the sample at (shard, position) is (shard, position). Counts what it is asked."""

    def __init__(self, *lengths: int, block: int | None = None) -> None:
        self.lengths, self.shards, self.opened = lengths, len(lengths), 0
        if block is not None:
            self.block = block

    def open(self, shard: int, position: int) -> Iterator[tuple[int, int]]:
        self.opened += 1
        return ((shard, p) for p in range(position, self.lengths[shard]))


class Letters(IterableDataset):
    """Yields 0, 1, ... length - 1; counts the samples it has yielded."""

    def __init__(self, length: int) -> None:
        self.length, self.read = length, 0

    def __iter__(self) -> Iterator[int]:
        assert get_worker_info() is None
        for i in range(self.length):
            self.read += 1
            yield i


def fetched(stream: Any, numbers: Any) -> list[Any]:
    """The samples of these numbers, as plain values."""
    batch = stream.fetch(np.asarray(numbers, dtype=np.int64))
    return batch.tolist() if isinstance(batch, torch.Tensor) else list(zip(*(c.tolist() for c in batch), strict=True))


# -- number <-> (shard, position) --------------------------------------------------------------------------------------


@given(st.integers(0, 10**12), st.integers(1, 5000), st.integers(1, 300))
def test_each_place_has_one_number(number: int, shards: int, block: int) -> None:
    shard, position = place(number, shards, block)
    assert 0 <= shard < shards
    rounds, offset = divmod(position, block)
    assert (rounds * shards + shard) * block + offset == number  # by hand: the rounds before, then the blocks before


@given(st.integers(1, 7), st.integers(1, 9), st.integers(0, 400))
def test_the_first_numbers_read_each_shard_from_its_start_without_a_gap(shards: int, block: int, count: int) -> None:
    places = [place(number, shards, block) for number in range(count)]
    for shard in range(shards):
        positions = [p for s, p in places if s == shard]
        assert positions == list(range(len(positions)))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(1, 8), st.randoms(use_true_random=False))
def test_a_number_means_the_same_sample_in_any_order_of_reading(lengths: list[int], block: int, rng: Any) -> None:
    numbers = list(range(120))
    expected = [(s, p % lengths[s]) for s, p in (place(n, len(lengths), block) for n in numbers)]
    assert fetched(SourceStream(Shards(*lengths, block=block)), numbers) == expected
    order = rng.sample(numbers, len(numbers))
    assert fetched(SourceStream(Shards(*lengths, block=block)), order) == [expected[n] for n in order]


def test_a_pass_over_equal_shards_uses_each_sample_once() -> None:
    samples = fetched(SourceStream(Shards(24, 24, 24, block=8)), range(72))
    assert sorted(samples) == [(s, p) for s in range(3) for p in range(24)]


# -- seeking -----------------------------------------------------------------------------------------------------------


def test_a_worker_with_shards_of_its_own_reads_on() -> None:
    source = Shards(*[1000] * 4, block=8)
    stream = SourceStream(source)
    before = source.opened
    for step in range(20):  # 4 micro-batches of 8 a step, the last two of them this worker's
        fetched(stream, range(32 * step + 16, 32 * step + 32))
    assert source.opened - before == 2


def test_a_shards_end_is_found_without_reading_it() -> None:
    source = Shards(1000, block=16)
    stream = SourceStream(source)
    assert fetched(stream, [123_456]) == [(0, 456)]
    assert source.opened < 25
    before = source.opened
    assert fetched(stream, [999_999, 7_000]) == [(0, 999), (0, 0)]
    assert source.opened - before == 2


def test_only_some_iterators_stay_open() -> None:
    class Counted(Shards):
        open_now = 0

        def open(self, shard: int, position: int) -> Iterator[tuple[int, int]]:
            self.open_now += 1
            try:
                for p in range(position, self.lengths[shard]):
                    yield shard, p
            finally:
                self.open_now -= 1

    source = Counted(*[50] * 400, block=1)
    stream = SourceStream(source)
    assert fetched(stream, range(1200)) == [(n % 400, n // 400) for n in range(1200)]
    assert source.open_now <= 128


def test_a_stream_is_read_anew_in_another_process() -> None:
    for make in (lambda: SourceStream(Shards(5, 5, block=2)), lambda: IterableStream(Letters(5))):
        stream = make()
        first = fetched(stream, range(3))
        with pytest.raises(TypeError, match="generator"):
            pickle.dumps(stream.__dict__)
        assert fetched(pickle.loads(pickle.dumps(stream)), range(3)) == first


# -- what cannot seek --------------------------------------------------------------------------------------------------


@given(st.integers(1, 20), st.lists(st.integers(0, 80), min_size=1, max_size=30))
def test_an_iterable_data_set_gives_each_number_its_sample(length: int, numbers: list[int]) -> None:
    assert fetched(IterableStream(Letters(length)), numbers) == [n % length for n in numbers]


def test_an_iterable_data_set_is_read_on_and_only_to_go_back_from_the_start() -> None:
    data = Letters(1000)
    stream = IterableStream(data)
    fetched(stream, range(8, 16))
    fetched(stream, range(24, 32))
    assert data.read == 32
    fetched(stream, range(16, 24))
    assert data.read == 32 + 24


def test_a_failure_while_reading_is_not_taken_for_the_end() -> None:
    class Fails(IterableDataset):
        broken = True

        def __iter__(self) -> Iterator[int]:
            for i in range(10):
                if i == 5 and self.broken:
                    raise OSError("disk")
                yield i

    data = Fails()
    stream = IterableStream(data)
    for _ in range(2):
        with pytest.raises(OSError, match="disk"):
            fetched(stream, range(4, 6))
    data.broken = False
    assert fetched(stream, range(4, 12)) == [4, 5, 6, 7, 8, 9, 0, 1]


# -- wrong sources -----------------------------------------------------------------------------------------------------


class Other:
    """A source with these attributes."""

    def __init__(self, shards: Any = 1, made: Any = None, **more: Any) -> None:
        self.shards, self.made = shards, made
        self.__dict__.update(more)

    def open(self, shard: int, position: int) -> Any:
        return self.made(shard, position) if callable(self.made) else self.made


@pytest.mark.parametrize(
    "source, kind, said",
    [
        (Shards(0), DataError, "Shards: shard 0 is empty: each of 1 must have a sample"),
        (Other(made=[1, 2, 3]), TypeError, r"Other.open\(0, 0\): must return an iterator, not list"),
        (Other(made=None), TypeError, r"Other.open\(0, 0\): must return an iterator, not NoneType"),
        (Other(shards=0), DataError, "Other.shards=0: must be at least 1"),
        (Other(shards="many"), TypeError, "Other.shards='many': must be a whole number"),
        (Other(shards=2, block=0.5), TypeError, "Other.block=0.5: must be a whole number"),
        (iter([1, 2]), TypeError, "list_iterator: can be read once only"),
        ((i for i in range(3)), TypeError, "generator: can be read once only"),
    ],
)
def test_a_wrong_source_is_refused_in_one_line(source: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said) as caught:
        as_stream(source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "stream, numbers, said",
    [
        (lambda: SourceStream(Shards(9, 0, block=4)), range(9), "Shards: shard 1 is empty"),
        (lambda: IterableStream(Letters(0)), range(2), "Letters: is empty"),
    ],
)
def test_where_there_is_no_sample_it_is_said(stream: Any, numbers: range, said: str) -> None:
    with pytest.raises(DataError, match=said) as caught:
        fetched(stream(), numbers)
    assert "\n" not in str(caught.value)


def test_a_shard_that_changes_is_refused() -> None:
    asked: list[int] = []

    def made(shard: int, position: int) -> Iterator[int]:
        asked.append(position)
        return iter(range(position, 3)) if len(asked) < 3 else iter(())

    with pytest.raises(DataError, match=r"Other.open\(0, 0\): gave no sample, and the shard has 3"):
        fetched(SourceStream(Other(made=made)), range(4))


def test_an_iteration_that_begins_only_once_is_refused_at_its_end() -> None:
    class Once(IterableDataset):
        def __init__(self) -> None:
            self.samples = iter(range(3))

        def __iter__(self) -> Iterator[int]:
            return self.samples

    with pytest.raises(DataError, match="Once: gave 3 samples, and another iteration none"):
        fetched(IterableStream(Once()), range(4))


def test_other_data_is_no_stream() -> None:
    for data in ((torch.zeros(2), torch.zeros(2)), [(1, 2)], random, None):
        assert as_stream(data) is None
