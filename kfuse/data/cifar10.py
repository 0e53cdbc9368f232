"""CIFAR-10 (Krizhevsky 2009) from a local folder, in the published binary or Python format."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kfuse.data.base import DataError, DataSplit, read_bytes

PIXELS = 3 * 32 * 32
SUBFOLDERS = (".", "cifar-10-batches-bin", "cifar-10-batches-py")
TRAIN_FILES = tuple(f"data_batch_{i}" for i in range(1, 6))
TEST_FILE = "test_batch"
# Mean and standard deviation of the training set's pixels, by channel, for pixels in 0..1.
MEAN = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
STD = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)


class Cifar10:
    """Images uint8 `[N, 3, 32, 32]` and labels int64 `[N]`; batches are normalised float32.

    With a generator and `augment`, each image is shifted by up to 4 pixels, with black moving in (a random
    crop after padding), and mirrored with probability 1/2.
    """

    def __init__(self, images: Tensor, labels: Tensor, augment: bool) -> None:
        self.images = images
        self.labels = labels
        self.augment = augment

    def __len__(self) -> int:
        return len(self.images)

    def fetch(self, indices: np.ndarray, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Return images float32 `[B, 3, 32, 32]` and labels int64 `[B]`."""
        rows = torch.as_tensor(indices, dtype=torch.int64)
        images = self.images[rows]
        if self.augment and generator is not None:
            images = crop_and_flip(images, generator)
        return (images.float() / 255.0 - MEAN) / STD, self.labels[rows]


def crop_and_flip(images: Tensor, generator: torch.Generator, padding: int = 4) -> Tensor:
    """Crop each image at random from its zero-padded self, and mirror it with probability 1/2.

    `[B, C, H, W]` to the same shape and dtype.
    """
    batch, channels, height, width = images.shape
    corner = torch.randint(0, 2 * padding + 1, (batch, 2), generator=generator)
    flip = torch.randint(0, 2, (batch, 1), generator=generator, dtype=torch.bool)
    rows = corner[:, :1] + torch.arange(height)
    columns = corner[:, 1:] + torch.arange(width)
    columns = torch.where(flip, columns.flip(1), columns)
    padded = torch.nn.functional.pad(images, (padding,) * 4)
    sample = torch.arange(batch).view(-1, 1, 1, 1)
    channel = torch.arange(channels).view(1, -1, 1, 1)
    return padded[sample, channel, rows[:, None, :, None], columns[:, None, None, :]]


def load_cifar10(path: str | os.PathLike[str] | None = None, augment: bool = True) -> DataSplit:
    """Return CIFAR-10, held out: its test batch. `path` is its folder or the one it was unpacked in.

    Takes the binary version (data_batch_1.bin ... test_batch.bin) or the Python version (data_batch_1 ...
    test_batch), which is unpickled without running anything a file asks for. Nothing is downloaded.
    Raises DataError for files that are missing, cut short or not in the format.
    """
    if path is None:
        raise DataError("data=cifar10 needs data.path=FOLDER: the published binary or Python version")
    folder, suffix = find_batches(Path(path).expanduser())
    read = read_binary if suffix else read_pickle
    batches = [read(folder / (name + suffix)) for name in (*TRAIN_FILES, TEST_FILE)]
    return DataSplit(
        Cifar10(*join(batches[:-1]), augment),
        Cifar10(*join(batches[-1:]), augment=False),
        {"input_shape": (3, 32, 32), "num_classes": 10},
    )


def join(batches: list[tuple[np.ndarray, np.ndarray]]) -> tuple[Tensor, Tensor]:
    """Return the images and the labels of all batches, copied out of the files' bytes."""
    images, labels = zip(*batches, strict=True)
    return torch.from_numpy(np.concatenate(images)), torch.from_numpy(np.concatenate(labels))


def find_batches(root: Path) -> tuple[Path, str]:
    """Return the folder that holds the batches and their suffix, ".bin" or "" (the Python version)."""
    if not os.path.isdir(root):
        raise DataError(f"{root} is not a folder: data.path must name the folder of CIFAR-10's files")
    for folder in (root / name for name in SUBFOLDERS):
        for suffix in (".bin", ""):
            names = [name + suffix for name in (*TRAIN_FILES, TEST_FILE)]
            missing = [name for name in names if not os.path.isfile(folder / name)]
            if not missing:
                return folder, suffix
            if len(missing) < len(names):
                raise DataError(f"{folder} has only a part of CIFAR-10: {', '.join(missing)} missing")
    raise DataError(
        f"{root} has no CIFAR-10 in it: data_batch_1.bin (binary version) or data_batch_1 (Python version) "
        f"must be there or in its {SUBFOLDERS[1]} or {SUBFOLDERS[2]}"
    )


def read_binary(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read records of one label byte and 3072 pixel bytes.

    Returns images uint8 `[N, 3, 32, 32]` and labels int64 `[N]`.
    """
    data = np.frombuffer(read_bytes(path), dtype=np.uint8)
    if len(data) % (PIXELS + 1) != 0:
        raise DataError(f"{path} has {len(data)} bytes: it must be whole records of {PIXELS + 1} bytes")
    records = data.reshape(-1, PIXELS + 1)
    return check_batch(path, records[:, 1:], records[:, 0])


def read_pickle(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read a pickled dict with `data` (uint8 `[N, 3072]`) and `labels`; returns the same as `read_binary`."""
    content = read_bytes(path)
    try:
        batch = ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
        pixels, labels = np.asarray(batch[b"data"]), np.asarray(batch[b"labels"])
    # A damaged pickle may raise anything: its bytes are instructions.
    except Exception as error:
        raise DataError(f"{path} is not a pickled batch of CIFAR-10: {type(error).__name__}: {error}") from error
    return check_batch(path, pixels, labels)


def check_batch(path: Path, pixels: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return images and labels as `read_binary` does. Raises DataError where they cannot be CIFAR-10's."""
    if pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != PIXELS:
        raise DataError(f"{path} has pixels {pixels.dtype}{list(pixels.shape)}: they must be uint8[N, {PIXELS}]")
    if labels.dtype.kind not in "iu" or labels.shape != (len(pixels),) or len(labels) == 0:
        raise DataError(
            f"{path} has labels {labels.dtype}{list(labels.shape)} for {len(pixels)} images: "
            "they must be integers, one an image"
        )
    if labels.min() < 0 or labels.max() > 9:
        raise DataError(f"{path} has labels from {labels.min()} to {labels.max()}: they must be in 0..9")
    return pixels.reshape(-1, 3, 32, 32), labels.astype(np.int64)


class ArrayUnpickler(pickle.Unpickler):
    """Unpickles built-in containers and NumPy arrays; any other class or function is refused, not called."""

    def find_class(self, module: str, name: str) -> Any:
        # numpy.core is where the published files, older than NumPy 2, look for it.
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np.empty(0).__reduce__()[0]  # _reconstruct, wherever this version of NumPy keeps it
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        # How Python 3 writes bytes in protocol 2.
        if module == "_codecs" and name == "encode":
            return _encode_latin1
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no batch of CIFAR-10 needs")


def _encode_latin1(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes written as {encoding}, not latin1")
    return text.encode("latin1")
