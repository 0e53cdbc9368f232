"""The files of a run: JSON lines a program can follow, and a summary. Figures go to `kfuse.observe.sinks` too."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO

from kfuse.elastic.protocol import encode
from kfuse.observe import flattened, write_json
from kfuse.observe.origin import origin
from kfuse.observe.sinks import Sink, Sinks
from kfuse.observe.sinks.board import Board

if TYPE_CHECKING:
    from kfuse.observe.sinks.services import About

_MOST_WAITING = 100_000  # lines of a file, some 30 MB, while the disk has no room
_JSON = json.JSONEncoder(allow_nan=False)


class RunDirectory:
    """Writes a run's records to its directory. One process owns it; the directory is made if need be.

    metrics.jsonl, events.jsonl and, when asked for, ledger.jsonl have one JSON object a line, added to what is there.
    Each call writes its line at once, and whole; within `batch`, all lines are written at the end. A number that is not
    finite becomes null.

    Where a line cannot be written (a full disk), nothing is raised: `warn` is called once, lines wait in memory, and
    when they can be written again, an event of kind "disk" says so.
    """

    def __init__(
        self,
        path: Path,
        sinks: Sequence[str] = ("tensorboard",),
        ledger: bool = False,
        warn: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """sinks: of `kfuse.observe.sinks`. ledger: whether ledger.jsonl is kept. settings: the job's.

        Raises OSError where the directory or its files cannot be made.
        """
        self.path, self.warn = path, warn
        self._settings = settings
        self.code = Path()  # the folder of the script
        path.mkdir(parents=True, exist_ok=True)
        self._metrics = _Lines(path / "metrics.jsonl")
        self._events = _Lines(path / "events.jsonl")
        self._ledger = _Lines(path / "ledger.jsonl") if ledger else None
        self._files = [file for file in (self._metrics, self._events, self._ledger) if file is not None]
        self._last_step = -1
        self._next_step: int | None = None  # the one whose record is to come; None: any may
        # What events say is missing, also of earlier processes of this run: lines of the JSON lines files, and steps of
        # workers whose samples pair averaging did not use.
        self.lines_lost = self.steps_left_out = 0
        for event in self._events.records():
            self._count_missing(event)
        self._last_entries: dict[int | None, tuple[int, int]] = {}  # of the ledger, by the worker that reports its own
        self._sinks = Sinks(map(self._sink, dict.fromkeys(sinks)), lambda text: self.warn(text))
        self._summary: Mapping[str, Any] = {}
        self._full_since: float | None = None
        self._batching = False

    @property
    def is_new(self) -> bool:
        """Whether no step is recorded in it."""
        return self._metrics.path.stat().st_size == 0

    def _sink(self, name: str) -> Sink:
        if name == "tensorboard":
            return Board(self.path / "tb")
        if name == "csv":
            from kfuse.observe.sinks.csv_file import CsvFile

            return CsvFile(self.path / "metrics.csv")
        if name == "prometheus":
            from kfuse.observe.sinks.prometheus import TextFile

            return TextFile(self.path / "metrics.prom")
        from kfuse.observe.sinks.services import Sender

        return Sender(name, *self._of_services)

    @cached_property
    def _of_services(self) -> tuple[About, dict[str, int]]:
        """What services are told of the run, and what an earlier process of it has recorded, and so sent."""
        from kfuse.observe.sinks.services import About

        about = About.of_directory(self.path, self._settings, self._metrics.last_step())
        evaluated = -1 if about.is_new else self._events.last_step("evaluation")
        return about, {"train": about.furthest, "heldout": evaluated}

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Context: lines are collected, and at its end written together: a file write a batch, not a line."""
        self._batching = True
        try:
            yield
        finally:
            self._batching = False
            self._write()

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Training begins: writes settings.json. settings: the training's, by key; the job's take their place."""
        about = {"settings": {**settings, **dict(flattened(self._settings, "."))}, "run": origin(self.code)}
        with contextlib.suppress(OSError):  # a full disk ends no training
            write_json(self.path / "settings.json", about)

    def metrics(self, record: Mapping[str, Any]) -> bool:
        """Takes one step's figures: the keys of `METRICS`, null where unknown, and `figures` and `signals` if any.

        Steps come in order. Returns False, having left it out, for one that came already: it may be reported again
        after a loss. Where steps before it have not come, an event says so.
        """
        step = record["step"]
        if step <= self._last_step:
            return False
        if self._next_step is not None and step > self._next_step:
            missing, why = [self._next_step, step - 1], "the worker that had their records was lost"
            lines = step - self._next_step
            self.event({"step": step, "kind": "records_lost", "steps": missing, "lines": lines, "why": why})
        self._last_step, self._next_step = step, step + 1
        self._metrics.add(encode(record))
        figures = record.get("figures")
        groups = {"train": record, "figures": figures} if figures else {"train": record}
        self._sinks.log(groups, step)
        self._write()
        return True

    def event(self, record: Mapping[str, Any]) -> None:
        """Takes something that happened: `kind`, `step` and whatever else it has. An absent `time` is now (Unix)."""
        first = {"time": record.get("time", time.time()), "step": record["step"], "kind": record["kind"]}
        rest = {key: _finite(value) for key, value in record.items() if key not in first}
        self._count_missing(record)
        if record["kind"] == "records_lost":
            self._next_step = max(self._next_step or 0, record["steps"][1] + 1)
        self._events.add(_JSON.encode({**first, **rest}).encode() + b"\n")
        if first["kind"] == "evaluation":
            self._sinks.log({"heldout": rest, "heldout/metrics": rest.get("metrics", {})}, first["step"])
        self._write()

    def _count_missing(self, event: Mapping[str, Any]) -> None:
        match event.get("kind"):
            case "records_lost":
                self.lines_lost += event["lines"]
            case "left_out":
                self.steps_left_out += sum(event["steps"])

    def ledger(self, record: Mapping[str, Any]) -> None:
        """Takes the samples of one micro-batch, in order, each once; drops them where no ledger was asked for.

        With pair averaging each worker reports its own, with its number as `worker`, in an order of its own.
        """
        entry = (record["step"], record["micro_batch"])
        if self._ledger is not None and entry > self._last_entries.get(record.get("worker"), (-1, -1)):
            self._know_entry(record)
            self._ledger.add(encode(record))
            self._write()

    def rewind(self, step: int, ledger: bool = False) -> None:
        """Training goes on from `step`: what was recorded of that step and later ones is to be recorded again.

        ledger: the script asks for one. Raises OSError where it cannot be made.
        """
        if ledger and self._ledger is None:
            self._ledger = _Lines(self.path / "ledger.jsonl")
            self._files.append(self._ledger)
        self._last_step, self._next_step = -1, step
        with contextlib.suppress(OSError):  # what it says of the run's end no longer holds
            (self.path / "summary.json").unlink()
        self._metrics.rewind(step, lambda record: setattr(self, "_last_step", record["step"]))
        if self._last_step >= 0:  # what a lost process had not written is reported again
            self._next_step = self._last_step + 1
        if self._ledger is not None:
            self._last_entries.clear()
            self._ledger.rewind(step, self._know_entry)
        self._sinks.rewind(self._last_step + 1)

    def _know_entry(self, record: Mapping[str, Any]) -> None:
        self._last_entries[record.get("worker")] = (record["step"], record["micro_batch"])

    def summary(self, record: Mapping[str, Any]) -> None:
        """Writes summary.json, whole or not at all. Raises OSError where it cannot be written."""
        self._summary = _finite(dict(record))
        write_json(self.path / "summary.json", self._summary)

    def close(self) -> None:
        """Closes every file, also in the middle of a batch. Closing twice does no harm."""
        self._batching = False
        self._write()
        self._full_since = None
        for file in self._files:
            if lines := file.close():
                self.warn(f"kfuse: warning: {file.path}: {lines} lines could not be written")
        self._sinks.close(self._summary)

    def _write(self) -> None:
        """Writes the waiting lines, unless a batch is being collected. Warns if they cannot be written."""
        if self._batching:
            return
        self._sinks.write()
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
            self.lines_lost += sum(dropped.values())
            for file in self._files:
                file.dropped = 0
            lost = "".join(f"; {count} lines of {name} are lost" for name, count in dropped.items())
            note = f"records could not be written for {time.time() - since:.0f} s{lost}"
            self.warn(f"kfuse: {self.path}: can be written again: {note}")
            self.event({"kind": "disk", "step": max(self._last_step, 0), "note": note})


class _Lines:
    """A file of JSON lines. Lines that cannot be written wait in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.dropped = 0  # how many lines were dropped because too many waited
        self._waiting: deque[bytes] = deque()
        self._file: BinaryIO = path.open("ab", buffering=0)
        with path.open("rb") as file:  # a kill may have torn the last line
            self._file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))

    def add(self, line: bytes) -> None:
        self._waiting.append(line)
        if len(self._waiting) > _MOST_WAITING:
            self._waiting.popleft()
            self.dropped += 1

    def write(self) -> None:
        """Writes the lines that wait. Raises OSError; then no part of a line is left behind."""
        if not self._waiting:
            return
        size, lines, written = os.fstat(self._file.fileno()).st_size, b"".join(self._waiting), 0
        try:
            while written < len(lines):  # a full disk takes a part, and then raises
                written += self._file.write(lines[written:])
        except OSError:
            whole = lines.rfind(b"\n", 0, written) + 1
            with contextlib.suppress(OSError):
                self._file.truncate(size + whole)
            self._waiting = deque(lines[whole:].splitlines(keepends=True))
            raise
        self._waiting.clear()

    def rewind(self, step: int, keep: Callable[[dict[str, Any]], None]) -> None:
        """Drops the lines of `step` and later steps, and torn ones; calls `keep` with each record that stays.

        In place, since that needs no room. Workers at steps of their own write in no common order: a line of an
        earlier step that follows a dropped one is written again.
        """

        def stays(line: bytes) -> bool:
            record = _record(line)
            if record is None or record["step"] >= step:
                return False
            keep(record)
            return True

        with self.path.open("rb") as file:
            kept = sum(map(len, itertools.takewhile(stays, file)))
            behind = list(filter(stays, file))
        self._file.truncate(kept)
        self._waiting = deque([*behind, *filter(stays, self._waiting)])

    def records(self, kind: str | None = None) -> Iterator[dict[str, Any]]:
        """What was written, of this kind; torn lines are passed over."""
        with self.path.open("rb") as file:
            yield from (record for record in map(_record, file) if record and kind in (None, record.get("kind")))

    def last_step(self, kind: str | None = None) -> int:
        """Returns the last step of the lines, of those of this kind; -1 where there is none."""
        return max((record["step"] for record in self.records(kind)), default=-1)

    def close(self) -> int:
        """Returns how many lines could not be written. None of them waits any longer."""
        self._file.close()
        lost, self.dropped = len(self._waiting) + self.dropped, 0
        self._waiting.clear()
        return lost


def _record(line: bytes) -> dict[str, Any] | None:
    """The line's record; None for a torn line."""
    try:
        record: dict[str, Any] = json.loads(line)
        return record if line.endswith(b"\n") and isinstance(record["step"], int) else None
    except (ValueError, KeyError, TypeError):
        return None


def _finite(value: Any) -> Any:
    """Returns a copy with null for every number that is not finite: JSON has no NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
