"""What every data set here promises: a length, batches by index, and what a model may ask for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from kfuse.data.sampler import permutation


class DataError(ValueError):
    """The data cannot be used. The message is one line: what was wrong, and what is allowed."""


@runtime_checkable
class Dataset(Protocol):
    """A finite, indexable set of samples, fetched in batches."""

    def __len__(self) -> int:
        """The number of samples."""
        ...

    def fetch(self, indices: np.ndarray, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of the samples `indices` (int64 `[B]`), both with B as first dimension.

        With a (CPU) `generator`, random augmentation is drawn from it and from nothing else, so that the
        batch is a pure function of the indices and the generator's state. Without one there is none.
        """
        ...


@dataclass(frozen=True)
class DataSplit:
    """Samples to train on, samples held out, and what a model may ask for by name.

    Keys of `spec`: `input_shape` (tuple, without the batch dimension) and `num_classes` for images;
    `vocab_size` and `block_size` for text. A data set may add figures of its own.
    """

    train: Dataset
    heldout: Dataset
    spec: dict[str, Any] = field(default_factory=dict)


def split_indices(length: int, heldout: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Shuffle `0..length-1` with `seed` and hold out the fraction `heldout`, rounded up.

    Returns (train, heldout) indices, int64. Raises DataError when either would be empty.
    """
    if not 0.0 < heldout < 1.0:
        raise DataError(f"heldout={heldout}: must be above 0 and below 1")
    # The subtraction keeps a product such as 0.1 * 30 = 3.0000000000000004 from rounding up to 4.
    held = int(np.ceil(length * heldout - 1e-9))
    if held < 1 or held >= length:
        raise DataError(f"heldout={heldout}: must leave both parts at least one of {length} samples")
    order = permutation(length, seed)
    return order[held:], order[:held]


def read_bytes(path: Path) -> bytes:
    """Return a file's bytes. Raises DataError for a folder, and a missing, unreadable or empty file."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path} does not exist") from None
    except IsADirectoryError:
        raise DataError(f"{path} is a folder: it must be a file") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    if not data:
        raise DataError(f"{path} is empty")
    return data
