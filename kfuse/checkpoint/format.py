"""Checkpoints: written in the background, in place whole or not at all, verified when they are read.

    checkpoints/step-00001234/
        model.pt, optimizer.pt    the state dicts, dense, on the CPU: torch.load(path, weights_only=True) reads them
        state.pt                  the rest of the training state
        manifest.json             format version, step, versions of torch and kfuse, size and SHA-256 of each file

Not torch.distributed.checkpoint: its .metadata file is an unrestricted pickle, which can run code when it is read. The
leader writes the whole state, so the files depend neither on the number of workers nor on where optimizer state lies.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import socket
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from kfuse.checkpoint import HostCopy, Snapshots
from kfuse.observe import first_line, fsync_directory
from kfuse.version import __version__

FORMAT = 7  # version of the layout above

_log = logging.getLogger("kfuse")

_MODEL, _OPTIMIZER, _REST, _MANIFEST = "model.pt", "optimizer.pt", "state.pt", "manifest.json"
_NAME = re.compile(r"step-(\d+)(\.old)?")
_HIDDEN = re.compile(r"\.step-\d+(?:\.old)?\.(.+)\.(\d+)")  # host, pid

Report = Callable[[dict[str, Any]], None]


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used: which file, and what is wrong with it."""


class Checkpointer:
    """Writes checkpoints into one directory; at most one Checkpointer a process may write there.

    A checkpoint is written under a hidden name, made durable, then renamed: whenever the process is killed, the last
    complete one stays. Hidden directories that ended processes of this host left are removed before the next write.
    """

    def __init__(self, directory: Path, keep: int, report: Report) -> None:
        """keep: how many of the newest to keep, at least 1.

        report: gets an event for each checkpoint, in the writer's thread: of kind "checkpoint", or "checkpoint_failed".
        """
        self._directory, self._keep, self._report = directory, keep, report
        self._snapshots = Snapshots()
        self._thread: threading.Thread | None = None
        self._wrote = False

    def save(self, step: int, state: dict[str, Any]) -> bool:
        """Copies `state` to the host and returns; the copy is written in the background.

        From a GPU it is copied in the background, too: the caller may change the state by work that it enqueues on the
        present stream, which begins after the copy.

        state: "model", "optimizer" and others, of what `Snapshots.take` takes; raises TypeError as that does. Returns
        False, having done nothing, while the last checkpoint is still being written: there is one copy at a time.
        Whatever goes wrong with the files is an event, never an exception.
        """
        if not self.wait(0.0):
            return False
        started = time.perf_counter()
        copy = self._snapshots.take(state, "state")
        # A thread for each, so that nothing holds the copy once it is written. Not a daemon: exit waits for it.
        args = (step, copy, time.perf_counter() - started)
        self._thread = threading.Thread(target=self._write, args=args, name="kfuse-checkpoint")
        self._thread.start()
        return True

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until the write under way, if any, has ended, well or not. False if it takes longer than that."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def _write(self, step: int, copy: HostCopy, snapshot_s: float) -> None:
        started = time.perf_counter()
        path = self._directory / f"step-{step:08d}"
        hidden = self._hidden(path)
        try:
            for device, arrived in copy.on_the_way:
                device.make_current()  # in this thread, which would use GPU 0 else
                arrived.synchronize()
            rest = copy.value
            parts = {_MODEL: rest.pop("model"), _OPTIMIZER: rest.pop("optimizer"), _REST: rest}
            if not self._directory.is_dir():
                self._directory.mkdir(parents=True, exist_ok=True)
                fsync_directory(self._directory.parent)
            own = str(os.getpid())  # this process's only writer is looking for leftovers
            for left in self._directory.iterdir():
                match = _HIDDEN.fullmatch(left.name)
                host, pid = match.groups() if match else ("", "")
                if host == socket.gethostname() and (pid == own or not Path("/proc", pid).exists()):
                    shutil.rmtree(left, ignore_errors=True)
            # Later ones are of a run that this one went back from: resuming must not pick them. Not so once this one
            # has written: then they are of a process that writes here too.
            abandoned = [later for at, _, later in _find(self._directory) if at > step and not self._wrote]
            size = _write_files(hidden, step, parts)
            if path.exists():  # training went back: it is found as .old until the new one has its name
                old = path.with_name(f"{path.name}.old")
                if old.exists():
                    self._remove(old)
                os.rename(path, old)
            os.rename(hidden, path)
            fsync_directory(self._directory)
            self._wrote = True
        except Exception as error:
            shutil.rmtree(hidden, ignore_errors=True)
            self._failed(step, first_line(error))
            return
        wall_s = time.perf_counter() - started
        about = {"step": step, "path": str(path), "bytes": size, "wall_s": wall_s, "snapshot_s": snapshot_s}
        self._report({"kind": "checkpoint", **about})
        _log.info("checkpoint of step %d written to %s: %d bytes in %.3f s", step, path, size, wall_s)
        try:
            newer = 0
            for at, is_old, found in _find(self._directory):
                newer += at <= step and not is_old
                if is_old or found in abandoned or newer > self._keep:
                    self._remove(found)
        except OSError as error:
            self._failed(step, f"it is written, but older ones could not be removed: {first_line(error)}")

    def _failed(self, step: int, why: str) -> None:
        self._report({"kind": "checkpoint_failed", "step": step, "why": why})
        _log.info("checkpoint of step %d failed: %s", step, why)

    def _remove(self, path: Path) -> None:
        """Removes a checkpoint, whole or not at all for those who look for its name."""
        hidden = self._hidden(path)
        os.rename(path, hidden)
        shutil.rmtree(hidden)

    def _hidden(self, path: Path) -> Path:
        """This process's own name for what is not, or no longer, a checkpoint."""
        return self._directory / f".{path.name}.{socket.gethostname()}.{os.getpid()}"


def load(path: Path) -> dict[str, Any]:
    """Returns the state that was saved as the checkpoint `path`, tensors on the CPU.

    Every byte is verified, and nothing read can run code. Raises CheckpointError.
    """
    file = path / _MANIFEST
    try:
        content = file.read_bytes()
        manifest, parts = json.loads(content), {}
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"format version {manifest['format']!r} is unknown; this kfuse reads {FORMAT}")
        manifest.pop("sha256")
        if _encode(manifest) != content:
            raise CheckpointError("damaged, its SHA-256 is not the one in it")
        for name in (_MODEL, _OPTIMIZER, _REST):
            file, expected = path / name, manifest["files"][name]
            with file.open("rb") as stream:
                if hashlib.file_digest(stream, "sha256").hexdigest() != expected["sha256"]:
                    raise CheckpointError("damaged, its SHA-256 is not the manifest's")
            parts[name] = load_plain(file)
        return {"model": parts[_MODEL], "optimizer": parts[_OPTIMIZER], **parts[_REST]}
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from None
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from error
    except Exception as error:  # of many types, for a file that something else has written
        raise CheckpointError(
            f"{file}: damaged, or written by another torch than {torch.__version__}: {first_line(error)}"
        ) from error


def load_plain(file: Path) -> Any:
    """Returns what torch.save wrote to `file`, tensors on the CPU; nothing in it can run code.

    torch.save compresses nothing: a file that claims to unpack to more than its own size is refused before that takes
    the memory. Raises ValueError for that, OSError, and what torch raises.
    """
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            claimed, size = sum(entry.file_size for entry in archive.infolist()), file.stat().st_size
        if claimed > size:
            raise ValueError(f"it claims {claimed} bytes of content in a file of {size}")
    return torch.load(file, map_location="cpu", weights_only=True)


def load_newest(directory: Path, report: Report) -> tuple[dict[str, Any], Path] | None:
    """Returns the state in the newest good checkpoint of `directory`, and its path; None if there is none.

    report: gets {"kind": "checkpoint_rejected", "path", "why"} for each newer one that is not good.
    """
    for _, _, path in _find(directory):
        try:
            return load(path), path
        except CheckpointError as error:
            report({"kind": "checkpoint_rejected", "path": str(path), "why": str(error)})
            _log.info("checkpoint %s rejected: %s", path, error)
    return None


def steps_in(directory: Path) -> dict[int, Path]:
    """Returns the checkpoints of `directory`, good or bad, by step, the oldest first."""
    return {at: path for at, is_old, path in reversed(_find(directory)) if not is_old}


def _find(directory: Path) -> list[tuple[int, bool, Path]]:
    """Returns (step, is an .old one, path) of all checkpoints, good or bad, the newest first."""
    if not directory.is_dir():
        return []
    matches = [(path, _NAME.fullmatch(path.name)) for path in directory.iterdir()]
    found = [(int(match[1]), bool(match[2]), path) for path, match in matches if match]
    return sorted(found, key=lambda item: (-item[0], item[1]))


def _write_files(folder: Path, step: int, parts: dict[str, Any]) -> int:
    """Writes a checkpoint's files and sees them to the disk; returns their size in bytes. Raises OSError."""
    folder.mkdir()
    files: dict[str, Any] = {}
    for name, part in parts.items():
        with (folder / name).open("xb") as stream:
            file = _HashedFile(stream)
            torch.save(part, file)  # type: ignore[arg-type]  # it needs write and flush
            file.sync()
        files[name] = {"bytes": file.size, "sha256": file.sha256.hexdigest()}
    manifest = {"format": FORMAT, "step": step, "torch": torch.__version__, "kfuse": __version__, "files": files}
    with (folder / _MANIFEST).open("xb") as stream:
        size = stream.write(_encode(manifest))
        stream.flush()
        os.fsync(stream.fileno())
    fsync_directory(folder)
    return size + sum(int(entry["bytes"]) for entry in files.values())


class _HashedFile:
    """Counts and hashes what torch writes. `sync` raises its error: torch would bury it under one of its own."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._error: OSError | None = None
        self.sha256, self.size = hashlib.sha256(), 0

    def write(self, data: bytes | memoryview) -> int:
        if self._error is None:
            try:
                self._stream.write(data)
                self.sha256.update(data)
                self.size += len(data)
            except OSError as error:
                self._error = error
        return len(data)

    def flush(self) -> None:
        """Nothing to do before `sync`; torch calls it."""

    def sync(self) -> None:
        """Sees what was written to the disk. Raises OSError if that, or any write before, went wrong."""
        if self._error is not None:
            raise self._error
        self._stream.flush()
        os.fsync(self._stream.fileno())


def _encode(manifest: dict[str, Any]) -> bytes:
    """Returns JSON that contains its own SHA-256. The same manifest gives the same bytes."""
    sha256 = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    return json.dumps(manifest | {"sha256": sha256}, indent=1, sort_keys=True).encode() + b"\n"
