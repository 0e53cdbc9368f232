"""The supervisor: starts workers, forms views of them, and passes on what they report. It trains nothing itself.

It receives the workers' messages and calls its parts: `Processes` (start, heartbeats, ends), `Roster` (views),
`Failures` (lost workers, lost contact), `Records`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
from typing import Any

from kfuse.elastic import protocol
from kfuse.elastic.failures import Failures
from kfuse.elastic.job import Job, JobFailed, Recorder, Records
from kfuse.elastic.launchers import Launcher
from kfuse.elastic.processes import LaunchError, Processes, State, Worker, send_to_all
from kfuse.elastic.roster import Roster
from kfuse.elastic.server import Server

_log = logging.getLogger("kfuse")

_SAME_SIGNAL_S = 1.0
_POLL_S = 0.05
_NOTICES_S = 0.01  # from a notice to the view without its worker: the others of its machine get theirs meanwhile
_TAKE_OVER = 0.5  # of the grace: for others to take over from workers that all have notice; then the job stops
_CATCH_UP = 0.4  # of the grace: for workers that are behind to make their steps up to the furthest one (pair averaging)
_LEFT_S = 1.0  # from a worker's leaving of its loop to a view without it: others may be about to leave it too
_BROKEN_GRACE_S = 0.1  # a lost connection mostly means a process that has ended, which is reported soon


class Supervisor:
    """Runs one job until it ends."""

    def __init__(self, launcher: Launcher, told: dict[str, Any], recorder: Recorder, job: Job) -> None:
        """told: sent to every worker as it connects (plain JSON values)."""
        self._launcher, self._told, self.job = launcher, told, job
        self.records = Records(recorder, self.job)
        if hasattr(launcher, "event"):
            launcher.event = self.records.event
        self.processes = Processes(launcher, self.job, self.records, self._ended)
        self.roster = Roster(self.job, self.processes, self.records, self.stop)
        self.failures = Failures(self.job, self.processes, self.records, self.roster)
        self.token = secrets.token_hex(16)
        self.address = ""  # host:port of the control channel
        self._server = Server(self.token, self._serve)
        self._stop_asked_at = 0.0
        self._last_noticed: Worker | None = None

    async def run(self) -> str | None:
        """Returns when all workers have ended: the stop reason, `NOT_TRAINED`, `LOOP_LEFT`, or None if training came to
        its own end.

        Raises JobFailed. Whatever happens, no worker is left behind, and all records are passed on.
        """
        self.records.open()
        try:
            return await self._run()
        finally:
            await self.records.close()

    async def _run(self) -> str | None:
        job = self.job
        self._limit_to_gpus()
        opening, over = asyncio.create_task(self._launcher.open()), asyncio.create_task(job.over.wait())
        await asyncio.wait([opening, over], return_when=asyncio.FIRST_COMPLETED)
        if not opening.done():  # stopped before it began
            opening.cancel()
            return job.stopping
        try:
            self.roster.host = opening.result()
            self.address = f"{self.roster.host}:{await self._server.open(self.roster.host)}"
        except OSError as error:
            raise LaunchError(error) from error
        self.processes.environment = {protocol.ENV_CONTROL: self.address, protocol.ENV_TOKEN: self.token}
        watching = job.run(self._watch())
        try:
            self.roster.settle()
            await over
            if job.error is not None:
                if job.saves:
                    await self._save_last(str(job.error))
                raise job.error
            return job.outcome
        finally:
            watching.cancel()
            over.cancel()
            for worker in self.processes.alive():
                worker.kill()
            await self._server.close()
            await self.processes.all_ended()
            await self._launcher.close()

    async def _save_last(self, why: str) -> None:
        """The job has failed, and workers with the training's state are left: one of them writes a last checkpoint."""
        job, workers = self.job, [each for each in self.processes.members() if each.joined and not each.why]
        able = [worker for worker in workers if not worker.ended_loop]
        if not able or not job.begun or job.done:
            return
        for worker in workers:
            worker.send("failed", why=why, saves=worker is able[0])
        loop = asyncio.get_running_loop()
        deadline = loop.time() + job.settings["elastic_grace_s"]
        while able[0].state is not State.ENDED and loop.time() < deadline:
            await asyncio.sleep(_POLL_S)

    async def _watch(self) -> None:
        """Checks heartbeats, what a worker that waits for a GPU or for room does now, and the launcher's notices."""
        time = asyncio.get_running_loop().time
        checked_at = time()
        while True:
            await asyncio.sleep(protocol.HEARTBEAT_S)
            before, checked_at = checked_at, time()
            self.processes.check_heartbeats(checked_at - before - protocol.HEARTBEAT_S)
            self.failures.check_progress(checked_at)
            self.roster.settle()
            for worker in self.processes.alive():
                if getattr(worker.process, "noticed", False):
                    self._take_notice(worker)

    def _limit_to_gpus(self) -> None:
        """Lowers the maximum, which is often a default, to the number of GPUs, with a log line and an event.

        The command lines have refused more workers than that at first.
        """
        most, gpus = self.job.most, self.processes.gpus
        if 0 < gpus < most:
            self.job.most = gpus
            note = f"at most {most} workers clipped to {gpus}: each needs a GPU of its own"
            _log.warning("%s", note)
            self.records.event("clipped", note=note)

    def stop(self, reason: str) -> None:
        """Asks the workers to stop at the next step boundary; another call, or a long silence, kills them.

        A terminal, a batch system and a shell may each pass the same signal on: calls for the same reason within
        a second count once.
        """
        loop = asyncio.get_running_loop()
        if self.job.stopping == reason and loop.time() - self._stop_asked_at < _SAME_SIGNAL_S:
            return
        self._stop_asked_at = loop.time()
        if self.job.over.is_set():  # a last checkpoint may be under way
            for worker in self.processes.alive():
                worker.kill()
        if self.job.stopping is not None or not self.processes.members():
            self.job.stopping = self.job.stopping or reason
            self.job.end()
            return
        _log.info("stop asked: %s", reason)
        self.job.stopping = reason
        send_to_all(self.processes.alive(), "stop", reason=reason)
        loop.call_later(self.job.settings["elastic_grace_s"], self.job.end)

    def _ended(self, worker: Worker, was: State, status: int | None) -> None:
        notices = [-signal.Signals[name] for name in self.job.settings["elastic_notice_signals"]]
        if was is State.BOOTING and status in notices:  # it could not catch the signal yet
            self._take_notice(worker)
        self.failures.ended(worker, was, status)

    def _take_notice(self, worker: Worker) -> None:
        """A worker's machine is about to be taken away: it leaves at a step boundary; then another is started.

        All that are given notice in a moment leave in one view.
        """
        job, call_later = self.job, asyncio.get_running_loop().call_later
        if worker.noticed or worker.said_goodbye:
            return
        worker.noticed, self._last_noticed = True, worker
        self.records.event("notice", worker=worker.number, pid=worker.pid, host=worker.host)
        _log.info("worker %d on %s was given notice", worker.number, worker.host)
        grace_s = job.settings["elastic_grace_s"]
        call_later(grace_s, self._end_unless_left, worker)
        if not (job.stopping or job.over.is_set()):
            self.roster.leave_empty()
            call_later(_NOTICES_S, self.roster.settle)
            call_later(_TAKE_OVER * grace_s, self._stop_if_nobody_stays, worker)

    def _stop_if_nobody_stays(self, noticed: Worker) -> None:
        """Where all workers still have notice, nobody has taken over: a last checkpoint remains."""
        members, job = self.processes.members(), self.job
        all_noticed = bool(members) and all(member.noticed for member in members)
        if all_noticed and noticed is self._last_noticed and not (job.stopping or job.done):
            self.stop("terminated")

    def _end_unless_left(self, worker: Worker) -> None:
        job = self.job
        if job.stopping or job.done:
            return
        if worker.state is State.LEFT:
            worker.kill()
        else:
            self.processes.end(worker, f"did not leave within {job.settings['elastic_grace_s']:g} s of its notice")

    async def _serve(self, hello: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One of a worker's two connections: see `protocol`."""
        pid, host, has_messages = int(hello["pid"]), str(hello["host"]), bool(hello.get("messages"))
        worker = self.processes.workers.get(int(hello["worker"]))
        if worker is None or worker.state is State.ENDED or len(worker.connections) != int(has_messages):
            return
        worker.connections.append(writer)
        if has_messages:
            protocol.send(writer, "welcome")
        else:
            worker.pid, worker.host, worker.address = pid, host, list(hello.get("address", []))
            limits = self.job.settings
            silence_s, signals = limits["elastic_heartbeat_timeout_s"], limits["elastic_notice_signals"]
            catch_up_s = _CATCH_UP * limits["elastic_grace_s"]
            told = {"silence_s": silence_s, "catch_up_s": catch_up_s, "notice_signals": signals}
            bounds = self.job.least, self.job.most
            worker.send("welcome", job=self._told, workers_bounds=bounds, **told)
        rest = b""
        while more := await reader.read(protocol.MAX_LINE):  # of a batch many lines at once
            worker.last_message_at = asyncio.get_running_loop().time()
            *lines, rest = (rest + more).split(b"\n")
            if len(rest) > protocol.MAX_LINE:
                return
            for line in lines:
                message = protocol.decode(line)
                try:
                    await self._receive(worker, message)
                except Exception as error:  # an error of the supervisor itself, not of the connection
                    self.job.end(error)

    async def _receive(self, worker: Worker, message: dict[str, Any]) -> None:
        """Handles a worker's message, whose other keys are those that are read here."""
        if worker.state is State.ENDED and message["type"] not in ("record", "fatal"):
            return
        match message["type"]:
            case "record":
                if message["kind"] == "summary" and worker.state is State.MEMBER:
                    for member in self.processes.members():  # all have joined; some have yet to say so
                        member.joined = True
                self._take_record(message["kind"], message["data"])
            case "ready":
                if self.job.view.generation:
                    self.records.event("ready", worker=worker.number, boot_s=worker.last_message_at - worker.started_at)
                self.failures.booted(worker)
            case "joined":
                worker.joined = True
                if message["generation"] == self.job.view.generation:
                    worker.state = State.MEMBER
                    self.roster.settle()
            case "left":  # as a planned view said; it may be in one that recovers, which was formed meanwhile
                worker.state = State.LEFT
                self.roster.settle("" if self.processes.rank_of(worker) is None else "failure")
            case "broken":  # it has lost contact with another one
                worker.lost_contact_in = message["generation"]
                loop, contact_lost = asyncio.get_running_loop(), self.failures.contact_lost
                loop.call_later(_BROKEN_GRACE_S, contact_lost, worker, message["generation"], message["why"])
            case "reached":
                await self.failures.cuts.take(worker, message)
            case "fatal" if not self.job.over.is_set():  # no worker can go on; of several only the first one's counts
                if message["event"] is not None:
                    self.records.add("event", message["event"])
                for line in message["lines"]:
                    self.records.line(line)
                self.job.end(JobFailed(message["why"]))
            case "loop_ended":
                worker.ended_loop, worker.failed_at = True, message["failed_at"]
                if not self.job.done:
                    asyncio.get_running_loop().call_later(_LEFT_S, self.failures.loop_ended, worker)
            case "resize":
                self.roster.resize(message["workers"])
            case "replace":
                self.roster.replace(message["worker"])
            case "evict":  # an audit by the others has named a worker, whose loss then is one like any other
                self.records.add("event", message["event"])
                self.processes.end(self.processes.workers[message["worker"]], message["why"])
            case "decision":  # of rank 0, for all others
                number, decision = message["number"], message["decision"]
                others = (other for other in self.processes.alive() if other is not worker)
                send_to_all(others, "decision", worker=worker.number, number=number, decision=decision)
            case "far_behind":  # pair averaging: the others have waited for it long enough, as the job is to stop
                if message["generation"] == self.job.view.generation:
                    _log.info("workers too far behind to make their steps up to the furthest one take its state")
                    self.roster.settle("stop")
            case "notice":
                self._take_notice(worker)
            case "goodbye":  # nothing follows, and no heartbeat is due any more
                worker.said_goodbye = True

    def _take_record(self, kind: str, data: dict[str, Any]) -> None:
        if kind == "start" and not self._begin(data["restarts"]):
            return
        self.records.add(kind, data)
        if kind == "summary":
            self.job.trained = self.job.done = True
            send_to_all((worker for worker in self.processes.alive() if worker.joined), "over")
            self.roster.settle()

    def _begin(self, restarts: bool) -> bool:
        """Training starts, or starts anew. False if it must not.

        restarts: a script's training can go on from its own checkpoints if all workers are lost.
        """
        job = self.job
        if job.begun and self.records.furthest >= 0 and not job.restart:
            job.end(JobFailed("the workers that had the training's state are lost"))
            return False
        if job.script and not job.begun:
            job.restart = restarts
        job.begun = True
        return True
