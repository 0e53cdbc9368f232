"""Data sets, and which of their samples each step and worker uses."""

import importlib
from typing import TYPE_CHECKING, Any

from kfuse.data.dataset import DataError as DataError
from kfuse.data.dataset import Dataset as Dataset
from kfuse.data.dataset import DataSplit as DataSplit
from kfuse.data.dataset import MapData as MapData
from kfuse.data.dataset import TensorData as TensorData
from kfuse.data.dataset import as_dataset as as_dataset
from kfuse.data.fetching import EpochSampler as EpochSampler
from kfuse.data.fetching import StreamSampler as StreamSampler
from kfuse.data.fetching import worker_range as worker_range
from kfuse.data.sources import Source as Source
from kfuse.data.sources import Stream as Stream
from kfuse.data.sources import place as place

if TYPE_CHECKING:
    from kfuse.data.builtin import load_cifar10 as load_cifar10
    from kfuse.data.builtin import load_digits as load_digits
    from kfuse.data.builtin import load_image_folder as load_image_folder
    from kfuse.data.builtin import load_text as load_text
    from kfuse.data.files import MDSSource as MDSSource
    from kfuse.data.files import ParquetSource as ParquetSource
    from kfuse.data.files import WebDatasetSource as WebDatasetSource
    from kfuse.data.hugging_face import load_hf as load_hf
    from kfuse.data.table import load_csv as load_csv


_MODULES = {"load_hf": "hugging_face", "load_csv": "table"}
_MODULES |= dict.fromkeys(("MDSSource", "ParquetSource", "WebDatasetSource"), "files")


def __getattr__(name: str) -> Any:
    """Imports the built-in data sets and sources when one is used."""
    if not name.startswith("load_") and name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"kfuse.data.{_MODULES.get(name, 'builtin')}"), name)
