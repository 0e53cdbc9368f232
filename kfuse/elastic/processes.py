"""The worker processes of a job: starts them through the launcher, and watches them until they end."""

from __future__ import annotations

import asyncio
import importlib
import math
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from kfuse.elastic import protocol
from kfuse.elastic.job import Job, JobFailed, Records
from kfuse.elastic.launchers import Launcher, WorkerProcess
from kfuse.elastic.launchers.local import how

IMPORT_THREAD = "kfuse-import"

_KEPT_LINES = 200
_TRACEBACK = "Traceback (most recent call last):\n"
# What precedes a traceback's lines: the launcher's label, and torch's own where a process group is initialised.
_RANK = re.compile("^(" + protocol.OF_RANK.format(r"\d+") + r")?(\[rank\d+\]: )?", re.MULTILINE)
_OUTPUT_S = 0.05  # for the rest of a lost worker's output: its traceback says why it ended
_LAST_OUTPUT_S = 1.0
_NO_ROOM_S = 30.0
_KILL_GRACE_S = 1.0  # for the report of a killed process's end: from a host that is cut off there is none


class State(Enum):
    BOOTING = "booting"
    READY = "ready"  # has built its model; waits for a view with it
    HELD = "held"  # as READY, but it does not reach the members yet
    PROPOSED = "proposed"  # in a view that it has not joined yet
    MEMBER = "member"
    LEFT = "left"  # as a planned view said, and its process has not ended yet
    ENDED = "ended"


NEW, GONE = (State.BOOTING, State.READY, State.HELD), (State.LEFT, State.ENDED)


@dataclass(eq=False)
class Worker:
    """What the supervisor knows about one worker."""

    number: int
    process: WorkerProcess
    state: State = State.BOOTING
    # Its two connections, once it has made them: see `protocol`.
    connections: list[asyncio.StreamWriter] = field(default_factory=list)
    pid: int | None = None  # None until it has connected
    host: str = ""
    address: list[Any] = field(default_factory=list)  # host and port at which other workers may reach it
    lost_contact_in: int = -1  # the generation of the newest view in which it has said so
    gpu: int | None = None  # the number of its GPU, until its process ends; None: the launcher chooses, or none
    asked_at: float = 0.0  # for its process; `inf` once an event has said that it waits for a slot or a node
    started_at: float = 0.0  # its process; like all of these by the event loop's clock
    last_message_at: float = 0.0
    why: str = ""  # why the supervisor killed it, if it did
    joined: bool = False  # a view, this one or one before
    to_replace: bool = False  # another worker is to take its place
    noticed: bool = False  # its machine is about to be taken away: it leaves at the next step boundary
    said_goodbye: bool = False  # its process is ending, and sends no heartbeats any more
    ended_loop: bool = False  # its training loop has ended, whether or not training is over
    failed_at: int | None = None  # the step at which an exception ended its training loop
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))
    killed: asyncio.Event = field(default_factory=asyncio.Event)

    def send(self, kind: str, **fields: Any) -> None:
        send_to_all([self], kind, **fields)

    def kill(self) -> None:
        self.killed.set()
        self.process.kill()

    def error(self) -> str:
        """The exception of the last traceback that it printed; "" if there is none."""
        _, found, trace = _RANK.sub("", "\n".join(self.lines)).rpartition(_TRACEBACK)
        exception = re.search(r"^\S.*", trace, re.MULTILINE)
        return exception[0].strip() if found and exception else ""

    def how_it_ended(self, status: int | None) -> str:
        """Text about its end. status: its exit status; None: it was killed, and its end was not reported."""
        if self.why:
            return f"{self.why} and {'cannot be reached' if status is None else 'was killed'}"
        if cause := getattr(self.process, "cause", ""):
            return str(cause)
        return "ended with an unknown exit status" if status is None else how(status)


def send_to_all(workers: Iterable[Worker], kind: str, **fields: Any) -> None:
    """Sends the same message to each that has connected."""
    protocol.send_to_all((worker.connections[0] for worker in workers if worker.connections), kind, **fields)


Ended = Callable[[Worker, State, int | None], None]


class LaunchError(JobFailed):
    """The launcher could not start a worker."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"the launcher cannot start workers: {' '.join(str(error).split()) or type(error).__name__}")


class Processes:
    """All workers that a job has started, by number."""

    def __init__(self, launcher: Launcher, job: Job, records: Records, ended: Ended) -> None:
        """ended: called with each worker that has ended, the state it was in, and its exit status (None: unknown)."""
        self._launcher, self._job, self._records, self._ended = launcher, job, records, ended
        self.workers: dict[int, Worker] = {}
        self.present: dict[int, Worker] = {}  # those among them whose end has not come, or has not been judged
        self.environment: dict[str, str] = {}  # of workers: the supervisor's address and the job's token
        # How many GPUs the machine of all workers has. 0: none, or the launcher gives each worker its own.
        self.gpus: int = getattr(launcher, "gpus", 0)
        self._importing: threading.Thread | None = None  # torch, for a view of several workers
        self._tasks: set[asyncio.Task[None]] = set()
        self._ends: set[asyncio.Task[int]] = set()  # of processes: one may come late, or never, from a cut-off host

    def alive(self) -> list[Worker]:
        return [worker for worker in self.present.values() if worker.state is not State.ENDED]

    def members(self) -> list[Worker]:
        """The workers of the newest view that have not ended, nor left it, in rank order."""
        workers = map(self.workers.__getitem__, self._job.view.workers)
        return [worker for worker in workers if worker.state not in GONE]

    def leavers(self) -> list[Worker]:
        """Workers that the newest view is without, as planned, and that have not left yet."""
        here = self.present.values()
        return [worker for worker in here if worker.state is State.MEMBER and self.rank_of(worker) is None]

    def rank_of(self, worker: Worker) -> int | None:
        return self._job.view.rank_of(worker.number)

    def free_gpus(self) -> list[int]:
        """The GPUs that no worker has, of those that are counted.

        A killed worker has its GPU until its process has ended. But where no other one trains the job does not wait.
        """
        taken = {worker.gpu for worker in (self.workers.values() if self.members() else self.alive())}
        return [gpu for gpu in range(self.gpus) if gpu not in taken]

    async def start(self) -> None:
        """Starts one worker, with a GPU of its own, by LOCAL_RANK, where they are counted. Raises LaunchError."""
        number, gpu = len(self.workers), next(iter(self.free_gpus()), None)
        own = {protocol.ENV_WORKER: str(number), **({} if gpu is None else {"LOCAL_RANK": str(gpu)})}
        if (folder := self._job.settings["log_dir"]) is not None:
            own[protocol.ENV_LOG] = str(Path(folder).expanduser().absolute() / f"worker-{number}.log")
        try:
            process = await self._launcher.start({**self.environment, **own})
        except Exception as error:  # a launcher may be the user's own
            raise LaunchError(error) from error
        now = asyncio.get_running_loop().time()
        worker = Worker(number, process, gpu=gpu, asked_at=now, started_at=now, last_message_at=now)
        self.workers[number] = self.present[number] = worker
        if self._job.over.is_set():
            worker.kill()
        task = self._job.run(self._watch(worker))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if len(self.present) > 1 and self._importing is None:
            # While the workers import theirs, as it takes seconds, on a busy machine many. The end of a job that is
            # stopped meanwhile does not wait for it.
            load, name = importlib.import_module, ["torch.distributed"]
            self._importing = threading.Thread(target=load, args=name, name=IMPORT_THREAD, daemon=True)
            self._importing.start()

    async def _watch(self, worker: Worker) -> None:
        """Passes on what a worker prints until it ends."""
        lines, end = asyncio.create_task(self._pass_on(worker)), asyncio.create_task(self._end_of(worker))
        killed = asyncio.create_task(worker.killed.wait())
        self._ends.add(end)
        end.add_done_callback(self._ends.discard)
        await asyncio.wait([end, killed], return_when=asyncio.FIRST_COMPLETED)
        killed.cancel()
        await asyncio.wait([end], timeout=_KILL_GRACE_S)
        status = end.result() if end.done() else None
        was, worker.state = worker.state, State.ENDED
        if status is None:  # cut off: if it can be reached again, it must not take part any more
            lines.cancel()
            for connection in worker.connections:
                connection.transport.abort()
        if not self._job.over.is_set():
            if status != 0:
                await asyncio.wait([lines], timeout=_OUTPUT_S)
            del self.present[worker.number]
            self._ended(worker, was, status)
        await asyncio.wait([lines], timeout=_LAST_OUTPUT_S)  # what it started may hold the pipe open
        lines.cancel()
        worker.lines.clear()  # a long job has lost many
        worker.connections.clear()

    async def _end_of(self, worker: Worker) -> int:
        status = await worker.process.wait()
        worker.gpu = None
        return status

    async def _pass_on(self, worker: Worker) -> None:
        label = f"[{worker.number}] " if self._job.most > 1 else ""
        async for line in worker.process.lines():
            worker.lines.append(line)
            self._records.line(label + line)

    def end(self, worker: Worker, why: str) -> None:
        """Kills a worker, once. Its end is then handled like any other. why: what it did."""
        if worker.state is not State.ENDED and not worker.why:
            worker.why = why
            worker.kill()

    def check_heartbeats(self, late_s: float) -> None:
        """Kills workers that send no heartbeat, or are not ready in time. Their end is then handled like any other.

        late_s: seconds since the last call in which this process was stopped, and the workers perhaps too.
        """
        settings, now = self._job.settings, asyncio.get_running_loop().time()
        for worker in self.alive():
            worker.last_message_at += late_s
            if not worker.process.running:
                worker.started_at = worker.last_message_at = now
                if now - worker.asked_at > _NO_ROOM_S:
                    worker.asked_at = math.inf
                    note = "the launcher has no slot or node for it yet"
                    self._records.event("waiting", worker=worker.number, note=note)
            slow = worker.state is State.BOOTING or worker.said_goodbye  # imports, or the interpreter's end
            silent = now - worker.last_message_at
            if silent > settings["elastic_boot_timeout_s" if slow else "elastic_heartbeat_timeout_s"]:
                why = f"sent no heartbeat for {silent:.0f} s"
                if not worker.connections and self._job.script:
                    why = f"did not call kf.init, kf.fit or kf.DataLoader within {silent:.0f} s"
                self.end(worker, why)

    async def all_ended(self) -> None:
        """Returns when all workers have ended, and their output was passed on."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for end in self._ends:
            end.cancel()
