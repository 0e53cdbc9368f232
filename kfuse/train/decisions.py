"""A decision's whole way: from what a step measured, to a request, to all workers, into force.

Every worker runs this with the same values and reaches the same result. Only rank 0's requests are sent; other ranks'
are dropped. They travel as the control word in the tail of the next step's gradients, so that every worker applies them
at the same step. What is measured in step s is read after step s + 1 (by then it has reached the host without a wait),
requested and announced with step s + 2, and in force from step s + 4.

Batch size, learning-rate factor, synchronisation, topology and tree go this way, and so do the next view and the end of
training. The number of workers is asked of the supervisor, which announces a view when they are ready.
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
from kfuse.comm.tail import Control
from kfuse.optim import DistributedOptimizer
from kfuse.policies import BasePolicy
from kfuse.policies.signals import Decision, Signals
from kfuse.session import Session
from kfuse.statistics.figures import Measured, StepContext, StepSettings
from kfuse.statistics.step_stats import StepStats
from kfuse.train import load_balance
from kfuse.train.lr_schedule import LRSchedule
from kfuse.train.reporter import Reporter
from kfuse.train.settings import Settings
from kfuse.train.state import Progress

_LOG = logging.getLogger("kfuse")

STOP_REASONS = ("", "interrupted", "terminated")
"""Control.stop is an index into these."""


class Decisions:
    """What is requested, what is announced, and what is in force, in one training."""

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
        self._requested, self._announced = Control(), Control()
        """Announced: the part of the requests that the step under way carries."""
        self.lr, self._scale = 0.0, 1.0
        """The learning rate of the step under way, and the part of it that is lr_scale."""
        self.topology: str | None = None
        """The transport that a decision chose; None: the configured one."""
        self.tree: str | None = None
        """The same of the tree transport's shape."""
        self.workers_requested = 0
        """How many workers were last asked for."""
        self.stop_requests: list[str] = []
        """Reasons to stop at the next step boundary (of STOP_REASONS), where there is no supervisor to give one."""
        self._clipped: dict[str, str | None] = {}
        """By what was asked for: how the latest request for it was clipped; None if it was granted as it was."""

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """While training lasts, `running` finds these decisions, for kfuse's verbs."""
        self.use_transport()  # of an earlier training's decisions nothing is left
        self.set_learning_rate()
        _RUNNING.append(self)
        try:
            yield
        finally:
            _RUNNING.remove(self)

    # -- requested ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Before the first step, on the leader, whose state all workers start from: the policy's initial settings."""
        decision = self._returned("initial", self._policy.initial())
        if decision is not None:
            self._ask(decision)
            requested, self._requested = self._requested, Control()
            self._apply(requested)

    def decide(self, stats: StepStats, context: StepContext) -> None:
        """The policy decides on a finished step; what the leader announced with that step comes into force.

        context: the settings that the step was made with.
        """
        at = self._progress
        if self._policy_decides:
            decision = self._returned("decide", self._policy.decide(self._signals(stats, context)))
            if decision is not None:
                self._ask(decision)
        if stats.control != Control():
            self._apply(stats.control)
        if stats.step >= at.resumed_at:
            at.generation = stats.control.generation or at.generation
            at.stop = stats.control.stop or at.stop

    def measured(self, stats: StepStats, workers: Sequence[int]) -> None:
        """The progress learns what a step measured, and a worker that has become a straggler is reported.

        It is not reported again until it has recovered at least once.
        workers: the numbers of those who made the step, in rank order.
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
        """What the leader announces with the next step, or asks of the supervisor.

        Raises TypeError where `workers` is not a whole number, ValueError for a topology or tree that does not exist,
        and for what reproducible sums rule out.
        """
        word: dict[str, Any] = {"batch_size": batch_size, "lr_scale": lr_scale, "sync_every": sync}
        reproducible = self._session.comm.reproducible
        if topology is not None:
            name = transports.choose(topology, reproducible)
            word["transport"] = 1 + _index("topology", name, transports.NAMES)
        if tree is not None:
            word["tree"] = 1 + _index("tree", tree, transports.TREES)
        if sync is not None and sync > 1 and reproducible:
            raise ValueError(f"sync {sync}: comm.reproducible=true synchronises at every step")
        self._requested = replace(self._requested, **{name: it for name, it in word.items() if it is not None})
        if workers is not None:
            self.workers_requested = operator.index(workers)
            self._session.order("resize", workers=self.workers_requested)

    def request_lr(self, lr: float) -> None:
        """The rate to have now; its schedule goes on from there. Raises ValueError where no factor can reach it."""
        now, scale = self.lr, self._scale
        if not (math.isfinite(lr) and lr > 0):
            raise ValueError(f"kf.set_lr({lr}): must be a finite number above 0")
        if not now > 0:
            raise ValueError(f"kf.set_lr({lr}): the learning rate is 0 now, which no factor changes: set it later")
        self.request(lr_scale=lr * scale / now)

    def _returned(self, method: str, returned: object) -> Decision | None:
        """What a policy's method returned; None where it asks for nothing. Raises TypeError for another type."""
        if not isinstance(returned, Decision | None):
            name, kind = type(self._policy).__name__, type(returned).__name__
            raise TypeError(f"{name}.{method} returned a value of type {kind}: it must be a kf.Decision or None")
        return None if returned is None or returned.is_empty else returned

    def _signals(self, stats: StepStats, context: StepContext) -> Signals:
        return Signals(
            step=stats.step,
            micro_batch=self._settings.micro_batch,
            throughput=tuple(load_balance.relative_throughput(self._progress.throughput, self._session.workers)),
            eval_accuracy=self._progress.accuracy,
            bounds=self._settings.bounds,
            **{each.name: getattr(context, each.name) for each in fields(StepSettings)},
            **{each.name: getattr(stats, each.name) for each in fields(Measured)},
        )

    def _ask(self, decision: Decision) -> None:
        """Requests what a policy decided, within the bounds. What is clipped or refused is an event."""
        session, elastic, workers = self._session, self._session.elastic, decision.workers
        if workers is not None and not elastic:
            size = session.group.size
            if workers != size and self.workers_requested in (0, size):  # so it is said once
                self._report_clipped(f"workers {workers}: this job's number of workers is fixed")
            self.workers_requested = workers
            decision = replace(decision, workers=None)
        asked, (decision, notes) = decision, decision.clipped(self._settings.bounds)
        by_name = {note.split()[0]: note for note in notes}
        for name in ("batch_size", "workers", "lr_scale", "sync"):
            if getattr(asked, name) is not None:
                self._note(name, by_name.get(name))
        if decision.workers is not None and decision.workers != self.workers_requested:
            self.request(workers=decision.workers)
        if decision.replace is not None:
            ranks, rank = range(len(session.workers)), decision.replace
            refused = f"replace {rank}: must be a rank from 0 to {ranks[-1]} of an elastic job"
            granted = elastic and rank in ranks
            self._note("replace", None if granted else refused)
            if granted:
                session.order("replace", worker=session.workers[rank])
        sync = decision.sync
        if sync is not None and session.comm.reproducible:
            self._note("local SGD", f"sync {sync} clipped to 1: comm.reproducible=true" if sync > 1 else None)
            sync = 1
        self.request(batch_size=decision.batch_size, lr_scale=decision.lr_scale, sync=sync)
        if decision.topology is not None:
            refusal = None
            try:
                self.request(topology=decision.topology)
            except ValueError as error:
                refusal = f"{error}; it stays as it is"
            self._note("topology", refusal)

    def _note(self, name: str, note: str | None) -> None:
        """An event where a request was clipped: one, until the request or the bounds change."""
        if note is not None and note != self._clipped.get(name):
            self._report_clipped(note)
        self._clipped[name] = note

    def _report_clipped(self, note: str) -> None:
        self._reporter.event(self._progress.step, "clipped", note=note)

    # -- announced ------------------------------------------------------------------------------------------------

    def control(self) -> Control:
        """The control word of the coming step: asked for on every rank, sent by the leader."""
        self._announced = self._requested
        stop = self._session.stop_reason() or (self.stop_requests or [""])[-1]
        index = STOP_REASONS.index(stop) if stop in STOP_REASONS else 0
        return replace(self._announced, generation=self._session.proposed_generation(), stop=index)

    def sent(self) -> None:
        """The step that carried the control word is complete; what was requested since then waits for the next."""
        requested, announced = vars(self._requested), vars(self._announced)
        self._requested = Control(**{name: it for name, it in requested.items() if it != announced[name]})
        self._announced = Control()

    # -- in force -------------------------------------------------------------------------------------------------

    def _apply(self, control: Control) -> None:
        """The leader's word: in force from the next step on, on every worker."""
        at, bounds = self._progress, self._settings.bounds
        batch_size, lr = at.batch_size, self._opt.base_lr * self._lr_factor()
        if control.batch_size:
            at.batch_size = min(max(control.batch_size, bounds.batch_min), bounds.batch_max)
            note = f"batch_size {control.batch_size} clipped to {at.batch_size}"
            self._note("set_batch_size", note if control.batch_size != at.batch_size else None)
        changed_scale = control.lr_scale not in (0.0, at.lr_scale)
        at.lr_scale = control.lr_scale or at.lr_scale
        if changed_scale or at.batch_size != batch_size:
            pairs: dict[str, list[float]] = {
                "batch_size": [batch_size, at.batch_size],
                "lr": [lr, self._opt.base_lr * self._lr_factor()],
            }
            self._report(**{name: pair for name, pair in pairs.items() if pair[0] != pair[1]})
        if control.transport:
            self.topology = transports.NAMES[control.transport - 1]
            self._report(topology=self.topology)
            _LOG.info("step %d: transport %s from here on, as decided", self._progress.step, self.topology)
        if control.tree:
            self.tree = transports.TREES[control.tree - 1]
            self._report(tree=self.tree)
        self.use_transport()
        if control.sync_every and control.sync_every != at.sync_every:
            self._report(sync=[at.sync_every, control.sync_every])
            at.sync_every = control.sync_every

    def _report(self, **changed: Any) -> None:
        self._reporter.event(self._progress.step, "decision", **changed)

    def use_transport(self) -> None:
        """Has the optimizer reduce over the transport and tree in force; nothing happens where it does already."""
        self._opt.engine.use_transport(self.topology, self.tree)

    def set_learning_rate(self) -> None:
        """The coming update's, for the optimizer; `lr` is then that of its first parameter group that has one."""
        self._opt.lr_factor = self._lr_factor()
        self.lr, self._scale = self._opt.base_lr * self._opt.lr_factor, self._progress.lr_scale

    def _lr_factor(self) -> float:
        at = self._progress
        return self._schedule.factor(at.schedule, at.batch_size, at.lr_scale, at.mean_grad_sq, at.mean_grad_variance)

    # -- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What is in force, and what is requested and not yet announced: a resumed run must decide alike."""
        return {
            "topology": self.topology,
            "tree": self.tree,
            "workers_requested": self.workers_requested,
            "requested": asdict(replace(self._requested, generation=0, stop=0)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what another worker, or a checkpoint, has decided and requested."""
        self.topology, self.tree = state["topology"], state["tree"]
        self.workers_requested, self._requested = state["workers_requested"], Control(**state["requested"])
        self.use_transport()


_RUNNING: list[Decisions] = []


def running() -> Decisions | None:
    """Those of the training that began last and has not ended; None where there is none."""
    return _RUNNING[-1] if _RUNNING else None


def _index(what: str, name: str, allowed: Sequence[str]) -> int:
    if name not in allowed:
        raise ValueError(f"{what} {name!r}: must be one of {', '.join(allowed)}")
    return allowed.index(name)
