"""The files of a run: JSON lines a program can follow, a summary, and TensorBoard's events."""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

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


class RunDirectory:
    """Writes a run's records to its directory. One process owns it; the directory is made if need be.

    metrics.jsonl, events.jsonl and, when asked for, ledger.jsonl have one JSON object a line, each complete
    on disk as soon as it is written, added to what is there. A number that is not finite becomes null.
    """

    def __init__(self, path: Path, tensorboard: bool = True, ledger: bool = False) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self._metrics = _open(path / "metrics.jsonl")
        self._events = _open(path / "events.jsonl")
        self._ledger = _open(path / "ledger.jsonl") if ledger else None
        self._last_step, self._last_entry = -1, (-1, -1)
        self._board = _Board(path / "tb") if tensorboard else None

    def metrics(self, record: Mapping[str, Any]) -> None:
        """One step's figures: the keys of `METRICS` and no others; one left out is unknown, so null.

        Steps come in order; one that is here already (it may be reported again after a loss) is left out.
        """
        if record["step"] <= self._last_step:
            return
        self._last_step = record["step"]
        line = {key: _finite(record.get(key)) for key in METRICS}
        _write(self._metrics, line)
        if self._board is not None:
            self._board.scalars("train", line, line["step"] or 0)

    def event(self, record: Mapping[str, Any]) -> None:
        """Something that happened: `kind`, `step` and whatever else it has. An absent `time` is now (Unix).

        Raises ValueError where kind or step is missing.
        """
        if "kind" not in record or "step" not in record:
            raise ValueError(f"an event needs kind and step, not only {', '.join(record) or 'nothing'}")
        first = {"time": record.get("time", time.time()), "step": record["step"], "kind": record["kind"]}
        rest = {key: _finite(value) for key, value in record.items() if key not in first}
        _write(self._events, {**first, **rest})
        if self._board is not None:
            step = first["step"] or 0
            self._board.text(f"events/{first['kind']}", json.dumps(rest), step)
            if first["kind"] == "evaluation":
                self._board.scalars("evaluation", rest, step)

    def ledger(self, record: Mapping[str, Any]) -> None:
        """The samples of one micro-batch, in order, each once; dropped where no ledger was asked for."""
        entry = (record["step"], record["micro_batch"])
        if self._ledger is not None and entry > self._last_entry:
            self._last_entry = entry
            _write(self._ledger, _finite(record))

    def rewind(self, step: int) -> None:
        """Training goes on from `step`: what was recorded of that step and later ones is to be recorded again."""
        self._metrics, last = _rewound(self._metrics, step)
        self._last_step = last["step"] if last else -1
        if self._ledger is not None:
            self._ledger, last = _rewound(self._ledger, step)
            self._last_entry = (last["step"], last["micro_batch"]) if last else (-1, -1)

    def summary(self, record: Mapping[str, Any]) -> None:
        """Writes summary.json, whole or not at all."""
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
        for file in (self._metrics, self._events, self._ledger):
            if file is not None:
                file.close()
        if self._board is not None:
            self._board.close()
            self._board = None


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


def _open(path: Path) -> TextIO:
    return path.open("a", encoding="utf-8", buffering=1)


def _rewound(file: TextIO, step: int) -> tuple[TextIO, dict[str, Any] | None]:
    """The file without the lines of `step` and later steps, or torn ones, open again; and its last record."""
    path = Path(file.name)
    file.close()
    kept, last = [], None
    for line in path.read_text().splitlines(keepends=True):
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if record["step"] < step:
                kept.append(line)
                last = record
    part = path.with_suffix(".part")
    part.write_text("".join(kept))
    os.replace(part, path)
    return _open(path), last


def _write(file: TextIO, record: Mapping[str, Any]) -> None:
    # One string, so that line buffering makes it one write.
    file.write(json.dumps(record, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    """A copy with null for every number that is not finite: JSON has no NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
