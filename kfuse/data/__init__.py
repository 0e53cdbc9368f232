"""Data sets, and which of their samples each step and worker uses."""

import importlib
from typing import TYPE_CHECKING, Any

from kfuse.data.dataset import DataError, Dataset, DataSplit, MapData, TensorData, as_dataset
from kfuse.data.fetching import EpochSampler, StreamSampler, worker_range
from kfuse.data.sources import Source, Stream, place

if TYPE_CHECKING:
    from kfuse.data.builtin import load_cifar10, load_digits, load_image_folder, load_text
    from kfuse.data.files import MDSSource, ParquetSource, WebDatasetSource
    from kfuse.data.hugging_face import load_hf
    from kfuse.data.table import load_csv

__all__ = [
    "DataError",
    "DataSplit",
    "Dataset",
    "EpochSampler",
    "MDSSource",
    "MapData",
    "ParquetSource",
    "Source",
    "Stream",
    "StreamSampler",
    "TensorData",
    "WebDatasetSource",
    "as_dataset",
    "load_cifar10",
    "load_csv",
    "load_digits",
    "load_hf",
    "load_image_folder",
    "load_text",
    "place",
    "worker_range",
]


_MODULES = {"load_hf": "hugging_face", "load_csv": "table"}
_MODULES |= dict.fromkeys(("MDSSource", "ParquetSource", "WebDatasetSource"), "files")


def __getattr__(name: str) -> Any:
    """Imports the built-in data sets and sources when one is used."""
    if not name.startswith("load_") and name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"kfuse.data.{_MODULES.get(name, 'builtin')}"), name)
