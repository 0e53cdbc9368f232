"""Decides who trains next: which view replaces the newest one, how many workers are started, and whom to kill.

`plan` decides it from who is there and what is wanted, and changes nothing; `Roster` carries it out.

A planned view (start, restart, grow, shrink, replace, notice) is announced by the leader in a step's tail, so that all
workers switch at the same step boundary. One that recovers from a lost worker is active at once: the survivors drop the
step under way.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from kfuse.elastic.job import Job, JobFailed, Records
from kfuse.elastic.processes import GONE, NEW, LaunchError, Processes, State, Worker, send_to_all
from kfuse.elastic.protocol import Member, View

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

_log = logging.getLogger("kfuse")

_CHANGES_S = 20e-6  # a worker of the view: changes that come meanwhile are decided on together; a view takes as long


@dataclass(frozen=True)
class Plan:
    """What is to be done now."""

    members: Sequence[Worker] = ()  # of the next view, in rank order; none: the newest one stays
    reason: str = ""
    recovers: bool = False
    start: int = 0  # how many workers
    kill: Sequence[Worker] = ()
    stop: bool = False  # all members were given notice, and nobody comes who could take over


def plan(workers: Mapping[int, Worker], job: Job, room: int | None) -> Plan:
    """Decides what is to be done.

    workers: by number, in the order of their starts; one that has ended is among them until its end was judged.
    room: for so many more workers there is a GPU; None: GPUs are not counted.
    """
    in_view = [workers[number] for number in job.view.workers if number in workers]
    members = [worker for worker in in_view if worker.state not in GONE]
    others = [each for each in workers.values() if job.view.rank_of(each.number) is None or each.state in GONE]
    newcomers = [each for each in others if each.state in NEW and not each.noticed]
    found, goes_on = Plan(), not (job.stopping or job.done)
    if job.broken:
        # Workers that were about to leave may have a part of the state that no other one has.
        those = [*members, *(each for each in others if each.state is State.MEMBER)]
        found = Plan([each for each in those if not (each.why or each.ended_loop)], job.broken, recovers=True)
    awaited = any(worker.state in (State.PROPOSED, State.ENDED) for worker in in_view)
    # Workers that are asked whom they reach wait for a view that recovers.
    if goes_on and not (found.members or awaited or job.inquiry == job.view.generation):
        found = _planned(members, newcomers, job)
    missing = job.places - _there(members, others) if goes_on else 0
    start = max(0, missing if room is None else min(missing, room))
    # They come too late for this training, or were given notice and have nothing to hand over.
    of_no_use = [w for w in workers.values() if (job.done and not w.joined) or (w.noticed and w.state in NEW)]
    kill = [each for each in of_no_use if each.state is not State.ENDED and not each.killed.is_set()]
    comes = any(each.state is State.ENDED for each in others) or any(each.state is not State.HELD for each in newcomers)
    stop = goes_on and bool(members) and all(each.noticed for each in members) and not (start or comes)
    return replace(found, start=start, kill=kill, stop=stop)


def _planned(members: Sequence[Worker], newcomers: Sequence[Worker], job: Job) -> Plan:
    ready = [each for each in newcomers if each.state is State.READY or (each.state is State.HELD and not members)]
    booting = any(each.state is State.BOOTING and each.process.running for each in newcomers)
    staying, replaced = [m for m in members if not m.to_replace], [m for m in members if m.to_replace]
    missing = job.wanted - len(staying)
    if not members:
        # A job that restarts goes on with those that have found room.
        if len(ready) >= max(1, job.wanted) or (job.view.generation and ready and not booting):
            return Plan(ready[: job.wanted], "restart" if job.view.generation else "start")
    elif any(member.noticed for member in members):
        unnoticed = [member for member in members if not member.noticed]
        if unnoticed or ready:  # where all are to leave, newcomers take over the state first
            return Plan(unnoticed or [*members, *ready], "notice" if unnoticed else "grow")
    elif len(members) > job.wanted:
        return Plan((staying + replaced)[: job.wanted], "shrink")
    elif ready and missing > 0 and not (booting and len(ready) < missing):
        still_needed = replaced[: max(0 if staying else 1, missing - len(ready))]  # newcomers alone have no state
        reason = "replace" if len(members) == job.wanted else "grow"
        return Plan([*staying, *still_needed, *ready[:missing]], reason)
    return Plan()


def _there(members: Sequence[Worker], others: Sequence[Worker]) -> int:
    """How many places are taken.

    One that was given notice has its place until it has ended: the start of another takes a processor, perhaps of
    those that take over. But where all members were given notice, others start at once.
    """
    all_noticed = all(member.noticed for member in members)
    count = sum(not (member.to_replace or (member.noticed and all_noticed)) for member in members)
    for each in others:
        if each.state is State.ENDED:  # and not judged yet
            count += 1
        elif each.noticed:
            count += not all_noticed
        else:  # one that has left its loop while the others go on is judged as it ends
            count += each.state in NEW or (each.ended_loop and each.state is not State.LEFT)
    return count


class Roster:
    """Carries out what `plan` decides."""

    def __init__(self, job: Job, processes: Processes, records: Records, stop: Callable[[str], None]) -> None:
        """stop: asks all workers to stop, for this reason."""
        self._job, self._processes, self._records, self._stop = job, processes, records, stop
        self.host = ""  # this machine's address, as workers reach it
        # The newest view's, and until all are in a planned one that of before, in this process: no lost worker takes
        # them down.
        self.store: TCPStore | None = None
        self._store_before: TCPStore | None = None
        self._asked = job.wanted
        self._settling = self._starting = False  # `_settle` is about to run; a worker is being started

    # -- how many workers -----------------------------------------------------------------------------------------

    def resize(self, workers: int) -> None:
        """A policy requests this many workers. A number out of bounds is clipped, which an event records."""
        if workers == self._asked:
            return
        self._asked = workers
        job, low, high = self._job, self._job.least, self._job.most
        allowed = min(max(workers, low), high)
        if allowed != workers:
            self._clipped(workers, allowed, f"must be {low} to {high}")
        if allowed != job.wanted and not job.is_over:
            _log.info("resize asked: %d -> %d workers", job.wanted, allowed)
            self._records.event("decision", workers=[job.wanted, allowed])
            job.wanted = job.places = allowed
            self.settle()

    def replace(self, number: int) -> None:
        """Starts a worker in the place of member `number`, which leaves when the new one is ready.

        Nothing happens where no GPU is free: the new worker starts beside the other one.
        """
        worker = next((member for member in self._processes.members() if member.number == number), None)
        no_gpu = self._processes.gpus and not self._processes.free_gpus()
        if worker is None or worker.to_replace or worker.noticed or no_gpu or self._job.is_over:
            return
        worker.to_replace = True
        _log.info("replacement asked for worker %d", number)
        self._records.event("decision", replace=number)
        self.settle()

    def _clipped(self, asked: int, allowed: int, why: str) -> None:
        self._records.event("clipped", note=f"workers {asked} clipped to {allowed}: {why}")

    def leave_empty(self) -> None:
        """A worker is lost, or about to be: with `elastic.replace=false` its place is filled where too few stay."""
        job, members = self._job, self._processes.members()
        if not members:
            job.places = job.wanted
        elif not job.settings["elastic_replace"]:
            newcomers = [each for each in self._processes.alive() if each.state in NEW]
            there = sum(not (each.to_replace or each.noticed) for each in members + newcomers)
            job.places = max(min(job.wanted, job.least), min(job.places, there))

    def continue_without(self, worker: Worker, how: str) -> None:
        """No other worker is started in the place of one that has ended."""
        job, members = self._job, [member for member in self._processes.members() if not member.ended_loop]
        to_replace = [member for member in members if member.to_replace]
        if to_replace and not worker.joined:
            to_replace[-1].to_replace = False
        else:
            job.wanted, job.places = max(1, len(members), job.wanted - 1), job.places - 1
        rank = job.view.rank_of(worker.number)
        self._records.event("quit", worker=worker.number, pid=worker.pid, rank=rank, how=how)

    # -- carrying it out ------------------------------------------------------------------------------------------

    def settle(self, broken: str = "") -> None:
        """Has done, in a moment, what `plan` decides then: once for all changes until then.

        broken: why the newest view cannot go on; "": it can.
        """
        self._job.broken = self._job.broken or broken
        if not self._settling:
            self._settling = True
            self._job.run(self._settle())

    async def _settle(self) -> None:
        job, processes = self._job, self._processes
        await asyncio.sleep(_CHANGES_S * job.view.size)
        self._settling = False
        if job.over.is_set():
            return
        room = len(processes.free_gpus()) if processes.gpus else None
        found, job.broken = plan(processes.present, job, room), ""
        for worker in found.kill:
            worker.kill()
        if found.members:
            self._announce(found.members, found.reason, found.recovers)
        if found.stop:
            self._stop("terminated")
        if found.start and not self._starting:
            self._starting = True
            job.run(self._start(found.start))
        elif not (self._starting or processes.present):
            job.end(job.late_failure)

    async def _start(self, workers: int) -> None:
        """Starts so many workers; what is missing then is decided anew."""
        try:
            for _ in range(workers):
                await self._processes.start()
        except LaunchError as error:
            self._go_on_with_those_there(error)
        self._starting = False
        self.settle()

    def _go_on_with_those_there(self, error: LaunchError) -> None:
        job, alive = self._job, len(self._processes.alive())
        if not alive:
            job.end(JobFailed(f"no worker is left, and {error}") if self._processes.workers else error)
            return
        for worker in self._processes.members():
            worker.to_replace = False
        asked, job.wanted = job.wanted, min(job.wanted, alive)
        job.places -= plan(self._processes.present, job, room=None).start
        self._clipped(asked, job.wanted, str(error))

    def _announce(self, workers: Sequence[Worker], reason: str, recovers: bool) -> None:
        generation = self._job.view.generation + 1
        staying = {worker.number for worker in workers}
        leaving = [worker for worker in self._processes.members() if worker.number not in staying]
        members = tuple(Member(worker.number, worker.pid or 0, worker.host) for worker in workers)
        # Before a planned view the workers may still meet over theirs. Else those that wait there get an error.
        self._store_before = None if recovers else self.store
        view = self._job.view = View(generation, members, self._open_store(len(members)), reason, recovers)
        for worker in workers:
            worker.state = State.PROPOSED
        send_to_all([*workers, *leaving], "view", view=asdict(view))
        numbers = [worker.number for worker in workers]
        _log.info("view %d formed (%s): workers %s on store %s:%d", generation, reason, numbers, *view.store)

    def _open_store(self, workers: int) -> tuple[str, int]:
        """Opens a store for the next view, of so many workers: for one alone none is needed."""
        if workers == 1:
            self.store = None
            return self.host, 0
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # `Processes` has begun to import it

        # Else the store prints a line for each connection that it does not know.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        # Our own socket: by itself the store listens on all interfaces, whatever host it is given.
        family = min(found[0] for found in socket.getaddrinfo(self.host, 0, type=socket.SOCK_STREAM))  # IPv4 if it can
        listener = socket.create_server((self.host, 0), family=family, backlog=socket.SOMAXCONN)
        port = listener.getsockname()[1]
        self.store = TCPStore(self.host, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
        return self.host, port
