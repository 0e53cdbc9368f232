"""What several loaders of data sets need: held-out samples and files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kfuse.data.dataset import DataError
from kfuse.data.sampler import permutation


def check_heldout(heldout: float) -> None:
    """Raises DataError unless `heldout` can be a fraction of the data."""
    if not 0.0 < heldout < 1.0:
        raise DataError(f"heldout={heldout}: must be above 0 and below 1")


def split_indices(length: int, heldout: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Shuffles `0..length-1` with `seed` and holds out the fraction `heldout`, rounded up.

    Returns (train, heldout) indices, int64. Raises DataError where either would be empty.
    """
    check_heldout(heldout)
    # The subtraction keeps a product such as 0.1 * 30 = 3.0000000000000004 from rounding up to 4.
    held = int(np.ceil(length * heldout - 1e-9))
    if held < 1 or held >= length:
        raise DataError(f"heldout={heldout}: must leave both parts at least one of {length} samples")
    order = permutation(length, seed)
    return order[held:], order[:held]


def read_bytes(path: Path) -> bytes:
    """Returns a file's bytes. Raises DataError for a folder, and a missing, unreadable or empty file."""
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
