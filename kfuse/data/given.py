"""What kf.fit and kf.DataLoader are given as data: a data set, a stream, or a torch DataLoader that is taken apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, TensorDataset, default_collate

from kfuse.data.dataset import Collate, DataError, Dataset, MapData, as_dataset, is_map_style
from kfuse.data.streams import Stream, as_stream, check_loaders


@dataclass(frozen=True)
class TrainingData:
    """Data to train on, and how it is to be loaded."""

    data: Dataset | Stream
    worker_init_fn: Callable[[int], object] | None
    of_loader: dict[str, Any]
    """The settings that a torch DataLoader has, by name: used where a script does not give others."""
    remarks: tuple[str, ...]
    """What the user must know before training on it."""


def training_data(
    obj: Any, collate_fn: Collate | None = None, worker_init_fn: Callable[[int], object] | None = None
) -> TrainingData:
    """Returns the data to train on: see `as_stream` and `as_dataset`, whose errors it raises.

    A torch DataLoader is taken apart: arguments that are None are its own. Its batch_size is the GLOBAL one: samples in
    a step of all workers together. Of its order only shuffle=True is accepted, which kfuse's own order by (seed, epoch)
    replaces. Raises DataError, with the remedy, for a loader that makes its own batches or order.
    """
    if not isinstance(obj, DataLoader):
        data = as_stream(obj, collate_fn) or as_dataset(obj, collate_fn)
        return TrainingData(data, worker_init_fn, {}, _warnings(data))
    data = _of_loader(obj, collate_fn)
    if not isinstance(data, Stream):
        _check_order(obj)
    ignored = {"drop_last=True": obj.drop_last, "generator=": obj.generator is not None}
    remarks = [f"DataLoader: {argument} is not used" for argument, given in ignored.items() if given]
    settings = {
        "batch_size": obj.batch_size,
        "data_workers": obj.num_workers,
        "data_prefetch": obj.prefetch_factor or 2,
    }
    return TrainingData(data, worker_init_fn or obj.worker_init_fn, settings, (*remarks, *_warnings(data)))


def _warnings(data: Dataset | Stream) -> tuple[str, ...]:
    return (data.warning,) if isinstance(data, Stream) and data.warning else ()


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
    if collate_fn is None and isinstance(dataset, TensorDataset):
        return as_dataset(dataset)
    return as_stream(dataset, collate_fn) or MapData(dataset, collate_fn)


def _check_order(loader: DataLoader[Any]) -> None:
    """Raises DataError unless the order is that of shuffle=True."""
    sampler: Any = loader.sampler
    data: Any = loader.dataset
    if type(sampler) is not RandomSampler or sampler.replacement or len(sampler) != len(data):
        raise DataError(
            f"DataLoader(sampler={type(sampler).__name__}): kfuse uses each sample once an epoch, in an order of its "
            "own, on all workers; make it with shuffle=True, of a torch Subset if some are left out"
        )
