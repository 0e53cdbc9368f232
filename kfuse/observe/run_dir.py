"""The files of a run: JSON lines a program can follow, a summary, and TensorBoard's events."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

METRICS = (
    "step",
    "epoch",
    "samples",
    "loss",
    "lr",
    "batch_size",
    "micro_batches",
    "workers",
    "noise_scale",
    "noise_scale_low",
    "noise_scale_high",
    "grad_variance",
    "grad_sq",
    "grad_norm",
    "step_time_s",
    "data_wait_s",
)

_FILES = ("metrics.jsonl", "events.jsonl", "ledger.jsonl", "summary.json")
_MOST_WAITING = 100_000  # lines of a file, some 30 MB: what a disk without room is waited for with


class RunDirectory:
    """Writes a run's records to its directory. One process owns it; the directory is made if need be.

    metrics.jsonl, events.jsonl and, when asked for, ledger.jsonl have one JSON object a line, each complete
    on disk as soon as it is written, added to what is there. A number that is not finite becomes null.

    Where a line cannot be written (a full disk), nothing is raised: `warn` is called once, lines wait in memory, and
    when they can be written an event of kind "disk" says for how long they could not.
    """

    def __init__(
        self,
        path: Path,
        tensorboard: bool = True,
        ledger: bool = False,
        warn: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
    ) -> None:
        """Raises OSError where the directory or its files cannot be made."""
        self.path, self.warn = path, warn
        path.mkdir(parents=True, exist_ok=True)
        self._metrics = _Lines(path / "metrics.jsonl")
        self._events = _Lines(path / "events.jsonl")
        self._ledger = _Lines(path / "ledger.jsonl") if ledger else None
        self._last_step, self._last_entry = -1, (-1, -1)
        self._board = _Board(path / "tb") if tensorboard else None
        self._full_since: float | None = None

    @staticmethod
    def is_used(path: Path) -> bool:
        """Whether a run's records are there."""
        return any((path / name).exists() for name in _FILES)

    def another(self, name: str) -> RunDirectory:
        """A directory inside this one, for the next training of the same script. Raises OSError."""
        return RunDirectory(self.path / name, self._board is not None, self._ledger is not None, self.warn)

    def metrics(self, record: Mapping[str, Any]) -> bool:
        """One step's figures: the keys of `METRICS` and no others; one left out is unknown, so null.

        Steps come in order; one that is here already (it may be reported again after a loss) is left out: then False.
        """
        if record["step"] <= self._last_step:
            return False
        self._last_step = record["step"]
        line = {key: _finite(record.get(key)) for key in METRICS}
        self._write(self._metrics, line)
        self._show(lambda board: board.scalars("train", line, line["step"] or 0))
        return True

    def event(self, record: Mapping[str, Any]) -> None:
        """Something that happened: `kind`, `step` and whatever else it has. An absent `time` is now (Unix).

        Raises ValueError where kind or step is missing.
        """
        if "kind" not in record or "step" not in record:
            raise ValueError(f"an event needs kind and step, not only {', '.join(record) or 'nothing'}")
        first = {"time": record.get("time", time.time()), "step": record["step"], "kind": record["kind"]}
        rest = {key: _finite(value) for key, value in record.items() if key not in first}
        self._write(self._events, {**first, **rest})
        step = first["step"] or 0
        self._show(lambda board: board.text(f"events/{first['kind']}", json.dumps(rest), step))
        if first["kind"] == "evaluation":
            self._show(lambda board: board.scalars("evaluation", rest, step))

    def ledger(self, record: Mapping[str, Any]) -> None:
        """The samples of one micro-batch, in order, each once; dropped where no ledger was asked for."""
        entry = (record["step"], record["micro_batch"])
        if self._ledger is not None and entry > self._last_entry:
            self._last_entry = entry
            self._write(self._ledger, _finite(record))

    def rewind(self, step: int) -> None:
        """Training goes on from `step`: what was recorded of that step and later ones is to be recorded again."""
        last = self._metrics.rewind(step)
        self._last_step = last["step"] if last else -1
        if self._ledger is not None:
            last = self._ledger.rewind(step)
            self._last_entry = (last["step"], last["micro_batch"]) if last else (-1, -1)

    def summary(self, record: Mapping[str, Any]) -> None:
        """Writes summary.json, whole or not at all. Raises OSError where it cannot be written."""
        handle, name = tempfile.mkstemp(dir=self.path, prefix=".summary-")
        try:
            with os.fdopen(handle, "w") as file:
                os.fchmod(handle, 0o644)
                json.dump(_finite(record), file, indent=2, allow_nan=False)
                file.write("\n")
                file.flush()
                os.fsync(handle)
            os.replace(name, self.path / "summary.json")
        except BaseException:
            os.unlink(name)
            raise

    def close(self) -> None:
        """Closes every file, TensorBoard's flushed. Closing twice does no harm."""
        self._catch_up()
        for file in self._files:
            if lines := file.close():
                self.warn(f"kfuse: warning: {file.path}: {lines} lines could not be written")
        self._show(lambda board: board.close())
        self._board = None

    @property
    def _files(self) -> list[_Lines]:
        return [file for file in (self._metrics, self._events, self._ledger) if file is not None]

    def _write(self, file: _Lines, record: Mapping[str, Any]) -> None:
        file.add(record)
        self._catch_up()

    def _catch_up(self) -> None:
        """Writes what waits, or says that it cannot be written."""
        try:
            for file in self._files:
                file.write()
        except OSError as error:
            if self._full_since is None:
                self._full_since = time.time()
                why = f"{error.strerror or error}; training goes on, and records wait in memory"
                self.warn(f"kfuse: warning: {self.path}: cannot be written: {why}")
            return
        if self._full_since is not None:
            since, self._full_since = self._full_since, None
            dropped = {file.path.name: file.dropped for file in self._files if file.dropped}
            lost = "".join(f"; {count} lines of {name} are lost" for name, count in dropped.items())
            note = f"records could not be written for {time.time() - since:.0f} s{lost}"
            self.warn(f"kfuse: {self.path}: can be written again: {note}")
            self.event({"kind": "disk", "step": max(self._last_step, 0), "note": note})

    def _show(self, act: Callable[[_Board], None]) -> None:
        """On TensorBoard's file, which is given up at the first error: its writer has no way back."""
        if self._board is None:
            return
        try:
            act(self._board)
        except OSError as error:
            self._board = None
            self.warn(f"kfuse: warning: {self.path / 'tb'}: no more is written: {error.strerror or error}")


class _Lines:
    """A file of JSON lines. Each is written in one piece; one that cannot be waits, and those after it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.dropped = 0
        """How many lines were dropped because too many waited."""
        self._waiting: deque[bytes] = deque()
        self._file: BinaryIO = path.open("ab", buffering=0)

    def add(self, record: Mapping[str, Any]) -> None:
        self._waiting.append(json.dumps(record, allow_nan=False).encode() + b"\n")
        if len(self._waiting) > _MOST_WAITING:
            self._waiting.popleft()
            self.dropped += 1

    def write(self) -> None:
        """Writes the lines that wait. Raises OSError; then no part of a line is left behind."""
        while self._waiting:
            size = os.fstat(self._file.fileno()).st_size
            rest = self._waiting[0]
            try:
                while rest:  # a full disk takes a part, and then raises
                    rest = rest[self._file.write(rest) :]
            except OSError:
                with contextlib.suppress(OSError):
                    self._file.truncate(size)
                raise
            self._waiting.popleft()

    def rewind(self, step: int) -> dict[str, Any] | None:
        """Drops the lines of `step` and later steps, and what follows a torn one; returns the last record.

        In place, since that needs no room.
        """
        kept, last = 0, None
        with self.path.open("rb") as file:
            for line in file:
                record = _earlier(line, step)
                if record is None:
                    break
                kept, last = kept + len(line), record
        if kept != os.fstat(self._file.fileno()).st_size:
            self._file.truncate(kept)
        waiting = [(line, _earlier(line, step)) for line in self._waiting]
        self._waiting = deque(line for line, record in waiting if record is not None)
        return next((record for _, record in reversed(waiting) if record is not None), last)

    def close(self) -> int:
        """Returns how many lines could not be written."""
        self._file.close()
        return len(self._waiting) + self.dropped


def _earlier(line: bytes, step: int) -> dict[str, Any] | None:
    """The record, if it is whole and of an earlier step."""
    try:
        record: dict[str, Any] = json.loads(line)
        return record if line.endswith(b"\n") and record["step"] < step else None
    except (ValueError, KeyError, TypeError):
        return None


class _Board:
    """TensorBoard's event file. Imports TensorBoard, which takes a second, when it is made."""

    def __init__(self, path: Path) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard.summary import text
        from torch.utils.tensorboard.writer import FileWriter

        self._summary: Any = Summary
        self._text: Any = text
        self._writer: Any = FileWriter(str(path))

    def scalars(self, group: str, record: Mapping[str, Any], step: int) -> None:
        """All numbers of `record` in one event: a file write a step, not one a number."""
        values = [
            self._summary.Value(tag=f"{group}/{key}", simple_value=value)
            for key, value in record.items()
            if key != "step" and isinstance(value, int | float) and not isinstance(value, bool)
        ]
        self._writer.add_summary(self._summary(value=values), step)

    def text(self, tag: str, words: str, step: int) -> None:
        self._writer.add_summary(self._text(tag, words), step)

    def close(self) -> None:
        self._writer.close()


def _finite(value: Any) -> Any:
    """A copy with null for every number that is not finite: JSON has no NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
