"""Receives the records that workers report, writes them to the run directory and shows them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from kfuse.elastic.protocol import LOOP_LEFT, NOT_TRAINED
from kfuse.observe.display import Display
from kfuse.observe.run_dir import RunDirectory


class Recorder:
    """Writes and shows the records of a job.

    A script's second training has a directory of its own in the first one's: RUN_DIR/2, and so on.
    """

    directory: RunDirectory
    """Of the training under way."""
    summary: dict[str, Any] | None
    """The summary that the workers reported; None until the training under way has ended."""

    def __init__(self, directory: RunDirectory, display: Display) -> None:
        self.directory, self._display = directory, display
        directory.warn = display.line
        self._first = directory
        self._training: int | None = None
        self._trainings = 0
        self._begin()

    def _begin(self) -> None:
        self.summary = None
        self._started = time.time()
        self._last: dict[str, Any] = {}

    def keep(self, records: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Writes and shows records, in order. Raises OSError if another training's directory cannot be made."""
        with self.directory.batch():
            for kind, data in records:
                match kind:
                    case "start":
                        self._start(data)
                    case "metrics":
                        if self.directory.metrics(data):  # else it came before: a new leader sends steps again
                            self._last = data
                            self._display.metrics(data)
                    case "event":
                        self.directory.event(data)
                        self._display.event(data)
                    case "ledger":
                        self.directory.ledger(data)
                    case "summary":
                        self.summary = data
                    case "line":
                        self.line(data["text"])

    def _start(self, data: dict[str, Any]) -> None:
        if data["training"] != self._training:
            self._training = data["training"]
            self._trainings += 1
            if self._trainings > 1:
                self.close(LOOP_LEFT)
                self.directory = self._first.another(str(self._trainings))
                self._begin()
        self.directory.rewind(data["step"])
        self._display.start(data["samples"], data["steps"], f"kfuse  {self.directory.path}")

    def line(self, text: str) -> None:
        """Shows a line that a worker has printed."""
        self._display.line(text)

    def failed(self, why: str) -> None:
        """Writes the event that the job has failed. It is not shown: the command prints the reason."""
        self.directory.event({"step": self._last.get("step"), "kind": "failure", "why": why})

    def close(self, why: str | None) -> None:
        """Writes and shows the summary. If the workers reported none, it is made from the last step that they reported.

        why: the exit reason of such a summary.
        """
        summary = self.summary or {
            "steps": self._last["step"] + 1 if self._last else 0,
            "epochs": self._last.get("epoch", 0),
            "samples": self._last.get("samples", 0),
            "wall_s": time.time() - self._started,
            **{name: self._last.get(name) for name in ("loss", "batch_size", "lr", "workers")},
            **dict.fromkeys(("eval_loss", "eval_accuracy", "params_sha256")),
            "eval_metrics": {},
            "exit_reason": why,
        }
        if self.directory.lines_lost:
            summary = {**summary, "lines_lost": self.directory.lines_lost}
        try:
            self.directory.summary(summary)
        except OSError as error:
            self.line(f"kfuse: warning: {self.directory.path / 'summary.json'}: cannot be written: {error.strerror}")
        self.directory.close()
        if self.summary is None and why in ("failed", NOT_TRAINED):
            self._display.stop()
        else:
            self._display.finish(summary)
