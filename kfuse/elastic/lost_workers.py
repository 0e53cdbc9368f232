"""Decides what the end of a worker process means for its job: continue without it, replace it, or fail."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from kfuse.elastic.job import Job, JobFailed
from kfuse.elastic.processes import Processes, State, Worker
from kfuse.elastic.protocol import LOOP_LEFT, NOT_TRAINED
from kfuse.elastic.records import Records
from kfuse.elastic.views import Views

_log = logging.getLogger("kfuse")

_HANGS_S = 1.0  # in code that mostly takes milliseconds


@dataclass
class _Row:
    """Workers lost in a row: since the last new step, or since the last one that has booted."""

    lost: int = 0
    errors: set[tuple[object, ...]] = field(default_factory=set)
    """Exceptions that ended them; of workers that trained, each with its step."""


class LostWorkers:
    """Handles the end of each worker process. `ended` and `contact_lost` are the two entries."""

    def __init__(self, job: Job, processes: Processes, views: Views, records: Records) -> None:
        self._job, self._processes, self._views, self._records = job, processes, views, records
        self._since_step, self._since_boot = _Row(), _Row()
        self._progress = 0
        """`Records.progress` when the last lost worker was counted."""

    def booted(self) -> None:
        """A worker has booted: workers that ended before they could join are no longer counted."""
        self._since_boot = _Row()

    async def ended(self, worker: Worker, was: State, status: int | None) -> None:
        """A worker's process has ended. was: its state before that; status: None if its end was not reported."""
        job = self._job
        if status == 0:
            self._quit(worker)
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

        Where a planned view is proposed and this worker has not come to it, or is to leave, the generation may be the
        one before.
        """
        job, views = self._job, self._views
        if job.view is None:
            return
        proposed = not job.view.recovers and (worker.state is State.PROPOSED or worker in self._processes.leavers())
        if generation != job.view.generation and not (proposed and generation == job.view.generation - 1):
            return
        self._forget_before_progress()
        self._since_step.lost += 1
        if self._since_step.lost >= job.elasticity.max_failures:
            found = [(each.number, *each.doing) for each in self._processes.alive() if each.doing is not None]
            hangs = [f"; worker {number} is in {what} for {s:.0f} s" for number, what, s in found if s >= _HANGS_S]
            job.end(JobFailed(f"workers lose contact again and again: {why}{''.join(hangs)}"))
            return
        _log.info("contact lost in view %d: %s", generation, why)
        for member in () if job.done else filter(views.out_of_loop, self._processes.members()):
            views.continue_without(member, "left the training loop, and the others waited for it")
        views.recover(anew=job.done)

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
        everyone = [worker, *(member for member in self._processes.members() if member.joined)]
        return worker.failed_at is None and all(map(self._views.out_of_loop, everyone))

    def _quit(self, worker: Worker) -> None:
        """A worker's script ended with status 0. Before training is over that is no failure, but the others must do
        without it: another one would end in the same way.
        """
        rank = self._processes.rank_of(worker)
        if self._job.done or (rank is None and worker.joined):  # in good order
            return
        if rank is None:
            self._views.continue_without(worker, "ended with exit status 0 before it used kf.fit or kf.DataLoader")
            self._views.propose()
            return
        self._views.continue_without(worker, "ended with exit status 0 before training did")
        if not self._processes.members():
            self._training_is_left()
            self._job.outcome = NOT_TRAINED if self._job.training == 0 else LOOP_LEFT
        self._views.recover("quit")

    def _report_failure(self, worker: Worker, status: int | None) -> tuple[str, str]:
        """Reports a failure. Returns how the worker ended, and its exception, or "", as texts for messages."""
        how, rank = worker.how_it_ended(status), self._processes.rank_of(worker)
        error = worker.error() if not worker.why and (status or 0) > 0 else ()
        cause = f": {error[-1]}" if error else ""
        who = {"worker": worker.number, "pid": worker.pid, "host": worker.host, "rank": rank}
        self._records.event("failure", **who, how=how + cause)
        _log.info("worker %d (pid %s, rank %s) %s%s", worker.number, worker.pid, rank, how, cause)
        return how, cause

    async def _lost(self, worker: Worker, was: State, status: int | None) -> None:
        """A worker ended unexpectedly: the survivors form a new view, and another worker is started in its place."""
        job, limits, views, members = self._job, self._job.elasticity, self._views, self._processes.members()
        rank, error = self._processes.rank_of(worker), worker.error()
        recovering = job.view is not None and job.view.recovers
        awaited = recovering and was is State.PROPOSED  # it ended before it was in the view that recovers
        # With another, whose loss the survivors have not recovered from yet, or recover from without this one.
        together = awaited or (recovering and rank is None and worker.joined)
        # It was about to leave, as planned, and the others still train with it until they come to the proposed view.
        proposed = any(member.state is State.PROPOSED for member in members)
        leaving = rank is None and was is State.MEMBER and proposed and not recovering
        how, cause = self._report_failure(worker, status)
        if job.stopping:
            if rank is not None or leaving:
                views.recover()  # the others still have a checkpoint to write
            return
        last = not (members or self._processes.leavers())
        starts_anew = last and limits.restart
        if job.view is None or (was is State.BOOTING and last and (error or not starts_anew)):
            when = "before training began" if job.view is None else "before training went on"
            job.end(JobFailed(f"worker {worker.number} {how} {when}{cause}"))
            return
        if rank is None and not worker.joined and not starts_anew:
            await self._boot_failed(worker, how + cause)
            return
        self._forget_before_progress()
        row, occurrence = self._since_step, (*error, worker.failed_at)
        row.lost += not together
        repeats = bool(error) and worker.failed_at is not None and not awaited and occurrence in row.errors
        row.errors.add(occurrence)
        if repeats:
            where = f"at step {worker.failed_at}, as another did at that step"
            job.end(JobFailed(f"worker {worker.number} {how} {where}: it would do so again{cause}"))
        elif row.lost >= limits.max_failures:
            job.end(JobFailed(f"{row.lost} workers were lost in a row, the last one {how}{cause}"))
        elif last and not limits.restart:
            died = bool(worker.why) or status is None or status < 0
            job.end(JobFailed(f"no worker is left: the last one {how}{job.advice if died else ''}{cause}"))
        else:
            if rank is not None or leaving:
                views.recover()
            if job.takes_newcomers:
                await views.add_up_to(job.wanted if limits.replace or last else min(job.wanted, limits.min))
            views.propose()

    async def _boot_failed(self, worker: Worker, how: str) -> None:
        """A new worker ended before it joined: another is tried; if it fails too, the others continue without it."""
        row, error = self._since_boot, worker.error()
        row.lost += 1
        if (error and error in row.errors) or row.lost >= self._job.elasticity.max_failures:
            self._views.continue_without(worker, f"{how}, as others did before they could join: no other is started")
            self._views.write_quit_events()
        else:
            row.errors.add(error)
            await self._views.add_up_to(self._job.wanted)
        self._views.propose()
