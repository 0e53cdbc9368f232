"""Streams by number, torch DataLoaders given as data, and what is refused of both."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch
from weakref import WeakSet

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    default_collate,
    default_convert,
    get_worker_info,
)

import kfuse as kf
from kfuse.data import DataError, MapData, Source, StreamSampler, TensorData, place
from kfuse.data.epochs import Epochs
from kfuse.data.fetching import Fetcher, Task
from kfuse.data.sources import IterableStream, SourceStream, as_stream, training_data
from kfuse.train.evaluation import params_sha256


class Shards(Source):
    """Shards of these sizes; the sample at (shard, position) is (shard, position). Counts what it is asked.

    known: whether it says its lengths.
    """

    def __init__(self, *sizes: int, block: int | None = None, known: bool = False) -> None:
        self.sizes, self.shards, self.opened = sizes, len(sizes), 0
        if known:
            self.lengths = sizes
        if block is not None:
            self.block = block

    def open(self, shard: int, position: int) -> Iterator[tuple[int, int]]:
        self.opened += 1
        return ((shard, p) for p in range(position, self.sizes[shard]))


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


@given(st.integers(0, 10**12), st.integers(1, 5000), st.integers(1, 300))
def test_each_place_has_one_number(number: int, shards: int, block: int) -> None:
    shard, position = place(number, shards, block)
    assert 0 <= shard < shards
    rounds, offset = divmod(position, block)
    assert (rounds * shards + shard) * block + offset == number  # by hand: the rounds before, then the blocks before


@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(1, 8), st.randoms(use_true_random=False))
def test_a_number_means_the_same_sample_in_any_order_of_reading(lengths: list[int], block: int, rng: Any) -> None:
    numbers = list(range(120))
    expected = [(s, p % lengths[s]) for s, p in (place(n, len(lengths), block) for n in numbers)]
    assert fetched(SourceStream(Shards(*lengths, block=block)), numbers) == expected
    order = rng.sample(numbers, len(numbers))
    assert fetched(SourceStream(Shards(*lengths, block=block)), order) == [expected[n] for n in order]


def an_epoch(lengths: list[int], block: int) -> list[tuple[int, int]]:
    """By hand: in turn each shard gives a block, until none has a sample left."""
    left, places = [[(s, p) for p in range(n)] for s, n in enumerate(lengths)], []
    while any(left):
        for shard in left:
            places += shard[:block]
            del shard[:block]
    return places


LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(any)


@given(LENGTHS, st.integers(1, 9), st.integers(0, 10**12), st.randoms(use_true_random=False))
def test_with_known_lengths_each_sample_comes_once_an_epoch(lengths: list[int], block: int, far: int, rng: Any) -> None:
    expected, epochs = an_epoch(lengths, block), Epochs(lengths, block)
    numbers = [*range(len(expected) * 2), *range(far, far + 50)]
    for order in (numbers, rng.sample(numbers, len(numbers))):
        assert [epochs.place(n) for n in order] == [expected[n % len(expected)] for n in order]
    stream = SourceStream(source := Shards(*lengths, block=block, known=True))
    before = source.opened
    assert fetched(stream, range(2 * len(expected))) == 2 * expected
    assert source.opened - before <= 2 * len(lengths)


@given(st.lists(st.integers(0, 10**11), min_size=1, max_size=9).filter(any), st.integers(1, 5000), st.data())
def test_places_of_long_shards_have_one_number_each(lengths: list[int], block: int, data: Any) -> None:
    epochs = Epochs(np.array(lengths), block)  # type: ignore[arg-type]
    number = data.draw(st.integers(0, sum(lengths) - 1))
    shard, position = epochs.place(np.int64(number))  # type: ignore[arg-type]
    assert 0 <= position < lengths[shard]
    start = position - position % block  # by hand: the rounds before, the turns before in this one, then the block
    taken = [min(n, start) + min(max(n - start, 0), block) * (s < shard) for s, n in enumerate(lengths)]
    assert sum(taken) + position % block == number


def test_a_worker_reads_on_and_finds_a_shards_end_without_reading_it() -> None:
    stream = SourceStream(source := Shards(*[1000] * 4, block=8))
    before = source.opened
    for step in range(20):  # 4 micro-batches of 8 a step, the last two of them this worker's
        fetched(stream, range(32 * step + 16, 32 * step + 32))
    assert source.opened - before == 2
    stream = SourceStream(source := Shards(1000, block=16))
    assert fetched(stream, [123_456, 999_999, 7_000]) == [(0, 456), (0, 999), (0, 0)]
    assert source.opened < 27


def test_only_some_iterators_stay_open() -> None:
    alive: WeakSet[Any] = WeakSet()

    class Counted(Shards):
        def open(self, shard: int, position: int) -> Iterator[tuple[int, int]]:
            alive.add(samples := ((shard, p) for p in range(position, 50)))
            return samples

    stream = SourceStream(Counted(*[50] * 200, block=1))
    assert fetched(stream, range(600)) == [(n % 200, n // 200) for n in range(600)]
    assert len(alive) <= 128


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


class Other(Source):
    """A source with one shard, and an `open` that gives what is made."""

    shards = 1

    def __init__(self, made: Any = iter, block: int = 16) -> None:
        self.made, self.block = made, block

    def open(self, shard: int, position: int) -> Iterator[Any]:
        return self.made(shard, position)


def test_what_has_no_samples_is_refused_and_what_is_no_stream_left_alone() -> None:
    class Once(IterableDataset):
        samples = iter(range(3))

        def __iter__(self) -> Iterator[int]:
            return self.samples

    asked: list[int] = []

    def changing(shard: int, position: int) -> Iterator[int]:
        asked.append(position)
        return iter(range(position, 3)) if len(asked) < 3 else iter(())

    def saying(*lengths: int) -> Source:
        source = Other(lambda shard, position: iter(range(position, 3)))
        source.lengths = lengths
        return source

    for source, said in [
        (saying(3, 3), r"Other: lengths=\[3, 3\]: must be 1 numbers, one for each shard, from 0, and not all 0"),
        (saying(-1), r"Other: lengths=\[-1\]: must be"),
        (saying(0), r"Other: lengths=\[0\]: must be"),
        (saying(4), "Other: shard 0 has no sample 3: fewer than its length says"),
        (Shards(9, 0, block=4), "Shards: shard 1 gave no sample"),
        (Other(made=changing), "Other: shard 0 gave no sample"),
        (Letters(0), "Letters: an iteration gave no sample, after 0 of those before"),
        (Once(), "Once: an iteration gave no sample, after 3 of those before"),
        (Other(block=0), "Other: shards=1, block=0: must be at least 1"),
    ]:
        with pytest.raises(DataError, match=said):
            fetched(as_stream(source), range(9))
    assert as_stream((torch.zeros(2), torch.zeros(2))) is None


class Namesakes(list[Any]):
    """Samples, whose class has the names of kfuse's interfaces for other things."""

    shards, block = 3, 2

    def order(self, column: int = 0) -> np.ndarray:
        return np.arange(len(self))

    def fetch(self, url: str, retries: int = 1) -> None:
        raise AssertionError

    open = fetch


class Unread(IterableDataset):
    shards, open, order = 3, Namesakes.open, Namesakes.order

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class Turned(MapData):
    def order(self, epoch: int) -> np.ndarray:
        return np.roll(np.arange(len(self)), epoch)


def test_what_is_kfuses_own_is_known_by_its_class() -> None:
    def used(data: Any, **more: Any) -> list[int]:
        found: list[int] = []

        def step_fn(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
            found.extend(batch.tolist())
            return model(batch[:, None].float()).mean()

        model = torch.nn.Linear(1, 1)
        kf.fit(model, data, kf.FusedSGD(model.parameters(), lr=0.1), step_fn=step_fn, **{"batch_size": 5, **more})
        return found

    plain = used(list(range(10)))
    assert plain != [*range(10)]
    assert used(Namesakes(range(10))) == used(DataLoader(Namesakes(range(10)), 5, shuffle=True)) == plain
    assert used(Unread(), steps=2) == [*range(10)]
    assert used(Turned(Namesakes(range(10))), epochs=2) == [*range(10), 9, *range(9)]


class Noisy(Shards):
    """Draws from all three global generators for each sample; and before them, which does no harm."""

    def open(self, shard: int, position: int) -> Iterator[Any]:
        torch.rand(2), np.random.rand(), random.random()

        def draw(p: int) -> Any:
            return shard, p, float(torch.rand(())) + np.random.rand() + random.random()

        return map(draw, range(position, self.sizes[shard]))


class Shuffled(IterableDataset):
    """Shuffles with a buffer, as pipelines do: what it yields depends on all that it has drawn before."""

    def __iter__(self) -> Iterator[Any]:
        buffer: list[int] = []
        for i in range(50):
            buffer.append(i)
            if len(buffer) > 8:
                yield buffer.pop(random.randrange(len(buffer))), float(torch.rand(()))
        yield from ((i, np.random.rand()) for i in buffer)


@pytest.mark.parametrize("make", [lambda: SourceStream(Noisy(40, 30, block=4)), lambda: IterableStream(Shuffled())])
def test_random_numbers_belong_to_the_sample(make: Any) -> None:
    def read(chunks: list[list[int]], seed: int = 0) -> list[Any]:
        fetcher, rows = Fetcher(make(), StreamSampler(seed)), {}
        for chunk in chunks:
            torch.rand(3), np.random.rand(), random.random()  # what another worker may have drawn before
            columns = fetcher.fetch(Task(0, chunk[0], len(chunk)))
            rows.update(zip(chunk, zip(*(c.tolist() for c in columns), strict=True), strict=True))
        return [rows[n] for n in sorted(rows)]

    numbers = list(range(150))
    once = read([numbers])
    assert len(set(once)) == 150
    assert read([numbers[i : i + 7] for i in range(0, 150, 7)]) == once
    order = random.Random(1).sample(numbers, 30)
    assert read([[n] for n in order]) == [once[n] for n in sorted(order)]
    assert read([numbers[i : i + 10] for i in (140, 20, 130, 0)]) == [*once[:10], *once[20:30], *once[130:]]
    assert read([numbers], seed=1) != once


class Regression(Shards):
    """Samples (x, y) of a linear problem; `seen` has each one's place."""

    def __init__(self, *lengths: int, block: int = 4) -> None:
        super().__init__(*lengths, block=block)
        self.seen: list[tuple[int, int]] = []

    def open(self, shard: int, position: int) -> Iterator[Any]:
        for p in range(position, self.sizes[shard]):
            self.seen.append((shard, p))
            x = torch.tensor([1.0, shard, math.sin(p)])
            yield x, x @ torch.tensor([0.3, -0.2, 0.5])


class Rows(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        yield from Regression(30).open(0, 0)


def linear() -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Flatten(0))
    return model, kf.FusedSGD(model.parameters(), lr=0.1)


def test_a_stream_is_trained_on_as_its_samples_in_order_are() -> None:
    source = Regression(30, 50, 20)
    model, opt = linear()
    how: dict[str, Any] = {"batch_size": 16, "micro_batch": 4, "lr_decay": "cosine"}
    summary = kf.fit(model, source, opt, steps=12, **how)
    assert summary is not None
    assert [summary[name] for name in ("steps", "epochs", "samples", "exit_reason")] == [12, 0, 192, "steps"]
    places = [place(n, 3, 4) for n in range(192)]
    assert source.seen[1:] == [(s, p % (30, 50, 20)[s]) for s, p in places]  # the first was to see that there is one

    rows = [next(Regression(30, 50, 20).open(*at)) for at in source.seen[1:]]
    by_hand, plain = linear()
    with patch("kfuse.data.fetching.permutation", lambda length, seed, epoch: np.arange(length)):
        kf.fit(by_hand, rows, plain, epochs=1, **how)
    assert params_sha256(by_hand) == summary["params_sha256"]


@pytest.mark.parametrize(("make", "workers"), [(lambda: Noisy(40, 30, block=4), 3), (Shuffled, 1)])
def test_loader_processes_read_a_stream_with_the_same_bits(make: Any, workers: int) -> None:
    def first_column(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return model(torch.stack([column.float() for column in [*batch, batch[0]][:3]], 1)).square().mean()

    def trained(data: Any, **more: int) -> Any:
        model, opt = linear()
        kf.fit(model, data, opt, steps=15, batch_size=12, micro_batch=3, step_fn=first_column, **more)  # type: ignore[arg-type]
        return params_sha256(model)

    alone = trained(make())
    assert trained(make(), num_workers=workers) == alone
    assert workers > 1 or trained(DataLoader(make(), 12, num_workers=workers)) == alone


def pairs(count: int = 48) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(itertools.islice(Regression(count).open(0, 0), count))


def doubled(samples: list[Any]) -> Any:
    x, y = default_collate(samples)
    return x, 2 * y


def test_a_data_loader_trains_and_evaluates_as_its_data_set_does() -> None:
    twice = [(x, 2 * y) for x, y in pairs()]
    plain = DataLoader(pairs(), sampler=RandomSampler(pairs()), batch_size=12, num_workers=2)
    collated = DataLoader(pairs(), 32, True, collate_fn=doubled)
    for alike in (
        [(pairs(), pairs(), {"batch_size": 12}), (plain, DataLoader(pairs(), 7), {})],
        [
            (twice, twice, {}),
            (collated, DataLoader(pairs(), 7, collate_fn=doubled), {}),
            (DataLoader(pairs(), 32, True, collate_fn=list), pairs(), {"collate_fn": doubled}),
        ],
    ):
        found = set()
        for data, heldout, more in alike:
            model, opt = linear()
            summary = kf.fit(model, data, opt, heldout=heldout, epochs=2, **more)  # type: ignore[arg-type]
            assert summary is not None
            found.add(tuple(summary[name] for name in ("steps", "batch_size", "params_sha256", "heldout_loss")))
        assert len(found) == 1


def test_what_a_data_loader_holds_is_taken_over() -> None:
    loader = DataLoader(pairs(), 9, True, num_workers=2, prefetch_factor=3, worker_init_fn=print)
    given = training_data(loader)
    assert isinstance(given.data, MapData) and given.data.dataset is loader.dataset
    assert given.of_loader == {"batch_size": 9, "num_workers": 2, "data_prefetch": 3}
    assert (given.worker_init_fn, given.remarks) == (print, [])
    unused: Any = {"drop_last": True, "generator": torch.Generator(), "num_workers": 1, "timeout": 5}
    remarks = training_data(DataLoader(pairs(), 9, True, **unused, multiprocessing_context="spawn")).remarks
    assert [remark.split()[1] for remark in remarks] == [
        "drop_last=True",
        "generator=",
        "timeout=",
        "multiprocessing_context=",
    ]
    stream = training_data(DataLoader(Rows(), 9))
    assert isinstance(stream.data, IterableStream) and "cannot seek" in stream.remarks[0]
    tensors = TensorDataset(torch.zeros(4, 3), torch.zeros(4))
    assert isinstance(training_data(DataLoader(tensors, 2, True)).data, TensorData)
    assert isinstance(training_data(DataLoader(tensors, 2, True, collate_fn=default_convert)).data, MapData)
    listed = training_data(DataLoader([torch.zeros(3), torch.ones(3)], 2, True)).data  # two samples
    assert listed.fetch(np.array([1, 0])).tolist() == [[1.0] * 3, [0.0] * 3]


class Pairs(DataLoader):
    def __iter__(self) -> Any:
        return iter(())


ORDER, OWN = r"DataLoader\(sampler=.*make it with shuffle=True", "makes its own batches"
WRONG: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (DataLoader(pairs(), 4), {}, DataError, ORDER),
    (DataLoader(pairs(), 4, sampler=RandomSampler(pairs(), num_samples=10)), {}, DataError, ORDER),
    (DataLoader(pairs(), 4, sampler=DistributedSampler(pairs(), 2, 0)), {}, DataError, ORDER),
    (DataLoader(pairs(), batch_sampler=BatchSampler(RandomSampler(pairs()), 4, False)), {}, DataError, OWN),
    (Pairs(pairs(), 4, shuffle=True), {}, DataError, "Pairs iterates in its own way"),
    (Rows(), {"epochs": 2, "steps": 5}, ValueError, "epochs=2"),
    ((torch.zeros(3, 3), torch.zeros(3)), {"collate_fn": list}, TypeError, "tuple with collate_fn= is not a data set"),
    (DataLoader(Rows(), 4, num_workers=2), {"steps": 3}, DataError, "num_workers=2 with Rows, which cannot"),
    (pairs(), {"heldout": Regression(9)}, DataError, "heldout=Regression: a stream has no length"),
    (pairs(), {"heldout": DataLoader(pairs(), sampler=DistributedSampler(pairs(), 2, 0))}, DataError, "heldout=DataL"),
]


def test_wrong_data_is_answered_in_one_line_before_training() -> None:
    for data, more, kind, said in WRONG:
        model, opt = linear()
        before = params_sha256(model)
        with pytest.raises(kind, match=said) as caught:
            kf.fit(model, data, opt, **more)
        assert "\n" not in str(caught.value)
        assert params_sha256(model) == before
