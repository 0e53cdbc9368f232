"""The state of one job, which the parts of the supervisor share: its limits, how far it is, its end, its records."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from kfuse.elastic.protocol import LOOP_LEFT, NOT_TRAINED, OF_STEPS, DroppedRecords, View
from kfuse.settings.tree import JobSettings

# Kind (start, metrics, event, ledger, summary, or line: what a worker has printed, as `text`), and plain content.
Record = tuple[str, dict[str, Any]]

_FLUSH_S = 0.25  # at most, until records of steps and what workers print are passed on; all else is at once
_WAIT = (*OF_STEPS, "line")  # kinds of records that wait for others
_MOST_WAITING = 100_000  # records, while the run directory's file system hangs
_SLOW_S = 10.0
_KNOWN_EVENTS = 256


class JobFailed(RuntimeError):
    """Training cannot go on; the message says why."""


class Job:
    def __init__(self, settings: JobSettings, restart: bool = False, script: bool = False) -> None:
        """settings: completed.

        restart: if all workers are lost, new ones are started, which resume from the last checkpoint; a script says so
        as it begins. script: workers run a user's script, which may end before training does, or go on after it.
        """
        self.settings, self.restart, self.script = settings, restart, script
        self.least, self.most = settings["workers_min"], settings["workers_max"] or settings["workers_count"]
        self.wanted = settings["workers_count"]  # how many workers the job is to have
        self.places = self.wanted  # for them: fewer where some stay empty after a loss (`elastic.replace=false`)
        self.view = View(0, (), ("", 0), "")  # the newest one, proposed or active; this one before the first
        self.broken = ""  # why it cannot go on (failure, quit or stop), until the next one is formed; "": it can
        self.inquiry = -1  # generation of the view whose workers are being asked whom they reach
        self.begun = False  # training has begun
        self.trained = False  # its summary has arrived
        self.done = False  # it is over: its summary has arrived, or all scripts have left it
        self.stopping: str | None = None  # why the job was asked to stop
        self.late_failure: JobFailed | None = None  # a script that failed when its training was over
        self.over = asyncio.Event()
        self.error: BaseException | None = None  # what ended the job, once `over` is set; None if it ended in order
        self._beside = set[asyncio.Task[None]]()  # see `run`: the event loop itself keeps no task alive
        self.saves = False  # whether workers that have a state write a last checkpoint before that error is raised

    def end(self, error: BaseException | None = None) -> None:
        """Ends the job; only the first call counts."""
        if not self.over.is_set():
            self.error = error
            self.over.set()

    def give_up(self, why: str) -> None:
        """Ends the job after too many losses: what the workers have is as good as before."""
        if not self.over.is_set():
            self.saves = True
            self.end(JobFailed(why))

    def run(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Runs a part of the supervisor beside the rest; an error in it ends the job."""

        def finished(task: asyncio.Task[Any]) -> None:
            self._beside.discard(task)
            if not task.cancelled() and task.exception() is not None:
                self.end(task.exception())

        task = asyncio.create_task(work)
        self._beside.add(task)
        task.add_done_callback(finished)
        return task

    @property
    def outcome(self) -> str | None:
        """How a job that did not fail has ended: the stop reason, NOT_TRAINED, LOOP_LEFT; None: by training's end."""
        if self.stopping or self.trained:
            return self.stopping
        return LOOP_LEFT if self.begun else NOT_TRAINED

    @property
    def is_over(self) -> bool:
        """Whether training has ended, or the job: too late for a new worker."""
        return self.done or self.over.is_set()


class Recorder(Protocol):
    """Receives all records of a job; `kfuse.observe.recorder.Recorder` writes and shows them."""

    def keep(self, records: Sequence[Record]) -> None:
        """Takes records in the order of their reports. After a lost worker, those of a step may come again."""


class Records:
    """Passes records on in batches, by a thread: a file system that hangs delays no heartbeat and no view.

    Where too many records wait for it those of steps are dropped, and an event says of which steps.
    """

    def __init__(self, recorder: Recorder, job: Job) -> None:
        self._recorder, self._job = recorder, job
        self.furthest = -1  # the furthest step that was reported
        self.step = 0  # the newest one: training may have gone back
        self._events: deque[dict[str, Any]] = deque(maxlen=_KNOWN_EVENTS)
        self._changed = threading.Condition()
        self._waiting: list[Record] = []
        self._dropped = DroppedRecords("the run directory could not be written, and too many records waited")
        self._idle = self._due = self._closed = False  # the thread waits for a first record; not for others
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
        elif kind == "metrics":
            self.step = data["step"]
            self.furthest = max(self.furthest, self.step)
        with self._changed:
            if len(self._waiting) >= _MOST_WAITING and kind in OF_STEPS:
                self._dropped.add(data["step"])
                return
            self._waiting.append((kind, data))
            if kind not in _WAIT:
                self._due = True
            if self._due or self._idle:
                self._changed.notify()

    def event(self, kind: str, **fields: Any) -> None:
        """An event of the supervisor's own, at the newest step."""
        self.add("event", {"step": self.step, "kind": kind, **fields})

    def line(self, text: str) -> None:
        self.add("line", {"text": text})

    async def close(self) -> None:
        """Returns when all records have been passed on; says so where it takes long."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        while self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, _SLOW_S)
            if self._thread.is_alive():
                print("kfuse: training has ended; still waiting for the run directory's file system", file=sys.stderr)

    def _pass_on(self) -> None:
        try:
            while batch := self._next_batch():
                self._recorder.keep(batch)
        except Exception as error:
            self._loop.call_soon_threadsafe(self._job.end, error)

    def _next_batch(self) -> list[Record]:
        """All records that wait, once there are any; none at the end.

        While records of steps keep coming, the thread wakes up once for those of `_FLUSH_S`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._due or self._closed, _FLUSH_S)  # since the last batch
            self._idle = True
            self._changed.wait_for(lambda: self._waiting or self._closed)
            self._idle = self._due = False
            batch, self._waiting = self._waiting, []
            if (event := self._dropped.take()) is not None:
                batch.append(("event", event))
            return batch
