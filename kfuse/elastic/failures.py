"""What the ends of workers and their loss of contact mean: the others recover, another is started, or the job ends."""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass, field

from kfuse.comm.settings import BUSY
from kfuse.elastic.cuts import Cuts
from kfuse.elastic.job import Job, JobFailed, Records
from kfuse.elastic.processes import Processes, State, Worker
from kfuse.elastic.roster import Roster

_log = logging.getLogger("kfuse")

_STALLED_S = 3.0  # without a step, and at least three times the last one's duration, before a link may be cut
_REPORTS_S = 6.0  # for all that wait for the same worker to say so: more than between their timeouts


@dataclass
class _Streak:
    """Losses with no success in between."""

    lost: int = 0  # workers, and losses of contact without a lost worker
    contacts: int = 0  # the latter alone
    errors: set[tuple[str, int | None]] = field(default_factory=set)  # with the step, if one was under way


class Failures:
    def __init__(self, job: Job, processes: Processes, records: Records, roster: Roster) -> None:
        self._job, self._processes, self._records, self._roster = job, processes, records, roster
        self.cuts = Cuts(job, processes, records)
        # Since the last new step. Steps made again are not new: what ends a worker there would do so again.
        self._since_step = _Streak()
        self._since_boot = _Streak()  # of newcomers, since the last one that has booted
        self._furthest = -1  # `Records.furthest` when the last lost worker was counted
        self._last_step, self._last_step_at = 0, math.inf  # as `check_progress` saw it, and when
        self._limit_s = _STALLED_S

    def booted(self, worker: Worker) -> None:
        """A new worker is ready to join."""
        self._since_boot = _Streak()
        worker.state = State.READY
        self.cuts.hold(worker)
        self._roster.settle()

    def ended(self, worker: Worker, was: State, status: int | None) -> None:
        """A worker's process has ended. was: its state before that; status: None if its end was not reported."""
        job = self._job
        self._roster.settle()
        in_order = status == 0 or was is State.LEFT or not worker.joined
        if worker.noticed and self._processes.rank_of(worker) is None and in_order:
            return  # it has left, or had nothing to hand over
        if status == 0:
            self._quit(worker, was)
        elif not job.done and not self._all_out_of_loop(worker):
            self._lost(worker, was, status)
        elif job.script and (worker.why or not worker.killed.is_set()):
            how, cause = self._report_failure(worker, status)
            if worker.killed.is_set() and self._processes.rank_of(worker) is None:
                return  # the others have trained to the end without it, and only then was its end reported
            # A script failed when its training was over: what was trained stays, but the job has not succeeded.
            when = " after training had ended" if job.done else ""
            job.late_failure = job.late_failure or JobFailed(f"worker {worker.number} {how}{when}{cause}")
            job.done = True  # its workers have ended or left its loop

    def check_progress(self, now: float) -> None:
        """Called with each check of heartbeats. If no step is recorded for long, asks all workers whom they reach: that
        finds a cut link long before a message is late. Asks again after ever longer times.
        """
        job, members, since_s = self._job, self._processes.members(), now - self._last_step_at
        if self._records.step != self._last_step:
            self._limit_s = max(_STALLED_S, 3 * since_s)
            self._last_step, self._last_step_at = self._records.step, now
        elif since_s > self._limit_s and len(members) > 1 and not job.is_over:
            self._limit_s = 3 * since_s
            job.run(self.cuts.evict())

    def contact_lost(self, worker: Worker, generation: int, why: str) -> None:
        """A worker of this generation lost contact with another. If none has ended, the same workers form a new view.

        One that has not come to a proposed view, or is to leave, may tell the generation before.
        """
        job = self._job
        if job.broken:  # a view is about to be formed
            return
        proposed = not job.view.recovers and (worker.state is State.PROPOSED or worker in self._processes.leavers())
        if generation != job.view.generation and not (proposed and generation == job.view.generation - 1):
            return
        if any(member.ended_loop for member in self._processes.members()):
            self._roster.settle("failure")  # without those that it waited for
            return
        self._forget_before_progress()
        if job.inquiry != job.view.generation:
            job.inquiry = job.view.generation
            job.run(self._inquire(why))

    def loop_ended(self, worker: Worker) -> None:
        """A worker has left its training's loop a moment ago. If others still train, they go on without it.

        The end of its process tells whether it is lost.
        """
        job, those = self._job, [*self._processes.members(), *self._processes.leavers()]
        others = any(each.joined and not each.ended_loop for each in those)
        if self._processes.rank_of(worker) is not None and others and not job.is_over:
            self._roster.settle("failure")

    def _regroup(self, why: str) -> None:
        """The same workers form a new view."""
        job, row = self._job, self._since_step
        row.lost, row.contacts = row.lost + 1, row.contacts + 1
        if row.lost >= job.settings["elastic_max_failures"]:
            job.give_up(f"workers lose contact again and again: {why}")
            return
        _log.info("contact lost in view %d: %s", job.view.generation, why)
        self._roster.settle("failure")

    async def _inquire(self, why: str) -> None:
        """Where some workers do not reach each other the others go on without one side. Else the same workers form a
        new view; from the second loss on, without those that did not come to the view.
        """
        row, evicted = self._since_step, await self.cuts.evict()
        if evicted:
            row.lost, row.contacts = row.lost - row.contacts, 0  # these and the loss of those that go are one
        elif evicted is False and not (row.contacts and await self._end_absent()):
            self._regroup(why)

    async def _end_absent(self) -> bool:
        """Kills workers that have not come to the newest view, where others waited for them. Whether there are any.

        Their training threads hang, perhaps in a file system, though they send heartbeats.
        """
        view = self._job.view
        if self._absent():
            await asyncio.sleep(_REPORTS_S)
        if self._job.view is not view or self._job.over.is_set():
            return True
        absent = self._absent()
        for worker in absent:
            self._processes.end(worker, f"did not come to view {view.generation}, where others waited for it ({BUSY}),")
        return bool(absent)

    def _absent(self) -> list[Worker]:
        """Workers that have neither joined the newest view nor lost contact in it."""
        generation = self._job.view.generation
        members = [member for member in self._processes.members() if member.lost_contact_in < generation]
        return [member for member in members if member.state is State.PROPOSED]

    def _forget_before_progress(self) -> None:
        """Resets the counts if a step was completed since: with progress in between, lost workers are no crash loop."""
        if self._records.furthest > self._furthest:
            self._furthest, self._since_step = self._records.furthest, _Streak()

    def _all_out_of_loop(self, worker: Worker) -> bool:
        """Whether this worker and the others that train have ended their loops, this one without an error."""
        if worker.failed_at is not None or not worker.ended_loop:
            return False
        return all(member.ended_loop for member in self._processes.members() if member.joined)

    def _quit(self, worker: Worker, was: State) -> None:
        """A worker's script ended with status 0. Before training is over that is no failure, but the others must do
        without it: another one would end in the same way.
        """
        rank = self._processes.rank_of(worker)
        if self._job.done or was is State.LEFT:
            return
        if rank is None and not worker.joined:
            self._roster.continue_without(worker, "ended with exit status 0 before it used kf.fit or kf.DataLoader")
            return
        self._roster.continue_without(worker, "ended with exit status 0 before training did")
        others = self._processes.members()
        if worker.joined and self._job.view.reason != "restart":  # then newcomers have no state
            others = [each for each in others if each.joined and not each.ended_loop]
        self._job.done = not others
        if rank is not None and not self._job.done:
            self._roster.settle("quit")

    def _report_failure(self, worker: Worker, status: int | None) -> tuple[str, str]:
        """Reports a failure. Returns how the worker ended, and its exception, or "", as texts for messages."""
        how, rank = worker.how_it_ended(status), self._processes.rank_of(worker)
        error = worker.error() if not worker.why and (status or 0) > 0 else ""
        cause = f": {error}" if error else ""
        who = {"worker": worker.number, "pid": worker.pid, "host": worker.host, "rank": rank}
        self._records.event("failure", **who, how=how + cause)
        _log.info("worker %d (pid %s, rank %s) %s%s", worker.number, worker.pid, rank, how, cause)
        return how, cause

    def _lost(self, worker: Worker, was: State, status: int | None) -> None:
        """A worker ended unexpectedly: the survivors form a new view, and another worker is started in its place."""
        job, members = self._job, self._processes.members()
        rank, error = self._processes.rank_of(worker), worker.error()
        recovering = job.view.recovers
        awaited = recovering and was is State.PROPOSED  # it ended before it was in the view that recovers
        # With another, whose loss the survivors have not recovered from yet, or recover from without this one.
        together = awaited or bool(job.broken) or (recovering and rank is None and worker.joined)
        together &= not worker.ended_loop
        # It was about to leave, as planned, and the others still train with it until they come to the proposed view.
        awaits_others = any(member.state is State.PROPOSED for member in members)
        leaving = rank is None and was is State.MEMBER and awaits_others and not recovering
        how, cause = self._report_failure(worker, status)
        broken = "failure" if rank is not None or leaving else ""
        if job.stopping:
            self._roster.settle(broken)  # the others still have a checkpoint to write
            return
        last = not members and all(each.ended_loop for each in self._processes.leavers())
        starts_anew = last and job.restart
        if not job.view.generation or (was is State.BOOTING and last and (error or not starts_anew)):
            when = "before training went on" if job.view.generation else "before training began"
            job.end(JobFailed(f"worker {worker.number} {how} {when}{cause}"))
            return
        if rank is None and not worker.joined and not starts_anew:
            self._boot_failed(worker, how + cause)
            return
        self._forget_before_progress()
        row, again = self._since_step, (error, worker.failed_at) in self._since_step.errors
        row.lost += not together
        row.errors.add((error, worker.failed_at))
        if again and error and worker.failed_at is not None and not awaited:
            where = f"at step {worker.failed_at}, as another did at that step"
            job.give_up(f"worker {worker.number} {how} {where}: it would do so again{cause}")
        elif row.lost >= job.settings["elastic_max_failures"]:
            job.give_up(f"{row.lost} workers were lost in a row, the last one {how}{cause}")
        elif last and not job.restart:
            job.end(JobFailed(f"no worker is left: the last one {how}{cause}"))
        else:
            self._roster.leave_empty()
            self._roster.settle(broken)

    def _boot_failed(self, worker: Worker, how: str) -> None:
        """A new worker ended before it joined: another is tried; if it fails too, the others continue without it."""
        row, error = self._since_boot, worker.error()
        row.lost += 1
        if (error and (error, None) in row.errors) or row.lost >= self._job.settings["elastic_max_failures"]:
            self._roster.continue_without(worker, f"{how}, as others did before they could join: no other is started")
        row.errors.add((error, None))
