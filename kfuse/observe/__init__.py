"""What a run leaves behind and shows: the run directory, the display, the recorder that writes to both, log lines."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any


def flattened(record: Mapping[str, Any], between: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values of nested mappings, with their keys joined by `between`."""
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from flattened(value, between, f"{prefix}{key}{between}")
        else:
            yield prefix + key, value


def write_whole(path: Path, save: Callable[[Path], object]) -> None:
    """Writes a file that is there whole or not at all, also after a kill or a power failure. All may read it.

    save: writes to the path that it is given: a hidden name beside `path`, with this host and process in it. The file
    is seen to the disk and renamed to `path`. After an error, which is raised again, the hidden file is removed, and
    those that killed processes of this host left are before. The directory must be there. Raises OSError, and what
    `save` raises.
    """
    hidden = f".{path.name}.{socket.gethostname()}."
    for left in path.parent.glob(f"{hidden}*"):
        left.unlink(missing_ok=True)
    own = path.with_name(f"{hidden}{os.getpid()}")
    try:
        save(own)
        own.chmod(0o644)
        with own.open("rb") as stream:
            os.fsync(stream.fileno())
        os.replace(own, path)
        fsync_directory(path.parent)
    except BaseException:
        own.unlink(missing_ok=True)
        raise


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file by `write_whole`; its directory is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda to: to.write_text(json.dumps(content, indent=2) + "\n"))


def fsync_directory(path: Path) -> None:
    """Sees a directory's names to the disk, so that a file renamed there keeps its name."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def first_line(error: BaseException) -> str:
    """Returns the first line of an exception's message, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
