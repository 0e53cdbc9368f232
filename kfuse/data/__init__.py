"""Data sets, and which of their samples each step and worker uses."""

import importlib
from typing import TYPE_CHECKING, Any

from kfuse.data.dataset import DataError, Dataset, DataSplit, MapData, TensorData, as_dataset
from kfuse.data.fetching import EpochSampler, StreamSampler, micro_batch_sizes, worker_range
from kfuse.data.sources import IterableStream, Source, SourceStream, Stream, as_stream, place

if TYPE_CHECKING:
    from kfuse.data.images import load_cifar10, load_digits, load_image_folder
    from kfuse.data.text import load_text

_WHEN_USED = {"load_cifar10": "images", "load_digits": "images", "load_image_folder": "images", "load_text": "text"}

__all__ = [
    "DataError",
    "DataSplit",
    "Dataset",
    "EpochSampler",
    "IterableStream",
    "MapData",
    "Source",
    "SourceStream",
    "Stream",
    "StreamSampler",
    "TensorData",
    "as_dataset",
    "as_stream",
    "load_cifar10",
    "load_digits",
    "load_image_folder",
    "load_text",
    "micro_batch_sizes",
    "place",
    "worker_range",
]


def __getattr__(name: str) -> Any:
    """Imports a built-in data set when it is used."""
    if name not in _WHEN_USED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHEN_USED[name]}"), name)
