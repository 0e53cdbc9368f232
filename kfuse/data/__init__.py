"""Data sets, and which of their samples each step and worker uses.

The loaders (`load_digits`, ...) are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kfuse.data.dataset import DataError, Dataset, DataSplit, MapData, NestedData, TensorData, as_dataset
from kfuse.data.sampler import EpochSampler, StreamSampler, micro_batch_sizes, worker_range
from kfuse.data.streams import IterableStream, Source, SourceStream, Stream, as_stream, place

if TYPE_CHECKING:
    from kfuse.data.images import load_cifar10, load_digits, load_image_folder
    from kfuse.data.text import load_text

__all__ = [
    "DataError",
    "DataSplit",
    "Dataset",
    "EpochSampler",
    "IterableStream",
    "MapData",
    "NestedData",
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
    if name in __all__:
        return getattr(import_module(f"kfuse.data.{'text' if name == 'load_text' else 'images'}"), name)
    raise AttributeError(f"module {__name__} has no attribute {name}")


def __dir__() -> list[str]:
    return __all__
