"""scikit-learn's handwritten digits: 1797 images of 8x8, in the package itself, so nothing is downloaded."""

from __future__ import annotations

import importlib

import torch

from kfuse.data.adapters import TensorData
from kfuse.data.base import DataError, DataSplit, split_indices


def load_digits(heldout: float = 0.2, split_seed: int = 0) -> DataSplit:
    """Return the digits, pixels X/16 as float32 `[B, 1, 8, 8]` and targets int64 `[B]` in 0..9.

    The fraction `heldout` (360 of 1797 samples by default) is chosen by a shuffle with `split_seed`, which is
    apart from the training seed so that runs with different seeds are evaluated on the same samples.
    Raises DataError where scikit-learn is missing.
    """
    try:
        datasets = importlib.import_module("sklearn.datasets")
    except ImportError as error:
        raise DataError(f"data=digits needs scikit-learn (pip install scikit-learn): {error}") from error
    bunch = datasets.load_digits()
    x = torch.from_numpy(bunch.images).to(torch.float32).div_(16.0).unsqueeze(1)
    y = torch.from_numpy(bunch.target).to(torch.int64)
    train, held = (torch.from_numpy(part) for part in split_indices(len(x), heldout, split_seed))
    return DataSplit(
        TensorData(x[train], y[train]),
        TensorData(x[held], y[held]),
        {"input_shape": (1, 8, 8), "num_classes": 10},
    )
