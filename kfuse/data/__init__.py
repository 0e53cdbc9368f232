"""Data sets, and which of their samples each step and worker uses."""

from kfuse.data.dataset import DataError, Dataset, DataSplit, MapData, TensorData, as_dataset
from kfuse.data.images import load_cifar10, load_digits, load_image_folder
from kfuse.data.sampler import EpochSampler, StreamSampler, micro_batch_sizes, worker_range
from kfuse.data.streams import IterableStream, Source, SourceStream, Stream, as_stream, place
from kfuse.data.text import load_text

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
