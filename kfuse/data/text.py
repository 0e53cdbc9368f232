"""Byte-level text: any UTF-8 file, or the Python standard library's own source where none is named."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kfuse.data.dataset import DataError, DataSplit

STDLIB_BYTES = 4_000_000
# Folders that are not the library itself, that hold its tests, or tables and text that programs wrote.
STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


class TextBlocks:
    """Contiguous, non-overlapping blocks of a byte string, each with the same block shifted by one.

    Sample i is `x = tokens[i*b : (i+1)*b]`, `y = tokens[i*b+1 : (i+1)*b+1]` with b = block_size; the bytes
    after the last whole block are not used. `tokens` is uint8 `[N]`; batches are int64 `[B, b]`.
    """

    def __init__(self, tokens: np.ndarray, block_size: int) -> None:
        self.tokens, self.block_size = tokens, block_size

    def __len__(self) -> int:
        """The number of whole blocks that have a next byte for each of theirs."""
        return (len(self.tokens) - 1) // self.block_size

    def fetch(self, indices: np.ndarray, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Returns blocks and their next bytes. There is no augmentation."""
        positions = np.asarray(indices)[:, None] * self.block_size + np.arange(self.block_size + 1)
        windows = torch.from_numpy(self.tokens[positions].astype(np.int64))
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def load_text(path: str | os.PathLike[str] | None = None, block_size: int = 64, heldout: float = 0.1) -> DataSplit:
    """Returns the bytes of a UTF-8 file as tokens, the last fraction `heldout` of them held out.

    The file is held in memory, a byte a token. With no path: Python's standard library (`stdlib_source`).
    Raises DataError for a file that cannot be read, one that is not UTF-8, and one too short for a block in each part.
    """
    if block_size < 1 or not 0 < heldout < 1:
        raise DataError(f"block_size={block_size}, heldout={heldout}: must be at least 1, and above 0 and below 1")
    data = stdlib_source() if path is None else _read_utf8(Path(path).expanduser())
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
    return DataSplit(TextBlocks(train, block_size), TextBlocks(held, block_size), spec)


def _read_utf8(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        data.decode("utf-8")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: {error}") from None
    return data


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
