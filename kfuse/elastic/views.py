"""Forms views: which workers are members, and when the next view replaces the newest one.

A planned view (start, grow, shrink, replace) is proposed here, and the leader announces it in a step's tail, so
that all workers switch at the same step boundary. A view that recovers from a lost worker is active at once: the
survivors drop the step under way.
"""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kfuse.elastic.job import Job, JobFailed
from kfuse.elastic.processes import LaunchError, Processes, State, Worker
from kfuse.elastic.protocol import Member, View
from kfuse.elastic.records import Records

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

_log = logging.getLogger("kfuse")


class Views:
    """The membership of one job."""

    def __init__(self, job: Job, processes: Processes, records: Records) -> None:
        self._job, self._processes, self._records = job, processes, records
        self.host = ""
        """This machine's address, as workers reach it."""
        self.store: TCPStore | None = None
        """torch's TCPStore of the newest view, over which its workers connect to each other.

        Each view has its own, in this process: so no lost worker takes it down, and no old key is left in it."""
        self._asked = job.wanted
        self._not_replaced: set[int] = set()
        self._quit_events: list[dict[str, Any]] = []
        """Events about workers whose scripts have ended or left the loop. Written if the others continue."""

    # -- how many workers -----------------------------------------------------------------------------------------

    async def resize(self, workers: int) -> None:
        """A policy requests this many workers. A number out of bounds is clipped, which an event records."""
        if workers == self._asked:
            return
        self._asked = workers
        job, low, high = self._job, self._job.elasticity.min, self._job.elasticity.max
        allowed = min(max(workers, low), high)
        if allowed != workers:
            self._report_clipped(workers, allowed, f"must be {low} to {high}")
        if allowed > job.wanted and not job.takes_newcomers:
            self._report_clipped(allowed, job.wanted, "a new worker would run the script from its first training")
        elif allowed != job.wanted:
            _log.info("resize asked: %d -> %d workers", job.wanted, allowed)
            self._records.event("decision", workers=[job.wanted, allowed])
            job.wanted = allowed
            await self.add_up_to(allowed)
            self.propose()

    async def replace(self, number: int) -> None:
        """Starts a worker in the place of member `number`, which leaves when the new one is ready.

        Where no GPU is free for it nothing happens, which an event records.
        """
        for worker in self._processes.members():
            if worker.number == number and not worker.leaving and self._job.takes_newcomers:
                if self._processes.gpus and self._processes.free_gpu() is None:
                    if number not in self._not_replaced:  # a policy may ask at every step
                        self._not_replaced.add(number)
                        why = f"the new one starts beside it, and all {self._processes.gpus} GPUs are in use"
                        self._records.event("clipped", note=f"worker {number} is not replaced: {why}")
                    return
                worker.leaving = True
                _log.info("replacement asked for worker %d", number)
                self._records.event("decision", replace=number)
                await self.add_up_to(self._job.wanted)
                self.propose()

    async def add_up_to(self, target: int) -> None:
        """Starts what is missing. If the launcher cannot start a worker, the job goes on with those it has."""
        job = self._job
        try:
            await self._processes.start_up_to(target)
        except LaunchError as error:
            alive = len(self._processes.alive())
            if not alive:
                job.end(JobFailed(f"no worker is left, and the launcher cannot start another: {error}"))
                return
            for worker in self._processes.members():
                worker.leaving = False
            asked, job.wanted = job.wanted, min(job.wanted, alive)
            self._report_clipped(asked, job.wanted, f"the launcher cannot start another: {error}")

    def _report_clipped(self, asked: int, allowed: int, why: str) -> None:
        self._records.event("clipped", note=f"workers {asked} clipped to {allowed}: {why}")

    def continue_without(self, worker: Worker, how: str) -> None:
        """The job continues without this worker, and starts no other. The event is written if the others continue."""
        members = [member for member in self._processes.members() if not self.out_of_loop(member)]
        leaving = [member for member in members if member.leaving]
        if leaving and not worker.joined:
            leaving[-1].leaving = False
        else:
            self._job.wanted = max(1, len(members), self._job.wanted - 1)
        rank = self._processes.rank_of(worker)
        self._quit_events.append({"worker": worker.number, "pid": worker.pid, "rank": rank, "how": how})

    def write_quit_events(self) -> None:
        """Writes the events that `continue_without` has kept."""
        events, self._quit_events = self._quit_events, []
        for fields in events:
            self._records.event("quit", **fields)

    def out_of_loop(self, worker: Worker) -> bool:
        """Whether its training loop has ended, by an error or not."""
        return worker.ended_loop >= max(self._job.training, 1)

    # -- views ----------------------------------------------------------------------------------------------------

    def propose(self) -> None:
        """Proposes the next planned view, once its workers are ready and the view before it is active."""
        job, alive, members = self._job, self._processes.alive(), self._processes.members()
        if job.stopping or job.done or any(worker.state is State.PROPOSED for worker in members):
            return
        ready = [worker for worker in alive if worker.state is State.READY]
        booting = any(worker.state is State.BOOTING and worker.process.running for worker in alive)
        staying, leaving = [m for m in members if not m.leaving], [m for m in members if m.leaving]
        missing = job.wanted - len(staying)
        if not members:
            if len(ready) >= max(1, job.wanted):
                self._announce(ready[: job.wanted], "start" if job.view is None else "restart")
        elif len(members) > job.wanted:
            self._announce((staying + leaving)[: job.wanted], "shrink")
        elif ready and missing > 0 and not (booting and len(ready) < missing):
            still_needed = leaving[: max(0, missing - len(ready))]
            reason = "replace" if len(members) == job.wanted else "grow"
            self._announce(staying + still_needed + ready[:missing], reason)

    def recover(self, reason: str = "failure", anew: bool = False) -> None:
        """Forms a view at once, of the view's workers that have not ended and whose training loops have not.

        Workers that were about to leave are in it: they may have a part of the state that no other one has. The next
        planned view is without them.

        anew: training is over, and some of them are about to begin another one.
        """
        workers = self._processes.members() + self._processes.leavers()
        members = [worker for worker in workers if anew or not self.out_of_loop(worker)]
        if members and anew >= self._job.done:
            self._announce(members, reason, recovers=True)

    def _announce(self, workers: list[Worker], reason: str, recovers: bool = False) -> None:
        self.write_quit_events()
        generation = 1 if self._job.view is None else self._job.view.generation + 1
        leaving = [worker for worker in self._processes.members() if worker not in workers]
        members = tuple(Member(worker.number, worker.pid or 0, worker.host) for worker in workers)
        view = self._job.view = View(generation, members, self._open_store(), reason, recovers)
        for worker in workers:
            worker.state = State.PROPOSED
        for worker in workers + leaving:
            worker.send("view", view=asdict(view))
        numbers = [worker.number for worker in workers]
        _log.info("view %d formed (%s): workers %s on store %s:%d", generation, reason, numbers, *view.store)

    def _open_store(self) -> tuple[str, int]:
        """Opens a store for the next view; closes the one before: workers that still wait there get an error."""
        # Else the store prints a line for each connection that it does not know.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        from torch.distributed import TCPStore  # type: ignore[attr-defined] # seconds: the workers boot meanwhile

        # Our own socket: by itself the store listens on all interfaces, whatever host it is given.
        listener = socket.create_server((self.host, 0), backlog=socket.SOMAXCONN)
        port = listener.getsockname()[1]
        self.store = TCPStore(self.host, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
        return self.host, port

    def left(self, worker: Worker) -> None:
        """A worker has left, as a planned view said."""
        worker.state = State.LEFT
        if self._processes.rank_of(worker) is not None:  # a view that recovers was formed meanwhile
            self.recover()

    def joined(self, worker: Worker, generation: int) -> None:
        """A worker has joined the view of this generation."""
        worker.joined = True
        if self._job.view is not None and generation == self._job.view.generation:
            worker.state = State.MEMBER
            self.propose()
