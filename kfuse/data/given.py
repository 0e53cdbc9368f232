"""What kf.fit and kf.DataLoader are given as data: a data set, a stream, or a torch DataLoader that is taken apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from kfuse.data.dataset import Collate, DataError, Dataset, MapData, as_dataset, is_map_style
from kfuse.data.streams import Stream, as_stream


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
    replaces. Raises DataError, with the remedy, for a loader that makes its own batches or order, TypeError for a
    worker_init_fn that is none.
    """
    if worker_init_fn is not None and not callable(worker_init_fn):
        raise TypeError(f"worker_init_fn={worker_init_fn!r}: must be a function of the loader process's number")
    if not isinstance(obj, DataLoader):
        data = as_stream(obj, collate_fn) or as_dataset(obj, collate_fn)
        return TrainingData(data, worker_init_fn, {}, _warnings(data))
    _check_batches(obj)
    data = _of_loader(obj, collate_fn)
    if not isinstance(data, Stream):
        _check_order(obj)
    remarks: list[str] = []
    if obj.drop_last:
        remarks.append("DataLoader: drop_last=True is not used: an epoch's last step takes the samples left over")
    if obj.generator is not None:
        remarks.append("DataLoader: generator= is not used: the order is drawn from seed=")
    settings = {
        "batch_size": obj.batch_size,
        "data_workers": obj.num_workers,
        "data_prefetch": obj.prefetch_factor or 2,
        "data_pin_memory": obj.pin_memory,
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
        _check_batches(obj)
        data = _of_loader(obj, collate_fn)
        if not isinstance(data, Stream) and not isinstance(obj.sampler, SequentialSampler | RandomSampler):
            raise DataError(f"heldout=DataLoader(sampler={type(obj.sampler).__name__}): make it without a sampler")
    else:
        data = as_stream(obj, collate_fn) or as_dataset(obj, collate_fn if is_map_style(obj) else None)
    if isinstance(data, Stream):
        raise DataError(f"heldout={type(data.dataset).__name__}: a stream has no length; pass a finite data set")
    return data


def number_of_samples(obj: Any, heldout: bool, num_workers: int) -> int | None:
    """Returns how many samples the data have; None for a stream. Raises what `training_data` and `heldout_data` do."""
    data = heldout_data(obj) if heldout else training_data(obj).data
    if not isinstance(data, Stream):
        return len(data)
    data.check_workers(num_workers)
    return None


def _of_loader(loader: DataLoader[Any], collate_fn: Collate | None) -> Dataset | Stream:
    """A loader's data set, whose samples it takes one by one: a list of two tensors, too, is two samples."""
    dataset: Any = loader.dataset
    if collate_fn is None and loader.collate_fn is not default_collate:
        collate_fn = loader.collate_fn
    if collate_fn is None and isinstance(dataset, TensorDataset):
        return as_dataset(dataset)
    return as_stream(dataset, collate_fn) or MapData(dataset, collate_fn)


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
    data: Any = loader.dataset
    if type(sampler) is SequentialSampler:
        raise DataError(
            "DataLoader(shuffle=False): the order of training is drawn from (seed, epoch); make it with shuffle=True"
        )
    if type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(data):
        return
    remedy = "kfuse uses each sample once an epoch; make it with shuffle=True, of a torch Subset if some are left out"
    if isinstance(sampler, DistributedSampler):
        remedy = "kfuse distributes the samples over its workers; make it with shuffle=True instead"
    raise DataError(f"DataLoader(sampler={type(sampler).__name__}): {remedy}")
