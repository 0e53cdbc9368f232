"""What a data set is here, and how tensors, arrays and torch's data sets become one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset, default_collate


class DataError(ValueError):
    """The data cannot be used. The message is one line: what was wrong, and what it must be."""


@runtime_checkable
class Dataset(Protocol):
    """A finite, indexable set of samples, fetched in batches."""

    def __len__(self) -> int:
        """The number of samples."""
        ...

    def fetch(self, indices: np.ndarray, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets of the samples `indices` (int64 `[B]`), both with B as first dimension.

        generator: on the CPU. Random augmentation draws from it and from nothing else, so that the batch is a pure
        function of the indices and the generator's state. None: no augmentation.
        """
        ...


@dataclass(frozen=True)
class DataSplit:
    """Samples to train on, samples held out for evaluation, and what a model's constructor may need of them."""

    train: Dataset
    heldout: Dataset
    spec: dict[str, Any] = field(default_factory=dict)
    """By name: `input_shape` (tuple, without the batch dimension) and `num_classes` for images; `vocab_size` and
    `block_size` for text. A data set may add figures of its own."""


class TensorData:
    """Samples held in two tensors with the same first dimension. No augmentation.

    Raises ValueError where the lengths differ or are zero.
    """

    def __init__(self, x: Tensor, y: Tensor) -> None:
        if x.ndim == 0 or y.ndim == 0 or len(x) != len(y) or len(x) == 0:
            raise ValueError(
                f"x of shape {tuple(x.shape)} and y of shape {tuple(y.shape)}: "
                "must have the same first dimension, at least 1"
            )
        self.x, self.y = x, y

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.x)

    def fetch(self, indices: np.ndarray, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Returns `x[indices], y[indices]`."""
        rows = torch.as_tensor(indices, dtype=torch.int64, device=self.x.device)
        return self.x.index_select(0, rows), self.y.index_select(0, rows.to(self.y.device))


class MapData:
    """A map-style data set (`len(d)`, `d[i] -> (x, y)`) whose samples are collated as a DataLoader would.

    Random transforms inside the data set may draw from the global generators of torch, numpy and random: the training
    loop seeds them for each sample, so what is drawn does not depend on the worker that fetches it.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.dataset)

    def fetch(
        self,
        indices: np.ndarray,
        generator: torch.Generator | None = None,
        before_sample: Callable[[int], None] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the collated samples. before_sample: called with each index before its sample is taken.

        Raises TypeError where they are not pairs of tensors or numbers.
        """
        samples = []
        for i in indices.tolist():
            if before_sample is not None:
                before_sample(i)
            samples.append(self.dataset[i])
        batch = default_collate(samples)
        is_pair = isinstance(batch, (tuple, list)) and len(batch) == 2
        if not is_pair or not all(isinstance(part, Tensor) for part in batch):
            kind = type(self.dataset).__name__
            raise TypeError(f"a sample of {kind} is not an (input, target) pair of tensors or numbers")
        return batch[0], batch[1]


def as_dataset(obj: Any) -> Dataset:
    """Returns `obj` as a `Dataset`: our own, a pair (x, y) of tensors or NumPy arrays, or a map-style data set.

    A pair is a tuple or a list. Of arrays, floats become torch's default dtype (float32, as models' parameters are)
    and integer targets int64, as losses take them; both are copied. Tensors are taken as they are.
    Raises TypeError, which names what is accepted, for anything else, and ValueError for parts of different lengths.
    """
    if isinstance(obj, Dataset):
        return obj
    if isinstance(obj, (tuple, list)) and obj and all(isinstance(part, (Tensor, np.ndarray)) for part in obj):
        if len(obj) != 2:
            raise TypeError(f"{type(obj).__name__} of {len(obj)} tensors or arrays: a pair (x, y) has two")
        return TensorData(_as_tensor(obj[0]), _as_tensor(obj[1], target=True))
    if isinstance(obj, TensorDataset) and len(obj.tensors) == 2:
        return TensorData(*obj.tensors)
    indexable = hasattr(obj, "__getitem__") and hasattr(obj, "__len__")
    if indexable and not isinstance(obj, (str, bytes, Mapping, Tensor, np.ndarray, IterableDataset)):
        return MapData(obj)
    raise TypeError(
        f"{type(obj).__name__} is not a data set: pass a pair of tensors (x, y), a TensorDataset, a "
        "map-style data set (len(d), d[i] -> (x, y)), or an object with len(d), d.fetch(indices, generator)"
    )


def _as_tensor(part: Tensor | np.ndarray, target: bool = False) -> Tensor:
    if isinstance(part, Tensor):
        return part
    part = np.ascontiguousarray(part)  # torch has no negative strides
    if np.issubdtype(part.dtype, np.floating):
        return torch.tensor(part, dtype=torch.get_default_dtype())
    if target and np.issubdtype(part.dtype, np.integer):
        return torch.tensor(part.astype(np.int64))
    try:
        return torch.tensor(part)
    except TypeError:
        raise TypeError(f"an array of dtype {part.dtype}: must be of numbers or bool") from None
