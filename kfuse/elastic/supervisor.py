"""The supervisor: starts workers, forms views of them, and keeps what they report. It trains nothing itself.

It hosts the store that a view's workers meet at (a fresh one each generation, so that no worker's death takes it
along and no old key stays behind) and one control connection to each worker. There are two kinds of view. A planned
one (start, grow, shrink) is proposed here and announced by the leader in a step's control word, so that all workers
switch at the same step boundary. One that recovers from a loss is in force at once: survivors drop what they do.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kfuse.elastic import protocol
from kfuse.elastic.gate import Gate
from kfuse.elastic.launchers import Launcher
from kfuse.elastic.protocol import Member, View
from kfuse.elastic.workers import State, Worker, how_it_ended

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

_STOP_GRACE_S = 20.0
_BROKEN_GRACE_S = 0.1  # a lost connection is mostly a death that is about to be reported
_LAST_WORDS_S = 1.0
_KILL_GRACE_S = 1.0  # for word of a killed process's end: from a host that is cut off there is none


class Sink(Protocol):
    """Who keeps what workers report. After a loss, records of a step may come again: they count once."""

    def record(self, kind: str, data: dict[str, Any]) -> None: ...
    def line(self, text: str) -> None: ...


@dataclass(frozen=True)
class Elasticity:
    """How many workers, and what happens when one is lost."""

    count: int
    min: int
    max: int
    replace: bool = True
    """Restore the wanted number of workers after a loss; otherwise only `min`."""
    heartbeat_timeout_s: float = 10.0
    """A worker that shows no life for this long is killed."""
    max_failures: int = 5
    """Losses in a row, without a step completed in between, after which the job is given up. Workers lost together,
    as with a host, are one."""
    boot_timeout_s: float = 120.0
    restart: bool = False
    """If all workers are lost: start anew, from the last checkpoint."""


class JobFailed(RuntimeError):
    """Training cannot go on; the message says why."""


class Supervisor:
    """Runs one job to its end."""

    def __init__(self, launcher: Launcher, job: dict[str, Any], sink: Sink, elasticity: Elasticity) -> None:
        """`job` is handed to every worker as it connects (plain JSON values)."""
        self._launcher, self._job, self._sink, self._elasticity = launcher, job, sink, elasticity
        self._wanted = self._asked = elasticity.count
        self._token = secrets.token_hex(16)
        self._gate = Gate(self._token)
        self._workers: dict[int, Worker] = {}
        self._view: View | None = None
        self._store: TCPStore | None = None
        self._stopping: str | None = None
        self._done = False
        self._failures = 0
        self._furthest = -1
        self._events: deque[dict[str, Any]] = deque(maxlen=256)
        self._starting = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def run(self) -> str | None:
        """Returns when all workers have ended: the stop reason, None if training came to its own end.

        Raises JobFailed. Whatever happens, no worker is left behind.
        """
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        opening = asyncio.create_task(self._launcher.open())
        either: list[asyncio.Future[Any]] = [opening, self._over]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not opening.done():  # stopped before it began
            opening.cancel()
            return self._stopping
        try:
            self._host = opening.result()
            server = await asyncio.start_server(self._serve, self._host, 0, limit=protocol.MAX_LINE)
        except OSError as error:
            raise JobFailed(f"the launcher cannot start workers: {' '.join(str(error).split())}") from error
        self._address = f"{self._host}:{server.sockets[0].getsockname()[1]}"
        heartbeats = asyncio.create_task(self._watch_heartbeats())
        try:
            await self._start_up_to(self._wanted)
            await self._over
            return self._stopping
        finally:
            heartbeats.cancel()
            for worker in self._alive():
                worker.kill()
            server.close()
            for writer in self._connections.values():
                writer.transport.abort()
            await asyncio.gather(*self._connections, *self._tasks, heartbeats, return_exceptions=True)
            await self._launcher.close()

    def stop(self, reason: str) -> None:
        """Asks the workers to stop at the next step boundary; a second call, or a long silence, kills them."""
        if self._stopping is not None or not self._members():
            self._stopping = self._stopping or reason
            self._end()
            return
        self._stopping = reason
        self._tell(self._workers.values(), "stop", reason=reason)
        asyncio.get_running_loop().call_later(_STOP_GRACE_S, self._end)

    def _members(self) -> list[Worker]:
        """The living workers of the newest view, in rank order."""
        if self._view is None:
            return []
        workers = [self._workers[member.worker] for member in self._view.members]
        return [worker for worker in workers if worker.state is not State.ENDED]

    def _alive(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.state is not State.ENDED]

    # -- processes ------------------------------------------------------------------------------------------------

    async def _start_up_to(self, target: int) -> None:
        """Starts as many workers as are missing. One at a time: several losses may ask for it at once."""
        async with self._starting:
            newcomers = [worker for worker in self._alive() if worker.state in (State.BOOTING, State.READY)]
            staying = [worker for worker in self._members() if not worker.leaving]
            await self._start(target - len(staying) - len(newcomers))

    async def _start(self, count: int) -> None:
        for _ in range(count):
            number = len(self._workers)
            env = {
                protocol.ENV_CONTROL: self._address,
                protocol.ENV_TOKEN: self._token,
                protocol.ENV_WORKER: str(number),
            }
            worker = Worker(number, await self._launcher.start(env))
            self._workers[number] = worker
            self._spawn(self._watch(worker))

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._end(task.exception())

    async def _watch(self, worker: Worker) -> None:
        """Passes on what a worker prints, and decides what its end means."""
        lines = asyncio.create_task(self._pass_on(worker))
        status = await worker.end(_KILL_GRACE_S)
        was, worker.state = worker.state, State.ENDED
        if status is None:  # should it come back: its place is taken
            lines.cancel()
            worker.disconnect()
        left = status == 0 and (self._done or self._view is None or self._view.rank_of(worker.number) is None)
        if not (left or self._done or self._over.done()):
            await asyncio.wait([lines], timeout=0.05)  # its last words
            await self._lost(worker, was, how_it_ended(status, worker.why))
        await asyncio.wait([lines], timeout=_LAST_WORDS_S)  # what it started may hold the pipe open
        lines.cancel()
        if not self._alive() and (self._done or self._stopping):
            self._end()

    async def _pass_on(self, worker: Worker) -> None:
        async for line in worker.process.lines():
            worker.lines.append(line)
            self._sink.line(line)

    async def _watch_heartbeats(self) -> None:
        """Kills workers that show no life, or do not come up: what follows is the same as for any death."""
        limits = {State.BOOTING: self._elasticity.boot_timeout_s}
        while True:
            asleep = time.monotonic()
            await asyncio.sleep(protocol.HEARTBEAT_S)
            late = time.monotonic() - asleep - protocol.HEARTBEAT_S
            for worker in self._alive():
                worker.alive_at += late  # while this process stood still it could not hear, nor perhaps they speak
                if not worker.process.running:
                    worker.alive_at = time.monotonic()
                limit = limits.get(worker.state, self._elasticity.heartbeat_timeout_s)
                silent = time.monotonic() - worker.alive_at
                if silent > limit and not worker.why:
                    worker.why = f"showed no life for {silent:.0f} s"
                    worker.kill()

    def _end(self, error: BaseException | None = None) -> None:
        if self._over.done():
            return
        if error is not None:
            self._over.set_exception(error)
        else:
            self._over.set_result(None)

    # -- losses ---------------------------------------------------------------------------------------------------

    async def _lost(self, worker: Worker, was: State, how: str) -> None:
        """A worker ended that should not have: the survivors regroup, and another takes its place."""
        together = was is State.PROPOSED and self._view is not None and self._view.recovers
        self._failures += not together  # with another, whose loss the survivors have not recovered from yet
        rank = None if self._view is None else self._view.rank_of(worker.number)
        self._event("failure", worker=worker.number, pid=worker.pid, rank=rank, how=how)
        said = "".join(f"\n  {line}" for line in worker.lines)
        said = said and f":{said}"
        if self._stopping:
            if rank is not None:
                self._recover()  # the others still have a checkpoint to write
        elif self._view is None or (was is State.BOOTING and not self._members()):
            self._end(JobFailed(f"worker {worker.number} {how} before training began"))
        elif self._failures >= self._elasticity.max_failures:
            self._end(JobFailed(f"{self._failures} workers were lost in a row, the last one {how}{said}"))
        elif not self._members() and not self._elasticity.restart:
            why = f"no worker is left: the last one {how}; with checkpoints, training would go on"
            self._end(JobFailed(f"{why}{said}"))
        else:
            if rank is not None:
                self._recover()
            everyone = self._elasticity.replace or not self._members()
            target = self._wanted if everyone else min(self._wanted, self._elasticity.min)
            await self._start_up_to(target)
            self._propose()

    def _on_broken(self, generation: int, why: str) -> None:
        """A worker lost contact with another. If nobody has died, the same workers connect anew."""
        if self._view is not None and self._view.generation == generation:
            self._failures += 1
            if self._failures >= self._elasticity.max_failures:
                self._end(JobFailed(f"workers lose contact again and again: {why}"))
            else:
                self._recover()

    def _recover(self) -> None:
        if self._members() and not self._done:
            self._announce(self._members(), "failure", recovers=True)

    # -- messages -------------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: a worker's, once it has shown the job's token."""
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        try:
            hello = await self._gate.hello(reader, writer)
            number, pid, host = protocol.who(hello)
            worker = self._workers.get(number)
            if worker is None or worker.writer is not None:
                return
            worker.writer, worker.pid, worker.host = writer, pid, host
            self._tell([worker], "welcome", job=self._job, silence_s=self._elasticity.heartbeat_timeout_s)
            while line := await reader.readline():
                worker.alive_at = time.monotonic()
                await self._receive(worker, protocol.decode(line))
        except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError):
            pass  # a stranger, or a worker that died in the middle of a line: its process's end is what counts
        finally:
            del self._connections[task]
            writer.close()

    def _tell(self, workers: Iterable[Worker], kind: str, **fields: Any) -> None:
        for worker in workers:
            if worker.writer is not None:
                protocol.tell(worker.writer, kind, **fields)

    async def _receive(self, worker: Worker, message: dict[str, Any]) -> None:
        match message["type"]:
            case "record":
                self._keep(message["kind"], message["data"])
            case "ready":
                worker.state = State.READY
                if self._view is not None:
                    self._event("ready", worker=worker.number, boot_s=time.monotonic() - worker.started_at)
                self._propose()
            case "joined":
                self._on_joined(worker, message["generation"])
            case "broken":
                loop = asyncio.get_running_loop()
                loop.call_later(_BROKEN_GRACE_S, self._on_broken, message["generation"], message["why"])
            case "fatal":
                self._end(JobFailed(message["why"]))
            case "resize":
                await self._resize(message["workers"])
            case "replace":
                await self._replace(message["worker"])

    def _keep(self, kind: str, data: dict[str, Any]) -> None:
        if kind == "start" and self._done:  # a script may train more than once
            self._done, self._furthest = False, -1
            if self._view is not None and len(self._members()) < self._view.size:  # it took in newcomers too late
                self._recover()
        elif kind == "start" and self._furthest >= 0 and not self._elasticity.restart:
            self._end(JobFailed("the workers that had the training's state are lost; with checkpoints it would go on"))
            return
        if kind == "metrics" and data["step"] > self._furthest:  # farther than before the last loss: no crash loop
            self._furthest, self._failures = data["step"], 0
        elif kind == "event":  # a new leader may report what the old one had reported before it was lost
            if data in self._events:
                return
            self._events.append(data)
        self._sink.record(kind, data)
        if kind == "summary":
            self._done = True
            for worker in self._alive():
                if worker.joined:
                    self._tell([worker], "over")
                else:  # still booting, or waiting for the others to come to its view: too late for this job
                    worker.kill()

    def _event(self, kind: str, **fields: Any) -> None:
        self._keep("event", {"step": max(self._furthest, 0), "kind": kind, **fields})

    # -- views ----------------------------------------------------------------------------------------------------

    async def _resize(self, workers: int) -> None:
        if workers == self._asked:
            return
        self._asked = workers
        low, high = self._elasticity.min, self._elasticity.max
        allowed = min(max(workers, low), high)
        if allowed != workers:
            self._event("clipped", note=f"workers {workers} clipped to {allowed}: allowed is {low} to {high}")
        if allowed == self._wanted:
            return
        self._event("decision", workers=[self._wanted, allowed])
        self._wanted = workers = allowed
        await self._start_up_to(workers)
        self._propose()

    async def _replace(self, number: int) -> None:
        """Starts a worker in the place of a member, which leaves when the new one is ready."""
        members = self._members()
        for worker in members:
            if worker.number == number and not worker.leaving:
                worker.leaving = True
                self._event("decision", replace=number)
                await self._start_up_to(self._wanted)
                self._propose()

    def _propose(self) -> None:
        """Proposes the next planned view when what it needs is there, and the view before it is in force."""
        members = self._members()
        if self._stopping or self._done or any(worker.state is State.PROPOSED for worker in members):
            return
        ready = [worker for worker in self._alive() if worker.state is State.READY]
        booting = any(worker.state is State.BOOTING and worker.process.running for worker in self._alive())
        staying, leaving = [m for m in members if not m.leaving], [m for m in members if m.leaving]
        missing = self._wanted - len(staying)
        if not members:
            if len(ready) >= self._wanted:
                self._announce(ready[: self._wanted], "start" if self._view is None else "restart")
        elif len(members) > self._wanted:
            self._announce((staying + leaving)[: self._wanted], "shrink")
        elif ready and missing > 0 and not (booting and len(ready) < missing):
            rest = max(0, missing - len(ready))
            self._announce(
                staying + leaving[:rest] + ready[:missing], "replace" if len(members) == self._wanted else "grow"
            )

    def _announce(self, workers: list[Worker], reason: str, recovers: bool = False) -> None:
        generation = 1 if self._view is None else self._view.generation + 1
        leaving = [worker for worker in self._members() if worker not in workers]
        members = tuple(Member(worker.number, worker.pid, worker.host) for worker in workers)
        self._view = View(generation, members, self._open_store(), reason, recovers)
        for worker in workers:
            worker.state = State.PROPOSED
        self._tell(workers + leaving, "view", view=self._view.to_json())

    def _open_store(self) -> tuple[str, int]:
        """A store for the next view. The one before is closed: whoever still waits there is woken by an error."""
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else strangers at the store fill the screen
        from torch.distributed import TCPStore  # type: ignore[attr-defined] # seconds: the workers boot meanwhile

        # A socket of ours: left to itself, the store listens on all interfaces, whatever host it is given.
        listener = socket.create_server((self._host, 0), backlog=socket.SOMAXCONN)
        port = listener.getsockname()[1]
        self._store = TCPStore(self._host, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
        return self._host, port

    def _on_joined(self, worker: Worker, generation: int) -> None:
        worker.joined = True
        if self._view is None or generation != self._view.generation:
            return
        worker.state = State.MEMBER
        self._propose()
