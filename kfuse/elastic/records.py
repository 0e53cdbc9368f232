"""Passes what workers report and print to the recorder, in batches, in a thread of its own."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from kfuse.elastic import protocol
from kfuse.elastic.job import Job

Record = tuple[str, dict[str, Any]]
"""Kind (start, metrics, event, ledger, summary, or line: what a worker has printed, as `text`), and plain content."""

_FLUSH_S = 0.1  # a record waits so long for others
_MOST_WAITING = 100_000  # records, while the run directory's file system hangs
_WAITS_LONG_S = 10.0
_KNOWN_EVENTS = 256


class Recorder(Protocol):
    """Receives all records of a job; `kfuse.observe.recorder.Recorder` writes and shows them."""

    def keep(self, records: Sequence[Record]) -> None:
        """Takes records in the order of their reports. After a lost worker, those of a step may come again."""


class Records:
    """Passes records on in batches: writing each alone would take CPU time that workers on this machine need.

    A thread does it, so that a file system that hangs delays no heartbeat and no view. Where too many records wait for
    it those of steps are dropped, and an event says of which steps.
    """

    def __init__(self, recorder: Recorder, job: Job, most: int = _MOST_WAITING) -> None:
        """most: how many records may wait before those of steps are dropped."""
        self._recorder, self._job, self._most = recorder, job, most
        self.furthest = -1
        """The newest step of the training under way that was reported."""
        self.progress = 0
        """Grows with each step that is reported for the first time, and with each training that starts."""
        self._events: deque[dict[str, Any]] = deque(maxlen=_KNOWN_EVENTS)
        self._changed = threading.Condition()
        self._waiting: list[Record] = []
        self._losses = protocol.Losses("the run directory could not be written, and too many records waited")
        self._closed = False
        self._thread = threading.Thread(target=self._pass_on, name="kfuse-records", daemon=True)

    def open(self) -> None:
        """Begins to pass records on. Called in the job's event loop; an error of the recorder ends the job there."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def add(self, kind: str, data: dict[str, Any]) -> None:
        """Takes one record. An event that is known already is dropped: a new leader may report it again."""
        if kind == "event":
            if data in self._events:
                return
            self._events.append(data)
        elif kind == "metrics" and data["step"] > self.furthest:
            self.furthest = data["step"]
            self.progress += 1
        with self._changed:
            if len(self._waiting) >= self._most and kind in protocol.OF_STEPS:
                self._losses.add(data["step"])
                return
            self._waiting.append((kind, data))
            self._changed.notify()

    def event(self, kind: str, **fields: Any) -> None:
        """An event of the supervisor's own, at the newest step."""
        self.add("event", {"step": max(self.furthest, 0), "kind": kind, **fields})

    def line(self, text: str) -> None:
        """Takes a line that a worker has printed."""
        self.add("line", {"text": text})

    def begin_training(self) -> None:
        """Another training starts: its steps count from 0 again, and its events may be equal to the last one's."""
        self._events.clear()
        self.furthest = -1
        self.progress += 1

    async def close(self) -> None:
        """Returns when all records have been passed on, however long that takes; says so where it takes long."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        while self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, _WAITS_LONG_S)
            if self._thread.is_alive():
                print("kfuse: training has ended; still waiting for the run directory's file system", file=sys.stderr)

    def _pass_on(self) -> None:
        try:
            while batch := self._next_batch():
                self._recorder.keep(batch)
        except Exception as error:
            self._loop.call_soon_threadsafe(self._job.end, error)

    def _next_batch(self) -> list[Record]:
        """All records that wait, once there are any; none where no more come."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            self._changed.wait_for(lambda: self._closed, _FLUSH_S)
            batch, self._waiting = self._waiting, []
            if (event := self._losses.take()) is not None:
                batch.append(("event", event))
            return batch
