"""What kf.fit and kf.DataLoader are given as data: a data set, a stream, or a torch DataLoader that is taken apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from kfuse.data.dataset import Collate, DataError, Dataset, as_dataset, is_map_style
from kfuse.data.streams import Stream, as_stream


@dataclass(frozen=True)
class TrainingData:
    """Data to train on, and the settings of the torch DataLoader that it came in."""

    data: Dataset | Stream
    batch_size: int = 32
    in_loader: bool = False
    """Whether it came in a torch DataLoader."""
    num_workers: int | None = None
    prefetch_factor: int | None = None
    pin_memory: bool | None = None
    worker_init_fn: Callable[[int], None] | None = None
    remarks: tuple[str, ...] = ()
    """What the user must know before training on it."""


def training_data(obj: Any, collate_fn: Collate | None = None) -> TrainingData:
    """Returns the data to train on: see `as_stream` and `as_dataset`, whose errors it raises.

    A torch DataLoader is taken apart. Its batch_size is the GLOBAL one: samples in a step of all workers together. Of
    its order only shuffle=True is accepted, which kfuse's own order by (seed, epoch) replaces. `collate_fn` is used
    instead of the loader's. Raises DataError, with the remedy, for a loader that makes its own batches or order.
    """
    if not isinstance(obj, DataLoader):
        return TrainingData(data := _data(obj, collate_fn), remarks=_warnings(data))
    _check_batches(obj)
    if not isinstance(obj.dataset, IterableDataset):
        _check_order(obj)
    remarks = []
    if obj.drop_last:
        remarks.append("DataLoader: drop_last=True is not used: the last step of an epoch takes the samples left over")
    if obj.generator is not None:
        remarks.append("DataLoader: generator= is not used: the order is drawn from seed=")
    data = _data(obj.dataset, collate_fn or _own_collate(obj))
    return TrainingData(
        data,
        obj.batch_size or 1,
        True,
        obj.num_workers,
        obj.prefetch_factor,
        obj.pin_memory,
        obj.worker_init_fn,
        (*remarks, *_warnings(data)),
    )


def heldout_data(obj: Any, collate_fn: Collate | None = None) -> Dataset:
    """Returns the data to evaluate on. Of a torch DataLoader: its data set and collate_fn, in whatever order.

    collate_fn: that of the data to train on, which makes the batches of a map-style data set here too.
    Raises DataError for a stream, which has no end, and as `training_data` does.
    """
    if isinstance(obj, DataLoader):
        _check_batches(obj)
        if not isinstance(obj.sampler, SequentialSampler | RandomSampler) and not isinstance(
            obj.dataset, IterableDataset
        ):
            raise DataError(f"heldout=DataLoader(sampler={type(obj.sampler).__name__}): make it without a sampler")
        obj, collate_fn = obj.dataset, collate_fn or _own_collate(obj)
    stream = as_stream(obj, collate_fn)
    if stream is not None:
        raise DataError(f"heldout={type(obj).__name__}: a stream has no length; pass a finite data set")
    return as_dataset(obj, collate_fn if is_map_style(obj) else None)


def number_of_samples(obj: Any, heldout: bool) -> int | None:
    """Returns how many samples the data have; None for a stream. Raises what `training_data` and `heldout_data` do."""
    data = heldout_data(obj) if heldout else training_data(obj).data
    return None if isinstance(data, Stream) else len(data)


def _data(obj: Any, collate_fn: Collate | None) -> Dataset | Stream:
    stream = as_stream(obj, collate_fn)
    return as_dataset(obj, collate_fn) if stream is None else stream


def _warnings(data: Dataset | Stream) -> tuple[str, ...]:
    return (data.warning,) if isinstance(data, Stream) and data.warning else ()


def _own_collate(loader: DataLoader[Any]) -> Collate | None:
    return None if loader.collate_fn is default_collate else loader.collate_fn


def _check_batches(loader: DataLoader[Any]) -> None:
    """Raises DataError for a DataLoader that makes its batches in its own way."""
    kind = type(loader)
    if any(base.__module__.partition(".")[0] == "accelerate" for base in kind.__mro__):
        raise DataError("a DataLoader prepared by Accelerate: pass the one that was given to accelerator.prepare()")
    if kind.__iter__ is not DataLoader.__iter__:
        raise DataError(f"{kind.__name__} iterates in its own way, which would not be used: pass its data set instead")
    if loader.batch_size is None:
        what = "batch_size=None" if loader.batch_sampler is None else "batch_sampler="
        raise DataError(f"DataLoader({what}) makes its own batches: give it a batch_size, and a data set of samples")


def _check_order(loader: DataLoader[Any]) -> None:
    """Raises DataError unless the order is that of shuffle=True."""
    sampler: Any = loader.sampler
    if type(sampler) is SequentialSampler:
        raise DataError(
            "DataLoader(shuffle=False): the order of training is drawn from (seed, epoch); make it with shuffle=True"
        )
    if type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(sampler.data_source):
        return
    remedy = "kfuse uses each sample once an epoch; make it with shuffle=True, of a torch Subset if some are left out"
    if isinstance(sampler, DistributedSampler):
        remedy = "kfuse distributes the samples over its workers; make it with shuffle=True instead"
    raise DataError(f"DataLoader(sampler={type(sampler).__name__}): {remedy}")
