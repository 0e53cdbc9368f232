"""Images: scikit-learn's digits, CIFAR-10 from its published files, and folders of image files."""

from __future__ import annotations

import importlib.util
import io
import math
import os
import pickle
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from kfuse.data.dataset import DataError, DataSplit, TensorData
from kfuse.data.loading import read_bytes, split_indices

# Mean and standard deviation of the training set's pixels, by channel, for pixels in 0..1.
CIFAR10_PIXELS = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
IMAGENET_PIXELS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
# CIFAR-10's files.
IMAGE_BYTES = 3 * 32 * 32
SUBFOLDERS = (".", "cifar-10-batches-bin", "cifar-10-batches-py")
TRAIN_FILES = tuple(f"data_batch_{i}" for i in range(1, 6))
TEST_FILE = "test_batch"
# Image files, and a random crop of one: its share of the image's area, and its width over its height.
SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})
CROP_AREA = (0.25, 1.0)
CROP_RATIO = (3 / 4, 4 / 3)


def _import(module: str, data: str, package: str, install: str) -> Any:
    """Returns a module that only this data set needs. Raises DataError, which names what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(f"data={data} needs {package} (pip install {install}): {error}") from error


def load_digits(heldout: float = 0.2, split_seed: int = 0) -> DataSplit:
    """Returns the digits, pixels X/16 as float32 `[B, 1, 8, 8]` and targets int64 `[B]` in 0..9.

    The fraction `heldout` (360 of 1797 samples by default) is chosen by a shuffle with `split_seed`, which is
    apart from the training seed so that runs with different seeds are evaluated on the same samples.
    Raises DataError where scikit-learn is missing.
    """
    rows = torch.from_numpy(_digits())
    x = rows[:, :-1].to(torch.float32).div_(16.0).view(-1, 1, 8, 8)
    y = rows[:, -1].to(torch.int64)
    train, held = (torch.from_numpy(part) for part in split_indices(len(x), heldout, split_seed))
    spec = {"input_shape": (1, 8, 8), "num_classes": 10}
    return DataSplit(TensorData(x[train], y[train]), TensorData(x[held], y[held]), spec)


def _digits() -> np.ndarray:
    """Returns scikit-learn's digits, a row an image: its 64 pixels in 0..16 and its class, float64 `[1797, 65]`.

    Reads scikit-learn's own file where it is found. Importing scikit-learn brings SciPy, which takes as long as torch.
    """
    package = importlib.util.find_spec("sklearn")
    for folder in (package and package.submodule_search_locations) or ():
        file = Path(folder, "datasets", "data", "digits.csv.gz")
        if file.is_file():
            return np.loadtxt(file, delimiter=",")
    bunch = _import("sklearn.datasets", "digits", "scikit-learn", "scikit-learn").load_digits()
    return np.column_stack([bunch.data, bunch.target])


class Images(ABC):
    """Labelled images, uint8 until they are fetched. A subclass reads the pixels."""

    def __init__(self, labels: Tensor, pixels: tuple[Sequence[float], Sequence[float]], augment: bool) -> None:
        """labels: int64 `[N]`. pixels: mean and standard deviation by channel, to normalise with."""
        self.labels, self.augment = labels, augment
        self.mean, self.std = (torch.tensor(values).view(3, 1, 1) for values in pixels)

    def __len__(self) -> int:
        """The number of images."""
        return len(self.labels)

    def fetch(self, indices: np.ndarray, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Returns normalised images float32 `[B, 3, H, W]` and labels int64 `[B]`.

        Augmented, with random numbers of `generator`, if there is one and the data set augments.
        """
        images = self.pixels(indices, generator if self.augment else None)
        return (images.float() / 255.0 - self.mean) / self.std, self.labels[torch.as_tensor(indices, dtype=torch.int64)]

    @abstractmethod
    def pixels(self, indices: np.ndarray, generator: torch.Generator | None) -> Tensor:
        """Returns images uint8 `[B, 3, H, W]`, contiguous, augmented if there is a generator."""


class Cifar10(Images):
    """CIFAR-10 (Krizhevsky 2009): images uint8 `[N, 3, 32, 32]`, in memory.

    Augmentation shifts each image by up to 4 pixels, with black moving in (a random crop after padding), and mirrors
    it with probability 1/2.
    """

    def __init__(self, images: Tensor, labels: Tensor, augment: bool) -> None:
        super().__init__(labels, CIFAR10_PIXELS, augment)
        self.images = images

    def pixels(self, indices: np.ndarray, generator: torch.Generator | None) -> Tensor:
        """Returns the images, cropped and mirrored at random if there is a generator."""
        images = self.images[torch.as_tensor(indices, dtype=torch.int64)]
        return images if generator is None else crop_and_flip(images, generator)


def crop_and_flip(images: Tensor, generator: torch.Generator, padding: int = 4) -> Tensor:
    """Crops each image at random from its zero-padded self, and mirrors it with probability 1/2.

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
    """Returns CIFAR-10, held out: its test batch. `path` is its folder or the one it was unpacked in.

    Takes the binary version (data_batch_1.bin ... test_batch.bin) or the Python version (data_batch_1 ...
    test_batch), which is unpickled without running anything a file asks for. Nothing is downloaded.
    Raises DataError for files that are missing, cut short or not in the format.
    """
    if path is None:
        raise DataError("data=cifar10 needs data.path=FOLDER: the published binary or Python version")
    folder, suffix = find_batches(Path(path).expanduser())
    train, heldout = (read_batches(folder, names, suffix) for names in (TRAIN_FILES, (TEST_FILE,)))
    spec = {"input_shape": (3, 32, 32), "num_classes": 10}
    return DataSplit(Cifar10(*train, augment), Cifar10(*heldout, augment=False), spec)


def find_batches(root: Path) -> tuple[Path, str]:
    """Returns the folder that holds the batches and their suffix, ".bin" or "" (the Python version)."""
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


def read_batches(folder: Path, names: Sequence[str], suffix: str) -> tuple[Tensor, Tensor]:
    """Returns the images and the labels of these batches, copied out of the files' bytes."""
    read = read_binary if suffix else read_pickle
    images, labels = zip(*(read(folder / (name + suffix)) for name in names), strict=True)
    return torch.from_numpy(np.concatenate(images)), torch.from_numpy(np.concatenate(labels))


def read_binary(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Reads records of one label byte and 3072 pixel bytes.

    Returns images uint8 `[N, 3, 32, 32]` and labels int64 `[N]`.
    """
    data = np.frombuffer(read_bytes(path), dtype=np.uint8)
    if len(data) % (IMAGE_BYTES + 1) != 0:
        raise DataError(f"{path} has {len(data)} bytes: it must be whole records of {IMAGE_BYTES + 1} bytes")
    records = data.reshape(-1, IMAGE_BYTES + 1)
    return check_batch(path, records[:, 1:], records[:, 0])


def read_pickle(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Reads a pickled dict with `data` (uint8 `[N, 3072]`) and `labels`; returns the same as `read_binary`."""
    content = read_bytes(path)
    try:
        batch = ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
        pixels, labels = np.asarray(batch[b"data"]), np.asarray(batch[b"labels"])
    # A damaged pickle may raise anything: its bytes are instructions.
    except Exception as error:
        raise DataError(f"{path} is not a pickled batch of CIFAR-10: {type(error).__name__}: {error}") from error
    return check_batch(path, pixels, labels)


def check_batch(path: Path, pixels: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns images and labels as `read_binary` does. Raises DataError where they cannot be CIFAR-10's."""
    if pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != IMAGE_BYTES:
        raise DataError(f"{path} has pixels {pixels.dtype}{list(pixels.shape)}: they must be uint8[N, {IMAGE_BYTES}]")
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
        """Returns what a pickle asks for by name. Raises UnpicklingError for anything but arrays and bytes."""
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


class ImageFiles(Images):
    """Image files, decoded when they are fetched: `size` x `size`, RGB. A few threads decode a batch.

    Without augmentation: the middle square, resized. With it: a crop of random place, area and aspect ratio, resized,
    and mirrored with probability 1/2.
    """

    def __init__(self, files: Sequence[Path], labels: np.ndarray, size: int, augment: bool) -> None:
        super().__init__(torch.from_numpy(labels.astype(np.int64)), IMAGENET_PIXELS, augment)
        self.files, self.size = list(files), size
        self._pillow = _import("PIL.Image", "image_folder", "Pillow", "'kfuse[vision]'")
        self._threads: ThreadPoolExecutor | None = None

    def pixels(self, indices: np.ndarray, generator: torch.Generator | None) -> Tensor:
        """Returns the decoded images. Raises DataError, which names the file, for one that cannot be decoded."""
        files = [self.files[i] for i in indices]
        draws: list[list[float] | None] = [None] * len(files)
        if generator is not None:
            # Drawn here, for the whole batch: the threads' order must not matter.
            draws = torch.rand(len(files), 5, generator=generator, dtype=torch.float64).tolist()
        if get_worker_info() is not None:  # in a loader process, beside others: one thread, as torch has there
            decoded = np.stack(list(map(self._decode, files, draws)))
        else:
            if self._threads is None:  # made at first use, so that a loader process never inherits its threads
                self._threads = ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="kfuse-decode")
            decoded = np.stack(list(self._threads.map(self._decode, files, draws)))
        # Contiguous: the CPU's convolutions have corrupted memory for small channels-last images.
        return torch.from_numpy(decoded).permute(0, 3, 1, 2).contiguous()

    def _decode(self, file: Path, draw: list[float] | None) -> np.ndarray:
        """Returns one image, uint8 `[size, size, 3]`."""
        try:
            with self._pillow.open(file) as image:
                width, height = image.size
                box = middle_square(width, height) if draw is None else random_box(width, height, draw)
                resized = image.convert("RGB").resize((self.size, self.size), self._pillow.Resampling.BILINEAR, box)
        # Decoders raise many types for damaged files (OSError, SyntaxError, ValueError, struct.error, ...).
        except Exception as error:
            raise DataError(f"{file} cannot be decoded as an image: {error}") from error
        pixels = np.asarray(resized)
        return pixels[:, ::-1] if draw is not None and draw[4] < 0.5 else pixels


def middle_square(width: int, height: int) -> tuple[float, float, float, float]:
    """Returns the largest centred square as (left, top, right, bottom)."""
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def random_box(width: int, height: int, draw: Sequence[float]) -> tuple[float, float, float, float]:
    """Returns a crop as (left, top, right, bottom) from uniform draws: area, aspect ratio, left, top.

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
    """Returns the images under `path`: a folder for each class, or `train` and `val`, each with one for each class.

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
        parts = [list_images(root / part, classes) for part in ("train", "val")]
    else:
        classes = class_names(root)
        files, labels = list_images(root, classes)
        chosen = split_indices(len(files), heldout, split_seed)
        parts = [([files[i] for i in indices], labels[indices]) for indices in chosen]
    train, held = parts
    spec = {"input_shape": (3, size, size), "num_classes": len(classes), "classes": tuple(classes)}
    return DataSplit(ImageFiles(*train, size, augment), ImageFiles(*held, size, augment=False), spec)


def class_names(folder: Path) -> list[str]:
    """Returns the names of the class folders, sorted. Raises DataError unless there are at least two."""
    if not os.path.isdir(folder):
        raise DataError(f"{folder} is not a folder: data.path must name one with a folder for each class")
    names = [p.name for p in list_folder(folder) if os.path.isdir(p) and not p.name.startswith(".")]
    if len(names) < 2:
        raise DataError(f"{folder} has {len(names)} class folders: at least 2 are needed")
    return names


def list_images(folder: Path, classes: Sequence[str]) -> tuple[list[Path], np.ndarray]:
    """Returns the image files of all classes, sorted within each, and their labels.

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
    """Returns a folder's entries, sorted. Raises DataError where it cannot be read."""
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error.strerror}") from error
