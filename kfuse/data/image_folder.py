"""Images in one folder a class, decoded when they are fetched."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kfuse.data.base import DataError, DataSplit, split_indices

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})
# Mean and standard deviation of ImageNet's pixels, by channel, for pixels in 0..1.
MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
# A random crop's share of the image's area, and its width over its height.
CROP_AREA = (0.25, 1.0)
CROP_RATIO = (3 / 4, 4 / 3)


class ImageFiles:
    """Image files and their labels; batches are `size` x `size`, RGB, normalised float32.

    Without augmentation: the middle square, resized. With `augment` and a generator: a crop of random place,
    area and aspect ratio, resized, and mirrored with probability 1/2. A few threads decode a batch.
    """

    def __init__(self, files: Sequence[Path], labels: np.ndarray, size: int, augment: bool) -> None:
        self.files = list(files)
        self.labels = torch.from_numpy(labels.astype(np.int64))
        self.size = size
        self.augment = augment
        self._pillow = import_pillow()
        self._bilinear = self._pillow.Resampling.BILINEAR
        self._threads = ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="kfuse-decode")

    def __len__(self) -> int:
        return len(self.files)

    def fetch(self, indices: np.ndarray, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Return images float32 `[B, 3, size, size]` and labels int64 `[B]`.

        Raises DataError, naming the file, for one that cannot be decoded.
        """
        files = [self.files[i] for i in indices]
        draws: list[list[float] | None] = [None] * len(files)
        if self.augment and generator is not None:
            # Drawn here, for the whole batch: the threads' order must not matter.
            draws = torch.rand(len(files), 5, generator=generator, dtype=torch.float64).tolist()
        pixels = np.stack(list(self._threads.map(self._decode, files, draws)))
        # Contiguous: the CPU's convolutions have corrupted memory for small channels-last images.
        images = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous().float() / 255.0
        return (images - MEAN) / STD, self.labels[torch.as_tensor(indices, dtype=torch.int64)]

    def _decode(self, file: Path, draw: list[float] | None) -> np.ndarray:
        """Return one image, uint8 `[size, size, 3]`."""
        try:
            with self._pillow.open(file) as image:
                width, height = image.size
                box = middle_square(width, height) if draw is None else random_box(width, height, draw)
                resized = image.convert("RGB").resize((self.size, self.size), self._bilinear, box)
        # Decoders raise many types for damaged files (OSError, SyntaxError, ValueError, struct.error, ...).
        except Exception as error:
            raise DataError(f"{file} cannot be decoded as an image: {error}") from error
        pixels = np.asarray(resized)
        return pixels[:, ::-1] if draw is not None and draw[4] < 0.5 else pixels


def middle_square(width: int, height: int) -> tuple[float, float, float, float]:
    """Return the largest centred square as (left, top, right, bottom)."""
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def random_box(width: int, height: int, draw: Sequence[float]) -> tuple[float, float, float, float]:
    """Return a crop as (left, top, right, bottom) from uniform draws: area, aspect ratio, left, top.

    The area is uniform and the ratio log-uniform (Szegedy et al. 2015); a crop that is too wide or too
    high for the image is cut to it.
    """
    area = width * height * (CROP_AREA[0] + draw[0] * (CROP_AREA[1] - CROP_AREA[0]))
    low, high = math.log(CROP_RATIO[0]), math.log(CROP_RATIO[1])
    ratio = math.exp(low + draw[1] * (high - low))
    crop_width = min(float(width), math.sqrt(area * ratio))
    crop_height = min(float(height), math.sqrt(area / ratio))
    left, top = draw[2] * (width - crop_width), draw[3] * (height - crop_height)
    return left, top, left + crop_width, top + crop_height


def load_image_folder(
    path: str | os.PathLike[str] | None = None,
    size: int = 64,
    augment: bool = True,
    heldout: float = 0.1,
    split_seed: int = 0,
) -> DataSplit:
    """Return the images under `path`: a folder a class, or `train` and `val`, each with a folder a class.

    Classes are numbered in order of their folders' names. Without `train` and `val`, the fraction `heldout`
    is held out, chosen by a shuffle with `split_seed`. Needs Pillow (the extra `vision`). Raises DataError
    where Pillow or the folder is missing, for fewer than two classes, and for a class without images.
    """
    if path is None:
        raise DataError("data=image_folder needs data.path=FOLDER, with a folder of images for each class")
    if size < 1:
        raise DataError(f"size={size}: must be at least 1")
    root = Path(path).expanduser()
    if os.path.isdir(root / "train") and os.path.isdir(root / "val"):
        classes = class_names(root / "train")
        unknown = sorted(set(class_names(root / "val")) - set(classes))
        if unknown:
            raise DataError(f"{root / 'val'} has classes that {root / 'train'} has not: {', '.join(unknown)}")
        train_files, train_labels = list_images(root / "train", classes)
        held_files, held_labels = list_images(root / "val", classes)
    else:
        classes = class_names(root)
        files, labels = list_images(root, classes)
        train, held = split_indices(len(files), heldout, split_seed)
        train_files, train_labels = [files[i] for i in train], labels[train]
        held_files, held_labels = [files[i] for i in held], labels[held]
    return DataSplit(
        ImageFiles(train_files, train_labels, size, augment),
        ImageFiles(held_files, held_labels, size, augment=False),
        {"input_shape": (3, size, size), "num_classes": len(classes), "classes": tuple(classes)},
    )


def class_names(folder: Path) -> list[str]:
    """Return the names of the class folders, sorted. Raises DataError unless there are at least two."""
    if not os.path.isdir(folder):
        raise DataError(f"{folder} is not a folder: data.path must name one with a folder for each class")
    names = [p.name for p in list_folder(folder) if os.path.isdir(p) and not p.name.startswith(".")]
    if len(names) < 2:
        raise DataError(f"{folder} has {len(names)} class folders: at least 2 are needed")
    return names


def list_images(folder: Path, classes: Sequence[str]) -> tuple[list[Path], np.ndarray]:
    """Return the image files of all classes, sorted within each, and their labels.

    Raises DataError for a class folder that holds no image. (One of `classes` may have no folder.)
    """
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        if not os.path.isdir(folder / name):
            continue
        found = [p for p in list_folder(folder / name) if p.suffix.lower() in SUFFIXES]
        if not found:
            raise DataError(f"{folder / name} has no image: files must end in one of {' '.join(sorted(SUFFIXES))}")
        files += found
        labels += [label] * len(found)
    return files, np.array(labels)


def list_folder(folder: Path) -> list[Path]:
    """Return a folder's entries, sorted. Raises DataError where it cannot be read."""
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error.strerror}") from error


def import_pillow() -> Any:
    """Return `PIL.Image`. Raises DataError, naming the remedy, where Pillow is missing."""
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as error:
        raise DataError(f"data=image_folder needs Pillow (pip install 'kfuse[vision]'): {error}") from error
