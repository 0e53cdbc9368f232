"""Forms views: how many workers a job is to have, which are members, and when the next view replaces the newest one.

A planned view (start, restart, grow, shrink, replace, notice) is proposed here, and the leader announces it in a step's
tail, so that all workers switch at the same step boundary. One that recovers from a lost worker is active at once: the
survivors drop the step under way.
"""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import asdict
from typing import TYPE_CHECKING

from kfuse.elastic.job import Job, JobFailed, Records
from kfuse.elastic.processes import LaunchError, Processes, State, Worker, send_to_all
from kfuse.elastic.protocol import Member, View

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

_log = logging.getLogger("kfuse")


class Views:
    """The membership of one job."""

    def __init__(self, job: Job, processes: Processes, records: Records) -> None:
        self._job, self._processes, self._records = job, processes, records
        self.host = ""  # this machine's address, as workers reach it
        # The newest view's, and until all are in a planned one that of before, in this process: no lost worker takes
        # them down.
        self.store: TCPStore | None = None
        self._store_before: TCPStore | None = None
        self.inquiry = -1  # generation of the view whose workers are being asked whom they reach
        self._asked = job.wanted
        self._to_join: list[Worker] = []  # of the newest view: all that have not joined it yet, and perhaps others
        self.must_recover = False  # a worker is lost, and the view without it is not formed yet

    # -- how many workers -----------------------------------------------------------------------------------------

    async def resize(self, workers: int) -> None:
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
            job.wanted = allowed
            await self.add_up_to(allowed)
            self.propose()

    async def replace(self, number: int) -> None:
        """Starts a worker in the place of member `number`, which leaves when the new one is ready.

        Nothing happens where no GPU is free: the new worker starts beside the other one.
        """
        worker = next((member for member in self._processes.members() if member.number == number), None)
        no_gpu = self._processes.gpus and self._processes.free_gpu() is None
        if worker is None or worker.to_replace or worker.noticed or no_gpu or self._job.is_over:
            return
        worker.to_replace = True
        _log.info("replacement asked for worker %d", number)
        self._records.event("decision", replace=number)
        await self.start_another()
        self.propose()

    async def refill(self) -> None:
        """Starts others in the place of those that are lost or about to be, as `elastic.replace` says."""
        job = self._job
        if not job.is_over:
            # Those that have left their loop, while the others go on, are decided on as they end.
            wanted = job.wanted - sum(map(self.out_of_loop, self._processes.leavers()))
            all_of_them = job.settings["elastic_replace"] or not self._processes.members()
            await self.add_up_to(wanted if all_of_them else min(wanted, job.least))
        self.propose()

    async def start_another(self) -> None:
        """Starts one worker. `elastic.replace=false` may have left the job with fewer than are wanted."""
        processes = self._processes
        there = sum(not member.to_replace for member in processes.members()) + len(processes.newcomers())
        await self.add_up_to(min(self._job.wanted, there + 1))

    async def add_up_to(self, target: int) -> None:
        """Starts what is missing. If the launcher cannot start a worker, the job goes on with those it has."""
        job = self._job
        try:
            await self._processes.start_up_to(target)
        except LaunchError as error:
            alive = len(self._processes.alive())
            if not alive:
                job.end(JobFailed(f"no worker is left, and {error}"))
                return
            for worker in self._processes.members():
                worker.to_replace = False
            asked, job.wanted = job.wanted, min(job.wanted, alive)
            self._clipped(asked, job.wanted, str(error))

    def _clipped(self, asked: int, allowed: int, why: str) -> None:
        self._records.event("clipped", note=f"workers {asked} clipped to {allowed}: {why}")

    def continue_without(self, worker: Worker, how: str) -> None:
        members = [member for member in self._processes.members() if not self.out_of_loop(member)]
        to_replace = [member for member in members if member.to_replace]
        if to_replace and not worker.joined:
            to_replace[-1].to_replace = False
        else:
            self._job.wanted = max(1, len(members), self._job.wanted - 1)
        rank = self._processes.rank_of(worker)
        self._records.event("quit", worker=worker.number, pid=worker.pid, rank=rank, how=how)

    def out_of_loop(self, worker: Worker) -> bool:
        """Whether its training loop has ended, by an error or not."""
        return worker.ended_loop

    # -- views ----------------------------------------------------------------------------------------------------

    def propose(self) -> None:
        """Proposes the next planned view, once its workers are ready and the view before it is active."""
        job = self._job
        if job.stopping or job.done or self.must_recover or self.awaits_any():
            return
        if self.inquiry == job.view.generation:  # its workers wait for a view that recovers
            return
        newcomers, members = self._processes.newcomers(), self._processes.members()
        ready = [each for each in newcomers if each.state is State.READY and not (each.held and members)]
        booting = any(worker.state is State.BOOTING and worker.process.running for worker in newcomers)
        staying, replaced = [m for m in members if not m.to_replace], [m for m in members if m.to_replace]
        missing = job.wanted - len(staying)
        if not members:
            # A job that restarts goes on with those that have found room.
            if len(ready) >= max(1, job.wanted) or (job.view.generation and ready and not booting):
                self._announce(ready[: job.wanted], "restart" if job.view.generation else "start")
        elif any(member.noticed for member in members):
            unnoticed = [member for member in members if not member.noticed]
            if unnoticed or ready:  # where all are to leave, newcomers take over the state first
                self._announce(unnoticed or members + ready, "notice" if unnoticed else "grow")
        elif len(members) > job.wanted:
            self._announce((staying + replaced)[: job.wanted], "shrink")
        elif ready and missing > 0 and not (booting and len(ready) < missing):
            still_needed = replaced[: max(0 if staying else 1, missing - len(ready))]  # newcomers alone have no state
            reason = "replace" if len(members) == job.wanted else "grow"
            self._announce(staying + still_needed + ready[:missing], reason)

    def recover(self, reason: str = "failure", anew: bool = False) -> None:
        """Forms a view at once, of the view's workers that have not ended and whose training loops have not.

        Workers that were about to leave are in it, as they may have a part of the state that no other one has, and
        leave in the next one. anew: training is over, and some of them are about to begin another one.
        """
        workers = self._processes.members() + self._processes.leavers()
        members = [worker for worker in workers if not worker.why and (anew or not self.out_of_loop(worker))]
        if members and (anew or not self._job.done):
            self._announce(members, reason, recovers=True)

    def _announce(self, workers: list[Worker], reason: str, recovers: bool = False) -> None:
        generation = self._job.view.generation + 1
        staying = {worker.number for worker in workers}
        leaving = [worker for worker in self._processes.members() if worker.number not in staying]
        members = tuple(Member(worker.number, worker.pid or 0, worker.host) for worker in workers)
        # Before a planned view the workers may still meet over theirs. Else those that wait there get an error.
        self._store_before = None if recovers else self.store
        view = self._job.view = View(generation, members, self._open_store(len(members)), reason, recovers)
        for worker in workers:
            worker.state = State.PROPOSED
        self._to_join, self.must_recover = [*workers], False
        send_to_all(workers + leaving, "view", view=asdict(view))
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

    def awaits_any(self) -> bool:
        """Whether a worker of the newest view has not joined it yet. Many calls together look at each worker once."""
        while self._to_join and self._to_join[-1].state is not State.PROPOSED:
            self._to_join.pop()
        return bool(self._to_join)

    def left(self, worker: Worker) -> None:
        worker.state = State.LEFT
        if self._processes.rank_of(worker) is not None:  # a view that recovers was formed meanwhile
            self.recover()

    def joined(self, worker: Worker, generation: int) -> None:
        worker.joined = True
        if generation == self._job.view.generation:
            worker.state = State.MEMBER
            self.propose()
