"""Decisions: from what a step measured, to a request, to rank 0's announcement, to the settings of later steps.

Every worker runs this with the same values and reaches the same result. Only rank 0's requests are sent; other ranks'
are dropped. They travel as an announcement (`comm.tail.Announcement`) in the tail of the next step's gradients, so that
every worker applies them at the same step.

    step s      is measured
    step s + 1  runs; afterwards the policy sees the figures of step s (they have reached the host without a wait)
    step s + 2  carries the announcement
    step s + 4  is the first one that the decision applies to

Batch size, learning-rate factor, synchronisation, topology and tree go this way, and so do the next view and the end of
training. A number of workers is requested from the supervisor, which proposes a view when they are ready.
"""

from __future__ import annotations

import contextlib
import logging
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from kfuse.comm import transports
from kfuse.comm.tail import Announcement
from kfuse.optim import DistributedOptimizer
from kfuse.policies import BasePolicy
from kfuse.policies.signals import Decision, Signals
from kfuse.session import Session
from kfuse.statistics.figures import Measured, StepContext, StepSettings
from kfuse.statistics.step_stats import StepStats
from kfuse.train import load_balance
from kfuse.train.lr_schedule import LRSchedule
from kfuse.train.progress import STOP_REASONS, Progress
from kfuse.train.reporter import Reporter
from kfuse.train.settings import Settings

_LOG = logging.getLogger("kfuse")


class Decisions:
    """What is requested, announced and applied in one training. The methods follow a decision in this order."""

    def __init__(
        self,
        session: Session,
        policy: BasePolicy,
        opt: DistributedOptimizer,
        schedule: LRSchedule,
        settings: Settings,
        progress: Progress,
        reporter: Reporter,
    ) -> None:
        self._session, self._policy, self._opt, self._schedule = session, policy, opt, schedule
        self._settings, self._progress, self._reporter = settings, progress, reporter
        self._policy_decides = getattr(policy.decide, "__func__", None) is not BasePolicy.decide
        self._requested, self._announced = Announcement(), Announcement()
        """Requested: not announced yet, or announced with the step under way. Announced: what that step carries."""
        self.lr, self._scale = 0.0, 1.0
        """The learning rate of the step under way, and the lr_scale that it contains."""
        self.topology: str | None = None
        """The transport that a decision chose; None: the configured one."""
        self.tree: str | None = None
        """The shape that a decision chose for the transport `tree`; None: the configured one."""
        self.workers_requested = 0
        """The number of workers that was last requested; 0: none was."""
        self.stop_requests: list[str] = []
        """Reasons to stop at the next step boundary (of STOP_REASONS), where there is no supervisor to give one."""
        self._clipped: dict[str, str | None] = {}
        """By setting: the note on how its latest request was clipped; None if it was granted as it was."""

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Context of a training: `running` returns these decisions, for kf.set_batch_size and the like."""
        self.use_transport()  # an earlier training's decision no longer applies
        self.set_learning_rate()
        try:
            _RUNNING.append(self)
            yield
        finally:
            _RUNNING[:] = [each for each in _RUNNING if each is not self]

    # -- requested ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Applies the policy's initial settings. On rank 0, before the first step: all workers start from its state."""
        decision = self._checked("initial", self._policy.initial())
        if decision is not None:
            self._request_within_bounds(decision)
            requested, self._requested = self._requested, Announcement()
            self._apply(requested)

    def decide(self, stats: StepStats, context: StepContext) -> None:
        """The policy decides on a finished step; then what rank 0 announced with that step is applied.

        context: the settings that the step was made with. Raises TypeError if the policy returns another type.
        """
        at = self._progress
        if self._policy_decides:
            decision = self._checked("decide", self._policy.decide(self._signals(stats, context)))
            if decision is not None:
                self._request_within_bounds(decision)
        if stats.control != Announcement():
            self._apply(stats.control)
        if stats.step >= at.resumed_at:
            at.generation = stats.control.generation or at.generation
            at.stop = stats.control.stop or at.stop

    def update_progress(self, stats: StepStats, workers: Sequence[int]) -> None:
        """Writes what a step measured into `Progress`, and reports each worker that has become a straggler.

        A straggler is not reported again until it has recovered at least once.
        workers: the numbers of the workers that made the step, in rank order.
        """
        at, workers_now = self._progress, self._session.workers
        at.mean_grad_sq, at.mean_grad_variance, at.loss = stats.mean_grad_sq, stats.mean_grad_variance, stats.loss
        if self._session.group.size == 1 and not self._session.elastic:
            return
        at.throughput = load_balance.measured(at.throughput, workers, stats.seconds)
        relative = load_balance.relative_throughput(at.throughput, workers_now)
        for rank, (worker, ratio) in enumerate(zip(workers_now, relative, strict=True)):
            if ratio is not None and ratio < load_balance.SLOW and worker not in at.stragglers:
                self._reporter.event(at.step, "straggler", worker=worker, rank=rank, throughput=ratio)
        at.stragglers = load_balance.stragglers(workers_now, relative, at.stragglers)

    def request(
        self,
        *,
        batch_size: int | None = None,
        lr_scale: float | None = None,
        topology: str | None = None,
        tree: str | None = None,
        sync: int | None = None,
        workers: int | None = None,
    ) -> None:
        """Requests changes: rank 0 announces them with the next step, or sends them to the supervisor (`workers`).

        batch_size: samples, over all workers. sync: steps. Raises TypeError where `workers` is not a whole number,
        ValueError for a topology or tree that does not exist, and for one that comm.reproducible=true rules out.
        """
        asked: dict[str, Any] = {"batch_size": batch_size, "lr_scale": lr_scale, "sync_every": sync}
        reproducible = self._session.comm.reproducible
        if topology is not None:
            name = transports.choose(topology, reproducible)
            asked["transport"] = 1 + _index("topology", name, transports.NAMES)
        if tree is not None:
            asked["tree"] = 1 + _index("tree", tree, transports.TREES)
        if sync is not None and sync > 1 and reproducible:
            raise ValueError(f"sync {sync}: comm.reproducible=true synchronises at every step")
        self._requested = replace(self._requested, **{name: it for name, it in asked.items() if it is not None})
        if workers is not None:
            self.workers_requested = operator.index(workers)
            self._session.ask_supervisor("resize", workers=self.workers_requested)

    def request_lr(self, lr: float) -> None:
        """Requests the learning rate `lr` for now; the schedule continues from it. Raises ValueError if unreachable."""
        now, scale = self.lr, self._scale
        if not (math.isfinite(lr) and lr > 0):
            raise ValueError(f"kf.set_lr({lr}): must be a finite number above 0")
        if not now > 0:
            raise ValueError(f"kf.set_lr({lr}): the learning rate is 0 now, which no factor changes: set it later")
        self.request(lr_scale=lr * scale / now)

    def _checked(self, method: str, returned: object) -> Decision | None:
        """The decision that a policy's method returned; None if it is empty. Raises TypeError for another type."""
        if not isinstance(returned, Decision | None):
            name, kind = type(self._policy).__name__, type(returned).__name__
            raise TypeError(f"{name}.{method} returned a value of type {kind}: it must be a kf.Decision or None")
        return None if returned is None or returned.is_empty else returned

    def _signals(self, stats: StepStats, context: StepContext) -> Signals:
        return Signals(
            step=stats.step,
            micro_batch=self._settings.micro_batch,
            throughput=tuple(load_balance.relative_throughput(self._progress.throughput, self._session.workers)),
            corrupt_workers=tuple(
                rank for rank, worker in enumerate(self._session.workers) if worker in self._progress.corrupt
            ),
            eval_accuracy=self._progress.accuracy,
            bounds=self._settings.bounds,
            **{each.name: getattr(context, each.name) for each in fields(StepSettings)},
            **{each.name: getattr(stats, each.name) for each in fields(Measured)},
        )

    def _request_within_bounds(self, decision: Decision) -> None:
        """Requests what a policy decided, within the bounds. An event records what is clipped or refused."""
        session, elastic, workers = self._session, self._session.elastic, decision.workers
        if workers is not None and not elastic:
            size = session.group.size
            if workers != size and self.workers_requested in (0, size):  # so that it is reported once
                self._report_clipped(f"workers {workers}: this job's number of workers is fixed")
            self.workers_requested = workers
            decision = replace(decision, workers=None)
        asked, (decision, notes) = decision, decision.clipped(self._settings.bounds)
        by_name = {note.split()[0]: note for note in notes}
        for name in ("batch_size", "workers", "lr_scale", "sync"):
            if getattr(asked, name) is not None:
                self._report_if_clipped(name, by_name.get(name))
        if decision.workers is not None and decision.workers != self.workers_requested:
            self.request(workers=decision.workers)
        if decision.replace is not None:
            ranks, rank = range(len(session.workers)), decision.replace
            refused = f"replace {rank}: must be a rank from 0 to {ranks[-1]} of an elastic job"
            granted = elastic and rank in ranks
            self._report_if_clipped("replace", None if granted else refused)
            if granted:
                session.ask_supervisor("replace", worker=session.workers[rank])
        sync = decision.sync
        if sync is not None and session.comm.reproducible:
            self._report_if_clipped(
                "local SGD", f"sync {sync} clipped to 1: comm.reproducible=true" if sync > 1 else None
            )
            sync = 1
        self.request(batch_size=decision.batch_size, lr_scale=decision.lr_scale, sync=sync)
        if decision.topology is not None:
            refusal = None
            try:
                self.request(topology=decision.topology)
            except ValueError as error:
                refusal = f"{error}; it stays as it is"
            self._report_if_clipped("topology", refusal)

    def _report_if_clipped(self, name: str, note: str | None) -> None:
        """Reports that a request was clipped: once, until the note changes. note: None where it was granted."""
        if note is not None and note != self._clipped.get(name):
            self._report_clipped(note)
        self._clipped[name] = note

    def _report_clipped(self, note: str) -> None:
        self._reporter.event(self._progress.step, "clipped", note=note)

    # -- announced ------------------------------------------------------------------------------------------------

    def announcement(self) -> Announcement:
        """The announcement of the coming step. Every rank makes one; only rank 0's is sent."""
        self._announced = self._requested
        stop = self._session.stop_reason() or (self.stop_requests or [""])[-1]
        index = STOP_REASONS.index(stop) if stop in STOP_REASONS else 0
        return replace(self._announced, generation=self._session.proposed_generation(), stop=index)

    def announcement_sent(self) -> None:
        """The step that carried the announcement is complete: what was announced is no longer requested.

        `lr` is now what the update had: a loop's body may set group["lr"] before opt.step().
        """
        self.lr = self._opt.last_lr
        requested, announced = vars(self._requested), vars(self._announced)
        self._requested = Announcement(**{name: it for name, it in requested.items() if it != announced[name]})
        self._announced = Announcement()

    # -- applied --------------------------------------------------------------------------------------------------

    def _apply(self, announced: Announcement) -> None:
        """Applies rank 0's announcement, on every worker, from the next step on."""
        at, bounds = self._progress, self._settings.bounds
        batch_size, lr = at.batch_size, self._opt.base_lr * self._lr_factor()
        if announced.batch_size:
            at.batch_size = min(max(announced.batch_size, bounds.batch_min), bounds.batch_max)
            note = f"batch_size {announced.batch_size} clipped to {at.batch_size}"
            self._report_if_clipped("set_batch_size", note if announced.batch_size != at.batch_size else None)
        changed_scale = announced.lr_scale not in (0.0, at.lr_scale)
        at.lr_scale = announced.lr_scale or at.lr_scale
        if changed_scale or at.batch_size != batch_size:
            pairs: dict[str, list[float]] = {
                "batch_size": [batch_size, at.batch_size],
                "lr": [lr, self._opt.base_lr * self._lr_factor()],
            }
            self._report_change(**{name: pair for name, pair in pairs.items() if pair[0] != pair[1]})
        if announced.transport:
            self.topology = transports.NAMES[announced.transport - 1]
            self._report_change(topology=self.topology)
            _LOG.info("step %d: transport %s from here on, as decided", self._progress.step, self.topology)
        if announced.tree:
            self.tree = transports.TREES[announced.tree - 1]
            self._report_change(tree=self.tree)
        self.use_transport()
        if announced.sync_every and announced.sync_every != at.sync_every:
            self._report_change(sync=[at.sync_every, announced.sync_every])
            at.sync_every = announced.sync_every

    def _report_change(self, **changed: Any) -> None:
        self._reporter.event(self._progress.step, "decision", **changed)

    def use_transport(self) -> None:
        """Sets the engine's transport and tree shape; does nothing if they are set already."""
        self._opt.engine.use_transport(self.topology, self.tree)

    def set_learning_rate(self) -> None:
        """Sets the factor of the coming update, and `lr` for reports (see DistributedOptimizer.base_lr)."""
        self._opt.lr_factor = self._lr_factor()
        self.lr, self._scale = self._opt.base_lr * self._opt.lr_factor, self._progress.lr_scale

    def _lr_factor(self) -> float:
        at = self._progress
        done = self._schedule.done(at.step, at.samples)
        return self._schedule.factor(
            at.schedule, done, at.batch_size, at.lr_scale, at.mean_grad_sq, at.mean_grad_variance
        )

    # -- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What applies, and what is requested and not yet applied: a resumed run must make the same decisions."""
        return {
            "topology": self.topology,
            "tree": self.tree,
            "workers_requested": self.workers_requested,
            "requested": asdict(replace(self._requested, generation=0, stop=0)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over the state of another worker or of a checkpoint."""
        self.topology, self.tree = state["topology"], state["tree"]
        self.workers_requested, self._requested = state["workers_requested"], Announcement(**state["requested"])
        self.use_transport()


_RUNNING: list[Decisions] = []


def running() -> Decisions | None:
    """The decisions of the training that began last and has not ended; None if there is none."""
    return _RUNNING[-1] if _RUNNING else None


def _index(what: str, name: str, allowed: Sequence[str]) -> int:
    if name not in allowed:
        raise ValueError(f"{what} {name!r}: must be one of {', '.join(allowed)}")
    return allowed.index(name)
