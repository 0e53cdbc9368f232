"""What kf.fit and kf.DataLoader are given as data: a data set, a stream, or a torch DataLoader that is taken apart.

The samples of a stream are numbered 0, 1, 2, ... A step takes the next numbers, whatever the batch size and the number
of workers are. Which sample a number means depends on the stream alone, so each number is used exactly once, through
any resize, loss of a worker or resume.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from kfuse.data.dataset import Collate, DataError, Dataset, MapData, as_dataset, collate, is_map_style

_MOST_OPEN = 128  # iterators a process keeps open: each may hold a file
_END = object()
BeforeSample = Callable[[int], None]


class Source(ABC):
    """A stream that can be read from any place: some shards (files, say), each a fixed sequence of samples.

    Number i of the run is the sample at `place(i, shards, block)`: blocks of `block` samples are taken from the shards
    in turn. A shard that ends starts over; with `lengths` it is left out until all samples have come once
    (`Epochs.place`). Nothing is shuffled.

    A worker reads on, and seldom seeks, where `block` is the micro-batch's size and `shards` is a multiple of the
    micro-batches in a step.
    """

    shards: int  # at least 1; the same during the whole run
    block: int = 16
    lengths: Sequence[int] | None = None  # samples of each shard, where they are known; some may be 0

    @abstractmethod
    def open(self, shard: int, position: int) -> Iterator[Any]:
        """Returns an iterator over the samples of `shard` from number `position` (from 0) to the shard's end.

        Nothing at all where the shard has no such sample: unknown lengths are found in this way. The same arguments
        must give the same samples in every process, at any time. Random transforms may draw from the global generators
        of torch, numpy and random, which are seeded for each sample by its number. Opening a shard must not draw.
        """


def place(number: int, shards: int, block: int = Source.block) -> tuple[int, int]:
    """Returns (shard, position) of sample `number` of a run. A position counts on where the shard starts over.

    In a shard of n samples it is sample `position % n`.
    """
    turn, offset = divmod(number, block)
    round_, shard = divmod(turn, shards)
    return shard, round_ * block + offset


class Stream(ABC):
    """Samples by their number, collated into batches. It has no length: training on it has no epochs."""

    def __init__(self, dataset: Any, collate_fn: Collate | None = None) -> None:
        self.dataset, self.collate_fn, self._name = dataset, collate_fn, type(dataset).__name__

    def fetch(self, indices: np.ndarray, before_sample: BeforeSample = lambda number: None) -> Any:
        """Returns the samples of these numbers (int64 `[B]`), collated. Raises DataError where there is no sample.

        before_sample: called with the number of each sample before it is read, also of those that are skipped.
        """
        return collate([self.sample(number, before_sample) for number in indices.tolist()], self.collate_fn)

    @abstractmethod
    def sample(self, number: int, before_sample: BeforeSample) -> Any:
        """Returns the sample of this number."""


@dataclass
class _Reader:
    iterator: Iterator[Any]
    start: int  # where it was opened
    position: int  # the sample that comes next


class SourceStream(Stream):
    """The samples of a `Source`. It can be read in any process, from any number on."""

    def __init__(self, source: Source, collate_fn: Collate | None = None) -> None:
        """Reads the first sample. Raises DataError for an empty source, shards or blocks below 1, and wrong lengths."""
        super().__init__(source, collate_fn)
        self._shards, block, lengths = source.shards, source.block, source.lengths
        if min(self._shards, block) < 1:
            raise DataError(f"{self._name}: shards={self._shards}, block={block}: must be at least 1")
        self._place: Callable[[int], tuple[int, int]] = partial(place, shards=self._shards, block=block)
        if lengths is not None:
            if len(lengths) != self._shards or min(lengths) < 0 or max(lengths) == 0:
                allowed = f"must be {self._shards} numbers, one for each shard, from 0, and not all 0"
                raise DataError(f"{self._name}: lengths={list(lengths)[:9]}: {allowed}")
            from kfuse.data.epochs import Epochs  # few streams know them

            self._place = Epochs(lengths, block).place
        self._readers: OrderedDict[int, _Reader] = OrderedDict()  # by shard; the one used last at the end
        self._lengths: dict[int, int] = {}  # by shard, of those whose end was seen
        if not self._has(*(first := self._place(0))):
            raise self._without_samples(first[0])

    def sample(self, number: int, before_sample: BeforeSample) -> Any:
        """Reads on in the sample's shard, or opens it at the place."""
        shard, position = self._place(number)
        position %= self._lengths.get(shard, position + 1)
        reader = self._readers.pop(shard, None)
        if reader is None or reader.position != position:
            reader = _Reader(self.dataset.open(shard, position), position, position)
        before_sample(number)
        sample = next(reader.iterator, _END)
        if sample is _END and self.dataset.lengths is not None:
            raise DataError(f"{self._name}: shard {shard} has no sample {position}: fewer than its length says")
        if sample is _END:  # the shard starts over
            self._lengths[shard] = self._find_length(shard, reader)
            return self.sample(number, before_sample)
        reader.position += 1
        self._readers[shard] = reader
        if len(self._readers) > _MOST_OPEN:
            self._readers.popitem(last=False)
        return sample

    def _find_length(self, shard: int, reader: _Reader) -> int:
        """Returns the number of samples of a shard that has none at the reader's position."""
        if reader.position > reader.start:  # the one before was there
            return reader.position
        length = bisect_left(range(reader.position), True, key=lambda position: not self._has(shard, position))
        if length == 0:
            raise self._without_samples(shard)
        return length

    def _has(self, shard: int, position: int) -> bool:
        return next(self.dataset.open(shard, position), _END) is not _END

    def _without_samples(self, shard: int) -> DataError:
        return DataError(f"{self._name}: shard {shard} gave no sample: each of {self._shards} must have one")


class IterableStream(Stream):
    """The samples of a torch `IterableDataset`, which can only be read from its start.

    Number i is the i-th sample that iterating yields; where the iteration ends, another begins. That is exact only
    where each iteration over the data set, in any process, yields the same samples, but for random numbers of the
    global generators of torch, numpy and random: those are seeded by the sample's number. A data set must not take its
    share by a rank; `torch.utils.data.get_worker_info()` says that there is one worker.
    """

    _reader: _Reader | None = None  # None: the start comes next

    def sample(self, number: int, before_sample: BeforeSample) -> Any:
        """Reads all samples that come before it."""
        reader, self._reader = self._reader, None  # if reading fails, the next call starts anew
        if reader is None or number < reader.position:
            before_sample(0)
            reader = _Reader(iter(self.dataset), 0, 0)
        for _ in range(reader.position, number):
            self._read(reader, before_sample)
        sample = self._read(reader, before_sample)
        self._reader = reader
        return sample

    def _read(self, reader: _Reader, before_sample: BeforeSample) -> Any:
        before_sample(reader.position)
        sample = next(reader.iterator, _END)
        if sample is _END:  # it starts over
            before_sample(reader.position)
            reader.iterator = iter(self.dataset)
            sample = next(reader.iterator, _END)
            if sample is _END:
                raise DataError(f"{self._name}: an iteration gave no sample, after {reader.position} of those before")
        reader.position += 1
        return sample


def as_stream(obj: Any, collate_fn: Collate | None = None) -> Stream | None:
    """Returns a stream over a `Source` or a torch `IterableDataset`; None for anything else. Raises DataError."""
    if isinstance(obj, Stream):
        return obj
    if isinstance(obj, Source):
        return SourceStream(obj, collate_fn)
    return IterableStream(obj, collate_fn) if isinstance(obj, IterableDataset) else None


def check_loaders(data: Any, number: int) -> None:
    """Raises DataError for so many loader processes, each of which would read the whole of a stream without seeking."""
    if isinstance(data, IterableStream) and number > 1:
        kind = type(data.dataset).__name__
        raise DataError(f"num_workers={number} with {kind}, which cannot seek: must be 0 or 1")


@dataclass(frozen=True)
class TrainingData:
    data: Dataset | Stream
    worker_init_fn: Callable[[int], object] | None
    of_loader: dict[str, Any]  # a torch DataLoader's settings, by name: used where a script does not give others
    remarks: list[str]  # what the user must know before training on it


def training_data(
    obj: Any, collate_fn: Collate | None = None, worker_init_fn: Callable[[int], object] | None = None
) -> TrainingData:
    """Returns the data to train on: see `as_stream` and `as_dataset`, whose errors it raises.

    A torch DataLoader is taken apart: arguments that are None are its own. Its batch_size is the GLOBAL one: samples in
    a step of all workers together. Of its order only shuffle=True is accepted, which kfuse's own order by (seed, epoch)
    replaces. Raises DataError, with the remedy, for a loader that makes its own batches or order.
    """
    data: Dataset | Stream
    of_loader: dict[str, Any] = {}
    remarks: list[str] = []
    if isinstance(obj, DataLoader):
        data = _of_loader(obj, collate_fn)
        if not isinstance(data, Stream):
            _check_order(obj)
        worker_init_fn = worker_init_fn or obj.worker_init_fn
        of_loader = {"batch_size": obj.batch_size, "num_workers": obj.num_workers}
        of_loader["data_prefetch"] = obj.prefetch_factor or 2
        ignored = {"drop_last=True": obj.drop_last, "generator=": obj.generator is not None, "timeout=": obj.timeout}
        ignored["multiprocessing_context="] = obj.multiprocessing_context is not None
        remarks = [f"DataLoader: {argument} is not used" for argument, given in ignored.items() if given]
    else:
        data = as_stream(obj, collate_fn) or as_dataset(obj, collate_fn)
    if isinstance(data, IterableStream):
        remarks.append(
            f"{type(data.dataset).__name__} cannot seek: each worker reads the whole stream and skips what others "
            "take, and reads again from the start after a resume or a lost worker; every iteration must yield the same "
            "samples. A kfuse.data.Source (shards, open(shard, position)) needs none of this"
        )
    return TrainingData(data, worker_init_fn, of_loader, remarks)


def heldout_data(obj: Any, collate_fn: Collate | None = None) -> Dataset:
    """Returns the data to evaluate on. Of a torch DataLoader: its data set and collate_fn, in whatever order.

    collate_fn: that of the data to train on, which makes the batches of a map-style data set here too.
    Raises DataError for a stream, which has no end, and as `training_data` does.
    """
    if isinstance(obj, DataLoader):
        data = _of_loader(obj, collate_fn)
        if not isinstance(data, Stream) and not isinstance(obj.sampler, SequentialSampler | RandomSampler):
            raise DataError(f"heldout=DataLoader(sampler={type(obj.sampler).__name__}): make it without a sampler")
    else:
        data = as_stream(obj, collate_fn) or as_dataset(obj, collate_fn if is_map_style(obj) else None)
    if isinstance(data, Stream):
        raise DataError(f"heldout={type(data.dataset).__name__}: a stream has no length; pass a finite data set")
    return data


def number_of_samples(obj: Any, heldout: bool, loaders: int) -> int | None:
    """Returns how many samples the data have; None for a stream. Raises what `training_data` and `heldout_data` do.

    loaders: how many loader processes are to read them.
    """
    data = heldout_data(obj) if heldout else training_data(obj).data
    check_loaders(data, loaders)
    return None if isinstance(data, Stream) else len(data)


def _of_loader(loader: DataLoader[Any], collate_fn: Collate | None) -> Dataset | Stream:
    """Returns a loader's data set, whose samples it takes one by one: a list of two tensors, too, is two samples.

    Raises DataError for a loader that makes its batches in its own way.
    """
    kind, dataset = type(loader), loader.dataset
    if kind.__iter__ is not DataLoader.__iter__:
        raise DataError(f"{kind.__name__} iterates in its own way, which would not be used: pass its data set instead")
    if loader.batch_size is None:
        raise DataError("DataLoader(batch_size=None or batch_sampler=) makes its own batches: give it a batch_size")
    if collate_fn is None and loader.collate_fn is not default_collate:
        collate_fn = loader.collate_fn
    if collate_fn is None and isinstance(dataset, Subset | TensorDataset):
        return as_dataset(dataset)
    return as_stream(dataset, collate_fn) or MapData(dataset, collate_fn)


def _check_order(loader: DataLoader[Any]) -> None:
    """Raises DataError unless the order is that of shuffle=True."""
    sampler: Any = loader.sampler
    data: Any = loader.dataset
    if type(sampler) is not RandomSampler or sampler.replacement or len(sampler) != len(data):
        raise DataError(
            f"DataLoader(sampler={type(sampler).__name__}): kfuse uses each sample once an epoch, in an order of its "
            "own, on all workers; make it with shuffle=True, of a torch Subset if some are left out. For another order "
            "give a subclass of kfuse.data.MapData with a method order(epoch) (docs/data.md) in place of the DataLoader"
        )
