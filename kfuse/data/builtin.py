"""Built-in data sets: scikit-learn's digits, CIFAR-10 from its published files, folders of images, UTF-8 text."""

from __future__ import annotations

import importlib.util
import math
import os
import sysconfig
from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from kfuse.cores import cores
from kfuse.data.dataset import DataError, Dataset, DataSplit, TensorData
from kfuse.data.fetching import permutation

# Mean and standard deviation of the training set's pixels, by channel, for pixels in 0..1.
CIFAR10_PIXELS = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
IMAGENET_PIXELS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})


def import_for(module: str, data: str, package: str, install: str) -> Any:
    """Imports a module that only this data set needs. Raises DataError, which names what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(f"data={data} needs {package} (pip install {install}): {error}") from error


def split_indices(length: int, heldout: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Shuffles `0..length-1` with `seed` and holds out the fraction `heldout`, rounded up.

    Returns (train, heldout) indices, int64. Raises DataError where either would be empty.
    """
    # The subtraction keeps a product such as 0.1 * 30 = 3.0000000000000004 from rounding up to 4.
    held = math.ceil(length * heldout - 1e-9)
    if not 0 < held < length:
        raise DataError(f"heldout={heldout}: must leave both parts at least one of {length} samples")
    order = permutation(length, seed)
    return order[held:], order[:held]


def load_digits(heldout: float = 0.2, split_seed: int = 0) -> DataSplit:
    """Returns the digits, pixels X/16 as float32 `[B, 1, 8, 8]` and targets int64 `[B]` in 0..9.

    The fraction `heldout` (360 of 1797 samples by default) is chosen by a shuffle with `split_seed`, which is not the
    training's seed. Raises DataError where scikit-learn is missing.
    """
    rows = torch.from_numpy(_digits())
    x = rows[:, :-1].to(torch.float32).div_(16.0).view(-1, 1, 8, 8)
    y = rows[:, -1].to(torch.int64)
    train, held = (torch.from_numpy(part) for part in split_indices(len(x), heldout, split_seed))
    spec = {"input_shape": (1, 8, 8), "num_classes": 10}
    return DataSplit(TensorData((x[train], y[train])), TensorData((x[held], y[held])), spec)


def _digits() -> np.ndarray:
    """Returns scikit-learn's digits, a row an image: its 64 pixels in 0..16 and its class, float64 `[1797, 65]`.

    Reads scikit-learn's own file where it is found. Importing scikit-learn brings SciPy, which takes as long as torch.
    """
    package = importlib.util.find_spec("sklearn")
    for folder in (package and package.submodule_search_locations) or ():
        file = Path(folder, "datasets", "data", "digits.csv.gz")
        if file.is_file():
            return np.loadtxt(file, delimiter=",")
    bunch = import_for("sklearn.datasets", "digits", "scikit-learn", "scikit-learn").load_digits()
    return np.column_stack([bunch.data, bunch.target])


class Images(Dataset):
    """Labelled images, uint8 until they are fetched. A subclass reads the pixels."""

    def __init__(self, labels: Tensor, pixels: tuple[Sequence[float], Sequence[float]], augment: bool) -> None:
        """labels: int64 `[N]`. pixels: mean and standard deviation by channel, to normalise with."""
        self.labels, self.augment = labels, augment
        self.mean, self.std = (torch.tensor(values).view(3, 1, 1) for values in pixels)

    def __len__(self) -> int:
        return len(self.labels)

    def fetch(self, indices: np.ndarray, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Returns normalised images float32 `[B, 3, H, W]` and labels int64 `[B]`; augmented as `pixels` does."""
        images = self.pixels(indices, generator if self.augment else None)
        return (images.float() / 255.0 - self.mean) / self.std, self.labels[torch.as_tensor(indices, dtype=torch.int64)]

    @abstractmethod
    def pixels(self, indices: np.ndarray, generator: torch.Generator | None) -> Tensor:
        """Returns images uint8 `[B, 3, H, W]`, contiguous, augmented if there is a generator."""


class Cifar10(Images):
    """CIFAR-10 (Krizhevsky 2009): images uint8 `[N, 3, 32, 32]`, in memory. Augmentation is `crop_and_flip`."""

    def __init__(self, images: Tensor, labels: Tensor, augment: bool) -> None:
        super().__init__(labels, CIFAR10_PIXELS, augment)
        self.images = images

    def pixels(self, indices: np.ndarray, generator: torch.Generator | None) -> Tensor:
        images = self.images[torch.as_tensor(indices, dtype=torch.int64)]
        return images if generator is None else crop_and_flip(images, generator)


def crop_and_flip(images: Tensor, generator: torch.Generator, padding: int = 4) -> Tensor:
    """Crops each image `[C, H, W]` at random from its zero-padded self, and mirrors it with probability 1/2."""
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
    """Returns CIFAR-10, held out: its test batch. `path` is the folder of the published binary version's files.

    Those are data_batch_1.bin to data_batch_5.bin and test_batch.bin. Nothing is downloaded. Raises OSError for files
    that are missing, DataError for those that are cut short or not in the format.
    """
    if path is None:
        raise DataError("data=cifar10 needs data.path=FOLDER: of the published binary version")
    folder = Path(path).expanduser()
    train = [_read_batch(folder / f"data_batch_{number}.bin") for number in range(1, 6)]
    images, labels = (torch.cat(parts) for parts in zip(*train, strict=True))
    heldout = _read_batch(folder / "test_batch.bin")
    spec = {"input_shape": (3, 32, 32), "num_classes": 10}
    parts = Cifar10(images, labels, augment), Cifar10(*heldout, augment=False)
    return DataSplit(*parts, spec, _image_input(32, CIFAR10_PIXELS))


def _read_batch(file: Path) -> tuple[Tensor, Tensor]:
    """Reads records of one label byte and 3072 pixel bytes: images uint8 `[N, 3, 32, 32]` and labels int64 `[N]`."""
    data = np.fromfile(file, dtype=np.uint8)
    if len(data) == 0 or len(data) % 3073 != 0 or data[::3073].max() > 9:
        raise DataError(f"{file} is no batch of CIFAR-10: it must be records of 3073 bytes, the first one 0 to 9")
    records = torch.from_numpy(data).view(-1, 3073)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].long()


class ImageFiles(Images):
    """Image files, decoded when they are fetched: the middle square of each, resized to `size` x `size`, RGB.

    A few threads decode a batch. With augmentation each image is mirrored with probability 1/2.
    """

    def __init__(
        self,
        files: Sequence[Path],
        labels: np.ndarray,
        size: int,
        augment: bool,
        pixels: tuple[Sequence[float], Sequence[float]] = IMAGENET_PIXELS,
    ) -> None:
        super().__init__(torch.from_numpy(labels.astype(np.int64)), pixels, augment)
        self.files, self.size = list(files), size
        modules = ("PIL.Image", "PIL.ImageOps")
        self._image, self._ops = (import_for(name, "image_folder", "Pillow", "'kfuse[vision]'") for name in modules)

    def pixels(self, indices: np.ndarray, generator: torch.Generator | None) -> Tensor:
        """Returns the decoded images. Raises DataError, which names the file, for one that cannot be decoded."""
        files = [self.files[i] for i in indices]
        # A loader process, which runs beside others, decodes in one thread.
        with ThreadPoolExecutor(1 if get_worker_info() else min(8, cores())) as threads:
            decoded = np.stack(list(threads.map(self._decode, files)))
        # Contiguous: the CPU's convolutions have corrupted memory for small channels-last images.
        images = torch.from_numpy(decoded).permute(0, 3, 1, 2).contiguous()
        if generator is not None:
            mirrored = torch.rand(len(images), generator=generator) < 0.5
            images[mirrored] = images[mirrored].flip(3)
        return images

    def _decode(self, file: Path) -> np.ndarray:
        try:
            with self._image.open(file) as image:
                size, bilinear = (self.size, self.size), self._image.Resampling.BILINEAR
                return np.asarray(self._ops.fit(image.convert("RGB"), size, bilinear))
        # Decoders raise many types for damaged files (OSError, SyntaxError, ValueError, struct.error, ...).
        except Exception as error:
            raise DataError(f"{file} cannot be decoded as an image: {error}") from error


def load_image_folder(
    path: str | os.PathLike[str] | None = None,
    size: int = 64,
    augment: bool = True,
    heldout: float = 0.1,
    split_seed: int = 0,
) -> DataSplit:
    """Returns the images under `path`: a folder for each class, or `train` and `val`, each with one for each class.

    Classes are numbered in order of their folders' names. Without `train` and `val`, the fraction `heldout`
    is held out, chosen by a shuffle with `split_seed`. Needs Pillow (the extra `vision`). Raises OSError where the
    folder is missing, DataError where Pillow is, for fewer than two classes, and for a class without images.
    """
    if path is None:
        raise DataError("data=image_folder needs data.path=FOLDER, with a folder of images for each class")
    if size < 1:
        raise DataError(f"size={size}: must be at least 1")
    root = Path(path).expanduser()
    if (root / "train").is_dir() and (root / "val").is_dir():
        classes = _class_names(root / "train")
        train, held = (_list_images(root / part, classes) for part in ("train", "val"))
    else:
        classes = _class_names(root)
        files, labels = _list_images(root, classes)
        chosen = split_indices(len(files), heldout, split_seed)
        train, held = (([files[i] for i in indices], labels[indices]) for indices in chosen)
    spec = {"input_shape": (3, size, size), "num_classes": len(classes), "classes": tuple(classes)}
    parts = ImageFiles(*train, size, augment), ImageFiles(*held, size, augment=False)
    return DataSplit(*parts, spec, _image_input(size, IMAGENET_PIXELS))


def _image_input(size: int, pixels: tuple[Sequence[float], Sequence[float]]) -> dict[str, Any]:
    """As `DataSplit.input`: the middle square, RGB, resized, divided by 255, then (x - mean) / std by channel."""
    mean, std = map(list, pixels)
    return {"format": "image", "size": size, "mean": mean, "std": std}


def _class_names(folder: Path) -> list[str]:
    """Returns the names of a folder's folders, sorted. Raises DataError for fewer than two."""
    names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if len(names) < 2:
        raise DataError(f"{folder} has {len(names)} class folders: at least 2 are needed")
    return names


def _list_images(folder: Path, classes: Sequence[str]) -> tuple[list[Path], np.ndarray]:
    """Returns all images' files and labels, by class. Raises DataError for a class without one, or an unknown one."""
    unknown = sorted(set(_class_names(folder)) - set(classes))
    if unknown:
        raise DataError(f"{folder} has classes that are not those to train on: {', '.join(unknown)}")
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        if not (folder / name).is_dir():
            continue
        found = sorted(path for path in (folder / name).iterdir() if path.suffix.lower() in SUFFIXES)
        if not found:
            raise DataError(f"{folder / name} has no image: files must end in one of {' '.join(sorted(SUFFIXES))}")
        files += found
        labels += [label] * len(found)
    return files, np.array(labels)


STDLIB_BYTES = 4_000_000
# Folders that are not the library itself, that hold its tests, or tables and text that programs wrote.
STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


class TextBlocks(Dataset):
    """Contiguous, non-overlapping blocks of tokens, each with the same block shifted by one.

    Sample i is `x = tokens[i*b : (i+1)*b]`, `y = tokens[i*b+1 : (i+1)*b+1]` with b = block_size; the tokens
    after the last whole block are not used. Batches are int64 `[B, b]`.
    """

    def __init__(self, pieces: Sequence[np.ndarray], block_size: int) -> None:
        """pieces: the tokens, in arrays of integers that may lie in files."""
        self.pieces, self.block_size = pieces, block_size
        self.starts = np.cumsum([0, *map(len, pieces)])

    def __len__(self) -> int:
        return max(0, (int(self.starts[-1]) - 1) // self.block_size)

    def fetch(self, indices: np.ndarray, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        positions = np.asarray(indices)[:, None] * self.block_size + np.arange(self.block_size + 1)
        of = np.searchsorted(self.starts, positions, side="right") - 1  # the piece of each
        found = np.empty(positions.shape, np.int64)
        for piece in np.unique(of):
            here = of == piece
            found[here] = self.pieces[piece][positions[here] - self.starts[piece]]
        windows = torch.from_numpy(found)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def load_text(path: str | os.PathLike[str] | None = None, block_size: int = 64, heldout: float = 0.1) -> DataSplit:
    """Returns the bytes of a UTF-8 file as tokens, the last fraction `heldout` of them held out.

    The file is held in memory, a byte a token. With no path: Python's standard library (`stdlib_source`).
    Raises OSError or UnicodeDecodeError for a file that cannot be read, DataError for one that is too short for a block
    in each part.
    """
    if block_size < 1 or not 0 < heldout < 1:
        raise DataError(f"block_size={block_size}, heldout={heldout}: must be at least 1, and above 0 and below 1")
    data = stdlib_source() if path is None else Path(path).expanduser().read_bytes()
    data.decode()  # raises UnicodeDecodeError
    name = "the standard library" if path is None else str(path)
    tokens = np.frombuffer(data, dtype=np.uint8)
    cut = len(tokens) - round(len(tokens) * heldout)
    train, held = tokens[:cut], tokens[cut:]
    if min(len(train), len(held)) <= block_size:
        raise DataError(
            f"{name} is too short: its {len(tokens)} bytes split into {len(train)} to train on and "
            f"{len(held)} held out, and block_size={block_size} needs at least {block_size + 1} in each"
        )
    spec = {"vocab_size": 256, "block_size": block_size}
    about = {"format": "bytes", "block_size": block_size}
    return DataSplit(TextBlocks([train], block_size), TextBlocks([held], block_size), spec, about)


def stdlib_source(limit: int = STDLIB_BYTES) -> bytes:
    """Returns the first `limit` bytes of the Python standard library's source, files in order of their path.

    The same for every process of one Python installation. Raises DataError where the source is not installed.
    """
    root = Path(sysconfig.get_path("stdlib"))
    sources: list[Path] = []
    for folder, subfolders, files in os.walk(root):
        # In place, so that os.walk does not descend. config-* and _sysconfigdata* describe the machine.
        subfolders[:] = [d for d in subfolders if d not in STDLIB_SKIPPED and not d.startswith("config-")]
        sources += [Path(folder, f) for f in files if f.endswith(".py") and not f.startswith("_sysconfigdata")]
    data = bytearray()
    for source in sorted(sources, key=lambda p: p.relative_to(root).as_posix()):
        data += source.read_bytes()
        if len(data) >= limit:
            break
    if not data:
        raise DataError(f"{root} has no source of the standard library: name a text file with data.path=FILE")
    return bytes(data[:limit])
