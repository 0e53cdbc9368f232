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
from kfuse.elastic.processes import State, Worker, how_it_ended
from kfuse.elastic.protocol import Member, View

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

_STOP_GRACE_S = 20.0
_BROKEN_GRACE_S = 0.1  # a lost connection is mostly a death that is about to be reported
_LAST_WORDS_S = 1.0
_KILL_GRACE_S = 1.0  # for word of a killed process's end: from a host that is cut off there is none

# How a job ends where all workers' scripts end with status 0 before a training does.
NOT_TRAINED = "not_trained"  # without kf.fit and kf.DataLoader
LOOP_LEFT = "loop_left"  # out of the loop over a kf.DataLoader


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
    script: bool = False
    """Workers run a user's script. It may end before a training does or go on after it, and train more than once; it
    has no checkpoints of ours."""


class JobFailed(RuntimeError):
    """Training cannot go on; the message says why."""


class LaunchError(RuntimeError):
    """The launcher could not start a worker; the message says why."""


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
        self._outcome: str | None = None
        self._training = 0  # which one is under way, from 1
        self._done = False
        self._late_failure: JobFailed | None = None
        """A script that failed when its training was over."""
        self._failures = self._boot_failures = 0
        self._undecided = 0
        """Workers that have ended, and of whose end nothing has been made yet."""
        self._errors: set[tuple[object, ...]] = set()
        """Exceptions that ended workers, each with its step; since the last new step."""
        self._boot_errors: set[tuple[str, ...]] = set()
        self._waiting_told = False
        self._unsaid: list[dict[str, Any]] = []
        """Events of workers whose scripts have ended or left the loop. They are told if the others go on."""
        self._furthest = -1
        self._events: deque[dict[str, Any]] = deque(maxlen=256)
        self._starting = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def run(self) -> str | None:
        """Returns when all workers have ended: the stop reason, `NOT_TRAINED`, `LOOP_LEFT`, or None if training came to
        its own end.

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
            try:
                await self._start_up_to(self._wanted)
            except LaunchError as error:
                raise JobFailed(f"the launcher cannot start workers: {error}") from error
            self._end_if_none_left()
            await self._over
            return self._stopping or self._outcome
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
            try:
                process = await self._launcher.start(env)
            except Exception as error:  # a launcher may be the user's own
                raise LaunchError(" ".join(str(error).split()) or type(error).__name__) from error
            self._workers[number] = Worker(number, process)
            self._spawn(self._watch(self._workers[number]))

    async def _add_up_to(self, target: int) -> None:
        """As `_start_up_to`. Where the launcher cannot start a worker, the job goes on with those it has."""
        try:
            await self._start_up_to(target)
        except LaunchError as error:
            if not self._alive():
                self._end(JobFailed(f"no worker is left, and the launcher cannot start another: {error}"))
                return
            for worker in self._members():
                worker.leaving = False
            asked, self._wanted = self._wanted, min(self._wanted, len(self._alive()))
            self._event(
                "clipped", note=f"workers {asked} clipped to {self._wanted}: the launcher cannot start another: {error}"
            )

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
        self._undecided += 1
        if not self._over.done():
            if status == 0:
                self._quit(worker)
            else:
                await asyncio.wait([lines], timeout=0.05)  # the rest of its output
                if not self._done and not self._all_out(worker):
                    await self._lost(worker, was, status)
                elif self._elasticity.script and (worker.why or not worker.killed.is_set()):
                    self._failed_late(worker, status)
        self._undecided -= 1
        await asyncio.wait([lines], timeout=_LAST_WORDS_S)  # what it started may hold the pipe open
        lines.cancel()
        self._end_if_none_left()

    def _end_if_none_left(self) -> None:
        if self._alive() or self._undecided or self._starting.locked() or self._over.done():
            return
        if not (self._done or self._stopping):
            self._outcome = NOT_TRAINED if self._training == 0 else LOOP_LEFT
        self._end(self._late_failure)

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
                    if worker.writer is None and self._elasticity.script:
                        worker.why = f"did not call kf.init, kf.fit or kf.DataLoader within {silent:.0f} s"
                    worker.kill()
            self._tell_who_is_waited_for()

    def _tell_who_is_waited_for(self) -> None:
        """Once: a script that has called kf.init may take any time before it trains, but the others wait for it."""
        if self._view is not None or self._waiting_told:
            return
        ready = [worker for worker in self._alive() if worker.state is State.READY]
        late = [worker for worker in self._alive() if worker.state is State.BOOTING and worker.process.running]
        since = min((worker.started_at for worker in late), default=time.monotonic())
        if ready and time.monotonic() - since > self._elasticity.boot_timeout_s:
            self._waiting_told = True
            self._event("waiting", workers=[worker.number for worker in ready], late=[worker.number for worker in late])

    def _end(self, error: BaseException | None = None) -> None:
        if self._over.done():
            return
        if error is not None:
            self._over.set_exception(error)
        else:
            self._over.set_result(None)

    # -- losses ---------------------------------------------------------------------------------------------------

    def _rank_of(self, worker: Worker) -> int | None:
        return None if self._view is None else self._view.rank_of(worker.number)

    def _out(self, worker: Worker) -> bool:
        """Whether its training loop has ended, by an error or not."""
        return worker.ended_loop >= max(self._training, 1)

    def _all_out(self, worker: Worker) -> bool:
        """Whether this worker and the others of its view have ended their loops, this one without an error."""
        return worker.failed_at is None and all(map(self._out, [worker, *self._members()]))

    def _quit(self, worker: Worker) -> None:
        """A worker's script ended with status 0. Before training is over that is no failure, but the others must do
        without it: another one would end in the same way.
        """
        rank = self._rank_of(worker)
        if self._done or (rank is None and worker.joined):  # in good order
            return
        if rank is None:
            self._do_without(worker, "ended with exit status 0 before it used kf.fit or kf.DataLoader")
            self._propose()
            return
        self._do_without(worker, "ended with exit status 0 before training did")
        if not self._members():
            for newcomer in self._alive():  # they have no state to go on from
                if not newcomer.joined:
                    newcomer.kill()
            self._done = True
            self._outcome = NOT_TRAINED if self._training == 0 else LOOP_LEFT
        self._recover("quit")

    def _do_without(self, worker: Worker, how: str) -> None:
        """It is not replaced. The event is written if the others go on."""
        members = [member for member in self._members() if not self._out(member)]
        leaving = [member for member in members if member.leaving]
        if leaving and not worker.joined:
            leaving[-1].leaving = False
        else:
            self._wanted = max(1, len(members), self._wanted - 1)
        self._unsaid.append({"worker": worker.number, "pid": worker.pid, "rank": self._rank_of(worker), "how": how})

    def _failed_late(self, worker: Worker, status: int | None) -> None:
        """A script failed when its training was over: what was trained stays, but the job has not succeeded."""
        how, cause = self._tell_failure(worker, status)
        when = " after training had ended" if self._done else ""
        self._late_failure = self._late_failure or JobFailed(f"worker {worker.number} {how}{when}{cause}")

    def _tell_failure(self, worker: Worker, status: int | None) -> tuple[str, str]:
        """How the worker ended, and the exception that ended it if there was one, in words."""
        how = how_it_ended(status, worker.why)
        error = worker.error() if not worker.why and (status or 0) > 0 else ()
        cause = f": {error[-1]}" if error else ""
        self._event("failure", worker=worker.number, pid=worker.pid, rank=self._rank_of(worker), how=how + cause)
        return how, cause

    async def _lost(self, worker: Worker, was: State, status: int | None) -> None:
        """A worker ended that should not have: the survivors regroup, and another takes its place."""
        rank, error = self._rank_of(worker), worker.error()
        recovering = self._view is not None and self._view.recovers
        awaited = recovering and was is State.PROPOSED  # it ended before it was in the view that recovers
        # With another, whose loss the survivors have not recovered from yet, or recover from without this one.
        together = awaited or (recovering and rank is None and worker.joined)
        how, cause = self._tell_failure(worker, status)
        if self._stopping:
            if rank is not None:
                self._recover()  # the others still have a checkpoint to write
            return
        starts_anew = not self._members() and self._elasticity.restart
        if self._view is None or (was is State.BOOTING and not self._members() and (error or not starts_anew)):
            when = "before training began" if self._view is None else "before training went on"
            self._end(JobFailed(f"worker {worker.number} {how} {when}{cause}"))
            return
        if rank is None and not worker.joined and not starts_anew:
            await self._boot_failed(worker, how + cause)
            return
        self._failures += not together
        occurrence = (*error, worker.failed_at)
        repeats = bool(error) and worker.failed_at is not None and not awaited and occurrence in self._errors
        self._errors.add(occurrence)
        if repeats:
            where = f"at step {worker.failed_at}, as another did at that step"
            self._end(JobFailed(f"worker {worker.number} {how} {where}: it would do so again{cause}"))
        elif self._failures >= self._elasticity.max_failures:
            self._end(JobFailed(f"{self._failures} workers were lost in a row, the last one {how}{cause}"))
        elif not self._members() and not self._elasticity.restart:
            died = bool(worker.why) or status is None or status < 0
            self._end(JobFailed(f"no worker is left: the last one {how}{self._advice if died else ''}{cause}"))
        else:
            if rank is not None:
                self._recover()
            everyone = self._elasticity.replace or not self._members()
            target = self._wanted if everyone else min(self._wanted, self._elasticity.min)
            if self._training <= 1:  # else a new worker would run the script from its start, and train the first one
                await self._add_up_to(target)
            self._propose()

    async def _boot_failed(self, worker: Worker, how: str) -> None:
        """A newcomer's end does not end the others' training: it is tried again, and then they do without it."""
        self._boot_failures += 1
        error = worker.error()
        if (error and error in self._boot_errors) or self._boot_failures >= self._elasticity.max_failures:
            self._do_without(worker, f"{how}, as others did before they could join: no other is started")
            self._tell_unsaid()
        else:
            self._boot_errors.add(error)
            await self._add_up_to(self._wanted)
        self._propose()

    @property
    def _advice(self) -> str:
        may = not (self._elasticity.script or self._elasticity.restart)
        return "; with checkpoints, training would go on" if may else ""

    def _on_broken(self, generation: int, why: str) -> None:
        """A worker lost contact with another. If nobody has died, the same workers connect anew."""
        if self._view is not None and self._view.generation == generation:
            self._failures += 1
            if self._failures >= self._elasticity.max_failures:
                self._end(JobFailed(f"workers lose contact again and again: {why}"))
            else:
                for worker in () if self._done else filter(self._out, self._members()):
                    self._do_without(worker, "left the training loop, and the others waited for it")
                self._recover(anew=self._done)

    def _recover(self, reason: str = "failure", anew: bool = False) -> None:
        """The living workers of the view whose loops have not ended form a view of their own.

        anew: training is over, and some of them are about to begin another one.
        """
        members = [worker for worker in self._members() if anew or not self._out(worker)]
        if members and anew >= self._done:
            self._announce(members, reason, recovers=True)

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
                message = protocol.decode(line)
                try:
                    await self._receive(worker, message)
                except Exception as error:  # ours, and not the connection's
                    self._end(error)
        except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError):
            pass  # not authenticated, or a worker that died in the middle of a line: its process's end is what counts
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
                self._boot_failures = 0
                self._boot_errors.clear()
                if self._view is not None:
                    self._event("ready", worker=worker.number, boot_s=time.monotonic() - worker.started_at)
                self._propose()
            case "joined":
                self._on_joined(worker, message["generation"])
            case "broken":
                worker.ended_loop = min(worker.ended_loop, self._training - 1)  # it is in the next one
                loop = asyncio.get_running_loop()
                loop.call_later(_BROKEN_GRACE_S, self._on_broken, message["generation"], message["why"])
            case "fatal":
                self._end(JobFailed(message["why"]))
            case "loop_ended":
                worker.ended_loop, worker.failed_at = message["training"], message["failed_at"]
            case "resize":
                await self._resize(message["workers"])
            case "replace":
                await self._replace(message["worker"])

    def _keep(self, kind: str, data: dict[str, Any]) -> None:
        if kind == "start" and not self._begin(data["training"]):
            return
        if kind == "metrics" and data["step"] > self._furthest:  # farther than before the last loss: no crash loop
            self._furthest, self._failures = data["step"], 0
            self._errors.clear()
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

    def _begin(self, training: int) -> bool:
        """A training starts: the first one, the same anew, or a script's next one. False if it must not."""
        if training > self._training:
            again, self._training = self._training > 0, training
            if again:
                self._done, self._outcome, self._furthest = False, None, -1
                self._errors.clear()
                for worker in self._alive():
                    if not worker.joined:  # it would run the script from its start, and train the first one
                        worker.kill()
                self._wanted = len(self._members())
                if self._view is not None and self._wanted < self._view.size:  # it took in newcomers too late
                    self._recover()
        elif self._furthest >= 0 and not self._elasticity.restart:
            self._end(JobFailed(f"the workers that had the training's state are lost{self._advice}"))
            return False
        return True

    def _tell_unsaid(self) -> None:
        unsaid, self._unsaid = self._unsaid, []
        for fields in unsaid:
            self._event("quit", **fields)

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
        if allowed > self._wanted and (self._training > 1 or self._done):
            why = "a new worker would run the script from its first training"
            self._event("clipped", note=f"workers {allowed} clipped to {self._wanted}: {why}")
            return
        if allowed == self._wanted:
            return
        self._event("decision", workers=[self._wanted, allowed])
        self._wanted = workers = allowed
        await self._add_up_to(workers)
        self._propose()

    async def _replace(self, number: int) -> None:
        """Starts a worker in the place of a member, which leaves when the new one is ready."""
        members = self._members()
        for worker in members:
            if worker.number == number and not worker.leaving and self._training <= 1:
                worker.leaving = True
                self._event("decision", replace=number)
                await self._add_up_to(self._wanted)
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
            if len(ready) >= max(1, self._wanted):
                self._announce(ready[: self._wanted], "start" if self._view is None else "restart")
        elif len(members) > self._wanted:
            self._announce((staying + leaving)[: self._wanted], "shrink")
        elif ready and missing > 0 and not (booting and len(ready) < missing):
            rest = max(0, missing - len(ready))
            self._announce(
                staying + leaving[:rest] + ready[:missing], "replace" if len(members) == self._wanted else "grow"
            )

    def _announce(self, workers: list[Worker], reason: str, recovers: bool = False) -> None:
        self._tell_unsaid()
        generation = 1 if self._view is None else self._view.generation + 1
        leaving = [worker for worker in self._members() if worker not in workers]
        members = tuple(Member(worker.number, worker.pid or 0, worker.host) for worker in workers)
        self._view = View(generation, members, self._open_store(), reason, recovers)
        for worker in workers:
            worker.state = State.PROPOSED
        self._tell(workers + leaving, "view", view=self._view.to_json())

    def _open_store(self) -> tuple[str, int]:
        """A store for the next view. The one before is closed: workers that still wait there are woken by an error."""
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
