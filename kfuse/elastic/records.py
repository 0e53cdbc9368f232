"""Passes the records that workers report from the supervisor to the recorder, in batches."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from kfuse.elastic.job import Job

Record = tuple[str, dict[str, Any]]
"""Kind (start, metrics, event, ledger or summary) and content, plain JSON values."""

_FLUSH_S = 0.1  # metrics and ledger lines wait at most this long
_KNOWN_EVENTS = 256


class Recorder(Protocol):
    """Receives all records of a job; `kfuse.observe.recorder.Recorder` writes and shows them."""

    def keep(self, records: Sequence[Record]) -> None:
        """Takes records in the order of their reports. After a lost worker, those of a step may come again."""

    def line(self, text: str) -> None:
        """Takes a line that a worker has printed."""


class Records:
    """Passes records on in batches: writing each alone would take CPU time that workers on this machine need.

    Metrics and ledger lines are passed on `_FLUSH_S` later at most; everything else at once, after what came before it.
    A lost worker loses no record: what it has sent is here.
    """

    def __init__(self, recorder: Recorder, job: Job) -> None:
        self._recorder, self._job = recorder, job
        self.furthest = -1
        """The newest step of the training under way that was reported."""
        self.progress = 0
        """Grows with each step that is reported for the first time, and with each training that starts."""
        self._waiting: list[Record] = []
        self._timer: asyncio.TimerHandle | None = None
        self._events: deque[dict[str, Any]] = deque(maxlen=_KNOWN_EVENTS)

    def add(self, kind: str, data: dict[str, Any]) -> None:
        """Takes one record. An event that is known already is dropped: a new leader may report it again."""
        if kind == "event":
            if data in self._events:
                return
            self._events.append(data)
        elif kind == "metrics" and data["step"] > self.furthest:
            self.furthest = data["step"]
            self.progress += 1
        self._waiting.append((kind, data))
        if kind not in ("metrics", "ledger"):
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_FLUSH_S, self._flush_in_time)

    def event(self, kind: str, **fields: Any) -> None:
        """An event of the supervisor's own, at the newest step."""
        self.add("event", {"step": max(self.furthest, 0), "kind": kind, **fields})

    def line(self, text: str) -> None:
        """Passes on what a worker has printed."""
        self._recorder.line(text)

    def begin_training(self) -> None:
        """Another training starts: its steps count from 0 again, and its events may be equal to the last one's."""
        self._events.clear()
        self.furthest = -1
        self.progress += 1

    def flush(self) -> None:
        """Passes on all that waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._recorder.keep(waiting)

    def _flush_in_time(self) -> None:
        try:
            self.flush()
        except Exception as error:  # a timer's error would only be printed
            self._job.end(error)
