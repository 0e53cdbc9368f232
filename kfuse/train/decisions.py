"""From what a step measured to what is requested, announced and applied.

Every worker runs this with the same values and reaches the same result; only rank 0's requests are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kfuse.comm import transports
from kfuse.comm.tail import Control
from kfuse.optim import DistributedOptimizer
from kfuse.policies import BasePolicy
from kfuse.policies.signals import Decision, Signals
from kfuse.session import Session
from kfuse.statistics.step_stats import StepStats
from kfuse.train import load_balance
from kfuse.train.lr_schedule import LRSchedule
from kfuse.train.progress import Position, Settings
from kfuse.train.reporter import Reporter


class Decisions:
    """The policy's part in a run. The position is given, and changed, with each call."""

    def __init__(
        self,
        session: Session,
        policy: BasePolicy,
        opt: DistributedOptimizer,
        schedule: LRSchedule,
        settings: Settings,
        reports: Reporter,
    ) -> None:
        self._session, self._policy, self._opt, self._schedule = session, policy, opt, schedule
        self._settings, self._reports = settings, reports
        self._clipped: dict[str, str | None] = {}
        """By what was asked for: how the latest request for it was clipped; None if it was granted as it was."""

    def begin(self, at: Position) -> None:
        """Before the first step, on the leader, whose state all workers start from: the policy's initial settings."""
        decision = self._decision("initial", self._policy.initial())
        if decision is not None:
            self._ask(at, decision)
            self._apply(at, self._session.take_asked(), at.step)

    def take_in(self, at: Position, stats: StepStats, workers: Sequence[int]) -> None:
        """The position learns what a step measured; `workers` are the numbers of those who made it, in rank order."""
        at.throughput = load_balance.measured(at.throughput, workers, stats.seconds)
        self._report_stragglers(at)
        at.mean_grad_sq, at.mean_grad_variance = stats.mean_grad_sq, stats.mean_grad_variance
        at.loss = stats.loss

    def decide(self, at: Position, stats: StepStats, context: dict[str, Any]) -> None:
        """The policy decides, for a later step; what the leader announced with this one comes into force."""
        decision = self._decision("decide", self._policy.decide(self._signals(at, stats, context)))
        if decision is not None:
            self._ask(at, decision)
        self._apply(at, stats.control, stats.step)

    def _decision(self, method: str, returned: object) -> Decision | None:
        """What a policy's method returned; None where it asks for nothing. Raises TypeError for another type."""
        if not isinstance(returned, Decision | None):
            name, kind = type(self._policy).__name__, type(returned).__name__
            raise TypeError(f"{name}.{method} returned a value of type {kind}: it must be a kf.Decision or None")
        return None if returned is None or returned.is_empty else returned

    def _report_stragglers(self, at: Position) -> None:
        """An event for each worker that has become one; it is no news again until it has been well for once."""
        workers = self._session.workers
        relative = load_balance.relative_throughput(at.throughput, workers)
        for rank, (worker, ratio) in enumerate(zip(workers, relative, strict=True)):
            if ratio is not None and ratio < load_balance.SLOW and worker not in at.stragglers:
                self._reports.event(at.step, "straggler", worker=worker, rank=rank, throughput=ratio)
        at.stragglers = load_balance.stragglers(workers, relative, at.stragglers)

    def _signals(self, at: Position, stats: StepStats, context: dict[str, Any]) -> Signals:
        shared = ("loss", "grad_norm", "grad_sq", "grad_variance", "mean_grad_sq", "mean_grad_variance")
        noise = ("noise_scale", "noise_scale_low", "noise_scale_high", "micro_batches")
        return Signals(
            step=stats.step,
            micro_batch=self._settings.micro_batch,
            throughput=tuple(load_balance.relative_throughput(at.throughput, self._session.workers)),
            eval_accuracy=at.accuracy,
            bounds=self._settings.bounds,
            **{name: context[name] for name in ("epoch", "samples", "lr", "lr_scale", "batch_size", "workers")},
            **{name: getattr(stats, name) for name in shared + noise},
        )

    def _ask(self, at: Position, decision: Decision) -> None:
        """Every worker decides, so that each one's policy has the same state; the leader's word counts."""
        if decision.workers is not None and not self._session.elastic:
            size = self._session.group.size
            if decision.workers != size and self._session.workers_asked in (0, size):  # so it is said once
                note = f"workers {decision.workers}: this job's number of workers is fixed"
                self._reports.event(at.step, "clipped", note=note)
            self._session.ask(workers=decision.workers)
            decision = replace(decision, workers=None)
        asked, (decision, notes) = decision, decision.clipped(self._settings.bounds)
        by_name = {note.split()[0]: note for note in notes}
        for name in ("batch_size", "workers", "lr_scale", "sync"):
            if getattr(asked, name) is not None:
                self._tell(at, name, by_name.get(name))
        if decision.workers is not None and decision.workers != self._session.workers_asked:
            self._session.ask(workers=decision.workers)
        if decision.replace is not None:
            self._replace(at, decision.replace)
        sync = decision.sync
        if sync is not None and self._session.comm.reproducible:
            self._tell(at, "local SGD", f"sync {sync} clipped to 1: comm.reproducible=true" if sync > 1 else None)
            sync = 1
        self._session.ask(batch_size=decision.batch_size, lr_scale=decision.lr_scale, sync=sync)
        if decision.topology is None:
            return
        refusal = None
        try:
            self._session.ask(topology=decision.topology)
        except ValueError as error:
            refusal = f"{error}; it stays as it is"
        self._tell(at, "topology", refusal)

    def _tell(self, at: Position, name: str, note: str | None) -> None:
        """An event where a request was clipped: one, until the request or the bounds change."""
        if note is not None and note != self._clipped.get(name):
            self._reports.event(at.step, "clipped", note=note)
        self._clipped[name] = note

    def _replace(self, at: Position, rank: int) -> None:
        workers = self._session.workers
        if not (self._session.elastic and 0 <= rank < len(workers)):
            self._tell(at, "replace", f"replace {rank}: allowed are ranks 0 to {len(workers) - 1} of an elastic job")
        else:
            self._tell(at, "replace", None)
            self._session.ask(replace=workers[rank])

    def _apply(self, at: Position, control: Control, step: int) -> None:
        """The leader's word: in force from the next step on, on every worker."""
        before = (at.batch_size, at.lr_scale)
        lr_before = self._lr(at)
        bounds = self._settings.bounds
        wanted = control.batch_size or at.batch_size
        at.batch_size = min(max(wanted, bounds.batch_min), bounds.batch_max)
        if control.batch_size:
            clipped = at.batch_size != wanted
            self._tell(at, "set_batch_size", f"batch_size {wanted} clipped to {at.batch_size}" if clipped else None)
        at.lr_scale = control.lr_scale or at.lr_scale
        if before != (at.batch_size, at.lr_scale):
            changes: dict[str, list[float]] = {
                "batch_size": [before[0], at.batch_size],
                "lr": [lr_before, self._lr(at)],
            }
            changed = {name: pair for name, pair in changes.items() if pair[0] != pair[1]}
            self._reports.event(at.step, "decision", **changed)
        topology, tree = self._session.topology, self._session.tree
        if control.transport:
            topology = transports.NAMES[control.transport - 1]
            self._reports.event(at.step, "decision", topology=topology)
        if control.tree:
            tree = transports.TREES[control.tree - 1]
            self._reports.event(at.step, "decision", tree=tree)
        if control.transport or control.tree:
            self._session.use_transport(topology, tree)
        if control.sync_every and control.sync_every != at.sync_every:
            self._reports.event(at.step, "decision", sync=[at.sync_every, control.sync_every])
            at.sync_every = control.sync_every
        if step >= at.resumed_at:
            at.generation = control.generation or at.generation
            at.stop = control.stop or at.stop

    def _lr(self, at: Position) -> float:
        """The learning rate of the coming step."""
        statistics = (at.mean_grad_sq, at.mean_grad_variance)
        return self._opt.base_lr * self._schedule.factor(at.schedule, at.batch_size, at.lr_scale, *statistics)
