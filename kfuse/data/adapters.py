"""Turn what users have (tensors, torch data sets) into a `Dataset`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from kfuse.data.base import Dataset


class TensorData:
    """Samples held in two tensors with the same first dimension. No augmentation.

    Raises ValueError where the lengths differ or are zero.
    """

    def __init__(self, x: Tensor, y: Tensor) -> None:
        if x.ndim == 0 or y.ndim == 0 or len(x) != len(y) or len(x) == 0:
            raise ValueError(
                f"x of shape {tuple(x.shape)} and y of shape {tuple(y.shape)}: "
                "both need the same first dimension, at least 1"
            )
        self.x = x
        self.y = y

    def __len__(self) -> int:
        return len(self.x)

    def fetch(self, indices: np.ndarray, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Return `x[indices], y[indices]`."""
        rows = torch.as_tensor(indices, dtype=torch.int64, device=self.x.device)
        return self.x[rows], self.y[rows.to(self.y.device)]


class MapData:
    """A map-style data set (`len(d)`, `d[i] -> (x, y)`) whose samples are collated as a DataLoader would.

    Random transforms inside the data set may draw from the global generators of torch, numpy and random: the training
    loop seeds them for each micro-batch, so what is drawn does not depend on the worker that fetches it.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def fetch(self, indices: np.ndarray, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Return the collated samples. Raises TypeError where they are not pairs of tensors or numbers."""
        batch = default_collate([self.dataset[int(i)] for i in indices])
        if (
            not isinstance(batch, (tuple, list))
            or len(batch) != 2
            or not all(isinstance(part, Tensor) for part in batch)
        ):
            kind = type(self.dataset).__name__
            raise TypeError(f"a sample of {kind} is not an (input, target) pair of tensors or numbers")
        return batch[0], batch[1]


def as_dataset(obj: Any) -> Dataset:
    """Return `obj` as a `Dataset`: our own, a pair of tensors `(x, y)`, or a map-style data set.

    Raises TypeError, naming what is accepted, for anything else.
    """
    if isinstance(obj, Dataset):
        return obj
    if isinstance(obj, tuple) and len(obj) == 2 and all(isinstance(part, Tensor) for part in obj):
        return TensorData(*obj)
    if isinstance(obj, TensorDataset) and len(obj.tensors) == 2:
        return TensorData(*obj.tensors)
    indexable = hasattr(obj, "__getitem__") and hasattr(obj, "__len__")
    if indexable and not isinstance(obj, (str, bytes, Mapping, Tensor, np.ndarray, IterableDataset)):
        return MapData(obj)
    raise TypeError(
        f"{type(obj).__name__} is not a data set: pass a pair of tensors (x, y), a TensorDataset, a "
        "map-style data set (len(d), d[i] -> (x, y)), or an object with len(d), d.fetch(indices, generator)"
    )
