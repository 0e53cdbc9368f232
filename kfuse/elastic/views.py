"""Forms views: which workers are members, when the next view replaces the newest one, and what a lost worker means.

A planned view (start, grow, shrink, replace) is proposed here, and the leader announces it in a step's tail, so that
all workers switch at the same step boundary. One that recovers from a lost worker is active at once: the survivors drop
the step under way.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from kfuse.elastic.cuts import Cuts
from kfuse.elastic.job import Job, JobFailed, Records
from kfuse.elastic.processes import LaunchError, Processes, State, Worker, send_to_all
from kfuse.elastic.protocol import Member, View

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

_log = logging.getLogger("kfuse")

_LOSSES_S = 20e-6  # a worker of the view: losses that come meanwhile are handled together; forming it takes as long


@dataclass
class _Row:
    """Workers lost in a row, and the exceptions that ended them, each with its step if one was under way."""

    lost: int = 0
    contacts: int = 0  # how many of those are losses of contact, without a lost worker
    errors: set[tuple[str, int | None]] = field(default_factory=set)


class Views:
    """The membership of one job."""

    def __init__(self, job: Job, processes: Processes, records: Records) -> None:
        self._job, self._processes, self._records = job, processes, records
        self.host = ""  # this machine's address, as workers reach it
        self.store: TCPStore | None = None  # the newest view's, in this process: no lost worker takes it down
        self.cuts = Cuts(job, processes, records)
        self._inquiry = -1  # generation of the view whose workers are being asked whom they reach
        self._asked = job.wanted
        self._since_step = _Row()  # workers lost since the last new step
        self._since_boot = _Row()  # newcomers lost since the last one that has booted
        self._progress = 0  # `Records.progress` when the last lost worker was counted
        self._to_join: list[Worker] = []  # of the newest view: all that have not joined it yet, and perhaps others
        self._must_recover = False  # a worker is lost, and the view without it is not formed yet
        self._recovering: asyncio.Task[None] | None = None  # what forms it, and starts others

    # -- how many workers -----------------------------------------------------------------------------------------

    async def resize(self, workers: int) -> None:
        """A policy requests this many workers. A number out of bounds is clipped, which an event records."""
        if workers == self._asked:
            return
        self._asked = workers
        job, low, high = self._job, self._job.elasticity.min, self._job.elasticity.max
        allowed = min(max(workers, low), high)
        if allowed != workers:
            self._clipped(workers, allowed, f"must be {low} to {high}")
        if allowed > job.wanted and not job.takes_newcomers:
            self._clipped(allowed, job.wanted, "a new worker would run the script from its first training")
        elif allowed != job.wanted:
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
        if worker is None or worker.to_replace or worker.noticed or no_gpu or not self._job.takes_newcomers:
            return
        worker.to_replace = True
        _log.info("replacement asked for worker %d", number)
        self._records.event("decision", replace=number)
        await self.add_up_to(self._job.wanted)
        self.propose()

    async def refill(self) -> None:
        """Starts others in the place of those that are lost or about to be, as `elastic.replace` says."""
        job, limits = self._job, self._job.elasticity
        if job.takes_newcomers:
            # Those that have left their loop, while the others go on, are decided on as they end.
            wanted = job.wanted - sum(map(self.out_of_loop, self._processes.leavers()))
            all_of_them = limits.replace or not self._processes.members()
            await self.add_up_to(wanted if all_of_them else min(wanted, limits.min))
        self.propose()

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
        return worker.ended_loop >= max(self._job.training, 1)

    # -- views ----------------------------------------------------------------------------------------------------

    def propose(self) -> None:
        """Proposes the next planned view, once its workers are ready and the view before it is active."""
        job = self._job
        if job.stopping or job.done or self._must_recover or self._awaits_any():
            return
        if self._inquiry == job.view.generation:  # its workers wait for a view that recovers
            return
        newcomers, members = self._processes.newcomers(), self._processes.members()
        ready = [each for each in newcomers if each.state is State.READY and not (each.held and members)]
        booting = any(worker.state is State.BOOTING and worker.process.running for worker in newcomers)
        staying, replaced = [m for m in members if not m.to_replace], [m for m in members if m.to_replace]
        missing = job.wanted - len(staying)
        if not members:
            if len(ready) >= max(1, job.wanted):
                self._announce(ready[: job.wanted], "restart" if job.view.generation else "start")
        elif any(member.noticed for member in members):
            unnoticed = [member for member in members if not member.noticed]
            if unnoticed or ready:  # where all are to leave, newcomers take over the state first
                self._announce(unnoticed or members + ready, "notice" if unnoticed else "grow")
        elif len(members) > job.wanted:
            self._announce((staying + replaced)[: job.wanted], "shrink")
        elif ready and missing > 0 and not (booting and len(ready) < missing):
            still_needed = replaced[: max(not staying, missing - len(ready))]  # newcomers alone have no state
            reason = "replace" if len(members) == job.wanted else "grow"
            self._announce(staying + still_needed + ready[:missing], reason)

    def recover(self, reason: str = "failure", anew: bool = False) -> None:
        """Forms a view at once, of the view's workers that have not ended and whose training loops have not.

        Workers that were about to leave are in it, as they may have a part of the state that no other one has, and
        leave in the next one. anew: training is over, and some of them are about to begin another one.
        """
        workers = self._processes.members() + self._processes.leavers()
        members = [worker for worker in workers if not worker.why and (anew or not self.out_of_loop(worker))]
        if members and anew >= self._job.done:
            self._announce(members, reason, recovers=True)

    def _announce(self, workers: list[Worker], reason: str, recovers: bool = False) -> None:
        generation = self._job.view.generation + 1
        staying = {worker.number for worker in workers}
        leaving = [worker for worker in self._processes.members() if worker.number not in staying]
        members = tuple(Member(worker.number, worker.pid or 0, worker.host) for worker in workers)
        view = self._job.view = View(generation, members, self._open_store(len(members)), reason, recovers)
        for worker in workers:
            worker.state = State.PROPOSED
        self._to_join, self._must_recover = [*workers], False
        send_to_all(workers + leaving, "view", view=asdict(view))
        numbers = [worker.number for worker in workers]
        _log.info("view %d formed (%s): workers %s on store %s:%d", generation, reason, numbers, *view.store)

    def _open_store(self, workers: int) -> tuple[str, int]:
        """Opens a store for the next view, of so many workers: for one alone none is needed.

        Closes the one before: workers that still wait there get an error.
        """
        if workers == 1:
            self.store = None
            return self.host, 0
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # `Processes` has begun to import it

        # Else the store prints a line for each connection that it does not know.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        # Our own socket: by itself the store listens on all interfaces, whatever host it is given.
        listener = socket.create_server((self.host, 0), backlog=socket.SOMAXCONN)
        port = listener.getsockname()[1]
        self.store = TCPStore(self.host, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
        return self.host, port

    def _awaits_any(self) -> bool:
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

    # -- lost workers ------------------------------------------------------------------------------------------------

    def booted(self, worker: Worker) -> None:
        """A new worker is ready to join."""
        self._since_boot = _Row()
        worker.state = State.READY
        self.cuts.hold(worker, then=self.propose)
        self.propose()

    async def ended(self, worker: Worker, was: State, status: int | None) -> None:
        """A worker's process has ended. was: its state before that; status: None if its end was not reported."""
        job = self._job
        if worker.noticed and self._processes.rank_of(worker) is None and (status == 0 or not worker.joined):
            # It has left, or had nothing to hand over. Another is started only now: that takes a processor, perhaps of
            # those that took over.
            if not (job.stopping or job.done):
                await self.refill()
            return
        if status == 0:
            self._quit(worker, was)
        elif not job.done and not self._all_out_of_loop(worker):
            await self._lost(worker, was, status)
        elif job.elasticity.script and (worker.why or not worker.killed.is_set()):
            # A script failed when its training was over: what was trained stays, but the job has not succeeded.
            how, cause = self._report_failure(worker, status)
            when = " after training had ended" if job.done else ""
            job.late_failure = job.late_failure or JobFailed(f"worker {worker.number} {how}{when}{cause}")
            self._training_is_left()

    def contact_lost(self, worker: Worker, generation: int, why: str) -> None:
        """A worker of this generation lost contact with another. If none has ended, the same workers form a new view.

        One that has not come to a proposed view, or is to leave, may tell the generation before.
        """
        job = self._job
        if self._must_recover:  # a view is about to be formed
            return
        proposed = not job.view.recovers and (worker.state is State.PROPOSED or worker in self._processes.leavers())
        if generation != job.view.generation and not (proposed and generation == job.view.generation - 1):
            return
        self._forget_before_progress()
        if not self._since_step.contacts:  # it may have been a moment's
            self._regroup(why)
        elif self._inquiry != job.view.generation:
            self._inquiry = job.view.generation
            job.run(self._inquire(why))

    def _regroup(self, why: str) -> None:
        """The same workers form a new view."""
        job, row = self._job, self._since_step
        row.lost, row.contacts = row.lost + 1, row.contacts + 1
        if row.lost >= job.elasticity.max_failures:
            job.give_up(f"workers lose contact again and again: {why}")
            return
        _log.info("contact lost in view %d: %s", job.view.generation, why)
        self.recover(anew=job.done)  # without those that have left their loop: their ends tell whether they are lost

    async def _inquire(self, why: str) -> None:
        """Contact was lost again: where some workers do not reach each other the others go on without one side."""
        row, evicted = self._since_step, await self.cuts.evict()
        if evicted:
            row.lost, row.contacts = row.lost - row.contacts, 0  # these and the loss of those that go are one
        elif evicted is False:
            self._regroup(why)

    def _forget_before_progress(self) -> None:
        """Resets the counts if a step was completed since: with progress in between, lost workers are no crash loop."""
        if self._records.progress > self._progress:
            self._progress, self._since_step = self._records.progress, _Row()

    def _training_is_left(self) -> None:
        """Its workers have ended or left its loop: those that were to join it have none of its state, and end too."""
        for newcomer in self._processes.alive():
            if not newcomer.joined:
                newcomer.kill()
        self._job.done = True

    def _all_out_of_loop(self, worker: Worker) -> bool:
        """Whether this worker and the others that train have ended their loops, this one without an error."""
        if worker.failed_at is not None or not self.out_of_loop(worker):
            return False
        return all(self.out_of_loop(member) for member in self._processes.members() if member.joined)

    def _quit(self, worker: Worker, was: State) -> None:
        """A worker's script ended with status 0. Before training is over that is no failure, but the others must do
        without it: another one would end in the same way.
        """
        rank = self._processes.rank_of(worker)
        if self._job.done or was is State.LEFT:
            return
        if rank is None and not worker.joined:
            self.continue_without(worker, "ended with exit status 0 before it used kf.fit or kf.DataLoader")
            self.propose()
            return
        self.continue_without(worker, "ended with exit status 0 before training did")
        if not self._processes.members():
            self._training_is_left()
        if rank is not None:
            self.recover("quit")

    def _report_failure(self, worker: Worker, status: int | None) -> tuple[str, str]:
        """Reports a failure. Returns how the worker ended, and its exception, or "", as texts for messages."""
        how, rank = worker.how_it_ended(status), self._processes.rank_of(worker)
        error = worker.error() if not worker.why and (status or 0) > 0 else ""
        cause = f": {error}" if error else ""
        who = {"worker": worker.number, "pid": worker.pid, "host": worker.host, "rank": rank}
        self._records.event("failure", **who, how=how + cause)
        _log.info("worker %d (pid %s, rank %s) %s%s", worker.number, worker.pid, rank, how, cause)
        return how, cause

    async def _lost(self, worker: Worker, was: State, status: int | None) -> None:
        """A worker ended unexpectedly: the survivors form a new view, and another worker is started in its place."""
        job, limits, members = self._job, self._job.elasticity, self._processes.members()
        rank, error = self._processes.rank_of(worker), worker.error()
        recovering = job.view.recovers
        awaited = recovering and was is State.PROPOSED  # it ended before it was in the view that recovers
        # With another, whose loss the survivors have not recovered from yet, or recover from without this one.
        together = awaited or self._must_recover or (recovering and rank is None and worker.joined)
        # It was about to leave, as planned, and the others still train with it until they come to the proposed view.
        leaving = rank is None and was is State.MEMBER and self._awaits_any() and not recovering
        how, cause = self._report_failure(worker, status)
        if job.stopping:
            if rank is not None or leaving:
                self.recover()  # the others still have a checkpoint to write
            return
        last = not members and all(map(self.out_of_loop, self._processes.leavers()))
        starts_anew = last and limits.restart
        if not job.view.generation or (was is State.BOOTING and last and (error or not starts_anew)):
            when = "before training went on" if job.view.generation else "before training began"
            job.end(JobFailed(f"worker {worker.number} {how} {when}{cause}"))
            return
        if rank is None and not worker.joined and not starts_anew:
            await self._boot_failed(worker, how + cause)
            return
        self._forget_before_progress()
        row, again = self._since_step, (error, worker.failed_at) in self._since_step.errors
        row.lost += not together
        row.errors.add((error, worker.failed_at))
        if again and error and worker.failed_at is not None and not awaited:
            where = f"at step {worker.failed_at}, as another did at that step"
            job.give_up(f"worker {worker.number} {how} {where}: it would do so again{cause}")
        elif row.lost >= limits.max_failures:
            job.give_up(f"{row.lost} workers were lost in a row, the last one {how}{cause}")
        elif last and not limits.restart:
            job.end(JobFailed(f"no worker is left: the last one {how}{cause}"))
        else:
            self._must_recover |= rank is not None or leaving
            if self._recovering is None:
                self._recovering = asyncio.create_task(self._recover_together())
            await self._recovering

    async def _recover_together(self) -> None:
        """Forms the view without the lost workers and starts others: once for all losses that are known together."""
        await asyncio.sleep(_LOSSES_S * self._job.view.size)
        self._recovering = None
        if self._must_recover and not self._job.over.is_set():
            self._must_recover = False
            self.recover()
        if not self._job.stopping:
            await self.refill()

    async def _boot_failed(self, worker: Worker, how: str) -> None:
        """A new worker ended before it joined: another is tried; if it fails too, the others continue without it."""
        row, error = self._since_boot, worker.error()
        row.lost += 1
        if (error and (error, None) in row.errors) or row.lost >= self._job.elasticity.max_failures:
            self.continue_without(worker, f"{how}, as others did before they could join: no other is started")
        else:
            row.errors.add((error, None))
            await self.add_up_to(self._job.wanted)
        self.propose()
