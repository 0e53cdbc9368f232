"""Data sets, and which of their samples each step and worker uses."""

from kfuse.data.adapters import MapData, TensorData, as_dataset
from kfuse.data.base import DataError, Dataset, DataSplit
from kfuse.data.cifar10 import load_cifar10
from kfuse.data.digits import load_digits
from kfuse.data.image_folder import load_image_folder
from kfuse.data.sampler import EpochSampler, micro_batch_sizes, worker_range
from kfuse.data.text import load_text

__all__ = [
    "DataError",
    "DataSplit",
    "Dataset",
    "EpochSampler",
    "MapData",
    "TensorData",
    "as_dataset",
    "load_cifar10",
    "load_digits",
    "load_image_folder",
    "load_text",
    "micro_batch_sizes",
    "worker_range",
]
