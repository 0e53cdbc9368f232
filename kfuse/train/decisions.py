"""Decisions: from what a step measured, to a request, to rank 0's announcement, to the settings of later steps.

Every worker runs this with the same values and reaches the same result. Only rank 0's requests are sent; other ranks'
are dropped. What is announced is a dictionary of plain values, by the names of `request`. Its number travels in the
tail of the next step's gradients, so that every worker applies it at the same step; its content goes by
`train.published`.

    step s      is measured
    step s + 1  runs; afterwards the policy sees the figures of step s (they have reached the host without a wait)
    step s + 2  carries the announcement
    step s + 4  is the first one that the decision applies to

Batch size, learning rate or a factor on it, synchronisation, topology and tree go this way, and so do the next view and
the end of training. A number of workers is requested from the supervisor, which proposes a view when they are ready.

With pair averaging announcements go over the control channel, and apply as `kfuse.train.pair` says.
"""

from __future__ import annotations

import contextlib
import logging
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from kfuse.comm import interference, transport_names
from kfuse.comm.latency import measure
from kfuse.comm.sync import Sync
from kfuse.comm.topology import Links, check_parents
from kfuse.membership import Session
from kfuse.optim import DistributedOptimizer
from kfuse.policies.signals import FP32_MAX, FP32_MIN, FP32_RANGE, Decision, Signals
from kfuse.settings import rules
from kfuse.statistics.figures import Measured, StepContext, StepSettings
from kfuse.statistics.step_stats import StepStats
from kfuse.train import input_bound, load_balance
from kfuse.train.lr_schedule import BatchChange, LRSchedule
from kfuse.train.policy_calls import PolicyCalls
from kfuse.train.progress import STOP_REASONS, Progress
from kfuse.train.published import Published
from kfuse.train.reporter import Reporter
from kfuse.train.settings import Settings, session_facts

_LOG = logging.getLogger("kfuse")


class Decisions:
    """What is requested, announced and applied in one training. The methods follow a decision in this order."""

    def __init__(
        self,
        session: Session,
        calls: PolicyCalls,
        opt: DistributedOptimizer,
        schedule: LRSchedule,
        settings: Settings,
        progress: Progress,
        reporter: Reporter,
    ) -> None:
        self._session, self._calls, self._opt, self._schedule = session, calls, opt, schedule
        self._settings, self._progress, self._reporter = settings, progress, reporter
        self._requested: dict[str, Any] = {}
        """What is not announced yet, or announced with the step under way."""
        self._announced: dict[str, Any] = {}
        """What the step under way announces of it."""
        self._published = Published(session)
        self._under_way: dict[int, dict[str, Any]] = {}
        """By step: what it announced, where that has arrived here and is not applied yet."""
        self.lr = 0.0
        """The learning rate of the step under way."""
        self.topology: str | None = None
        """The transport that a decision chose; None: the configured one."""
        self.tree: str | list[int] | None = None
        """The shape that a decision chose for the transport `tree`; None: the configured one. A list of parents is of
        the present view."""
        self._reported_links: Links | None = None
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
        decision = self._calls.initial()
        if decision is not None:
            self.request_within_bounds(decision)
            requested, self._requested = self._requested, {}
            if isinstance(requested.get("tree"), list):  # the others learn of a list by the first step's announcement
                self._requested["tree"] = requested.pop("tree")
            self.apply(requested)

    def decide(self, stats: StepStats, context: StepContext, signals: Signals) -> None:
        """The policy decides on a finished step; then what rank 0 announced with that step is applied.

        context: the settings that the step was made with. signals: of the step, from `signals`.
        """
        at = self._progress
        decision = self._calls.decide(signals)
        if decision is not None:
            self.request_within_bounds(decision)
        announced = self._under_way.pop(stats.step, {})
        self.apply(announced, context.members)
        if stats.step >= at.resumed_at:
            at.generation = announced.get("generation", at.generation)
            at.stop = announced.get("stop", at.stop)

    def update_progress(self, stats: StepStats, context: StepContext) -> None:
        """Writes what a step measured into `Progress`. Reports interference, and each worker that becomes a straggler.

        Neither is reported again until it has been over at least once.
        """
        at, workers, workers_now = self._progress, context.members, self._session.workers
        at.mean_grad_sq, at.mean_grad_variance, at.loss = stats.mean_grad_sq, stats.mean_grad_variance, stats.loss
        at.waiting = input_bound.measured(at.waiting, stats.previous_step_time_s, stats.previous_data_wait_s)
        at.input_bound = input_bound.is_bound(at.waiting, at.input_bound)
        at.held_back = at.held_back and at.input_bound
        if self._session.group.size == 1 and not self._session.elastic:
            return
        unit = self._settings.batch_micro
        seconds = [each * (unit / (context.micro_batch or unit)) for each in stats.seconds]
        at.throughput = load_balance.measured(at.throughput, workers, seconds)
        relative = load_balance.relative_throughput(at.throughput, workers_now)
        for rank, (worker, ratio) in enumerate(zip(workers_now, relative, strict=True)):
            if ratio is not None and ratio < load_balance.SLOW and worker not in at.stragglers:
                self._reporter.event(at.step, "straggler", worker=worker, rank=rank, throughput=ratio)
        at.stragglers = load_balance.stragglers(workers_now, relative, at.stragglers)
        found = interference.verdict(stats.votes, relative) if workers_now == list(workers) else None
        if found and not at.interference:
            votes = [rank for rank, vote in enumerate(stats.votes) if vote == interference.SLOWER]
            self._reporter.event(at.step, "interference", ranks=votes)
        at.interference = at.interference if found is None else found

    def request(
        self,
        *,
        batch_size: int | None = None,
        lr_scale: float | None = None,
        lr: float | None = None,
        topology: str | None = None,
        tree: str | Sequence[int] | None = None,
        sync: str | None = None,
        workers: int | None = None,
    ) -> None:
        """Requests changes: rank 0 announces them with the next step, or sends them to the supervisor (`workers`).

        batch_size: samples, over all workers. Of lr_scale and lr give one; it replaces an earlier request of either.
        tree: a name, or each rank's parent. Raises TypeError where `workers` is not a whole number, ValueError for a
        synchronisation, topology or tree that does not exist, and for one that comm.reproducible=true or
        comm.state=sharded rules out.
        """
        if topology is not None:
            rules.check(session_facts(self._session) | {"comm.schedule": topology})
            topology = self._session.comm.transport(topology)
            if topology == "symmetric" and self._session.comm.schedule != "symmetric":
                raise ValueError(f"topology {topology!r}: must be named at the start, as comm.schedule")
            _check_name("topology", topology, transport_names.NAMES)
        if isinstance(tree, str):
            _check_name("tree", tree, transport_names.TREES)
        elif tree is not None:
            tree = _whole_numbers(tree)
            check_parents(tree, self._session.group.size)
        if sync is not None:
            sync = str(Sync.parse(sync))
            rules.check(session_facts(self._session) | {"comm.sync": sync})
        if lr_scale is not None or lr is not None:
            self._requested.pop("lr", None)
            self._requested.pop("lr_scale", None)
            # The same rate may be under way already, without the batch size that is requested with this one.
            self._announced.pop("lr", None)
        asked: dict[str, Any] = {"batch_size": None if batch_size is None else int(batch_size)}
        asked |= {"lr_scale": None if lr_scale is None else float(lr_scale)}
        asked |= {"lr": None if lr is None or lr_scale is not None else float(lr)}
        asked |= {"topology": topology, "tree": tree, "sync": sync}
        self._requested |= {name: value for name, value in asked.items() if value is not None}
        if workers is not None:
            self.workers_requested = operator.index(workers)
            self._session.ask_supervisor("resize", workers=self.workers_requested)

    def request_lr(self, lr: float) -> None:
        """Requests the learning rate `lr`; the schedule continues from it. Raises ValueError if it is out of reach.

        The factor that leads to it is computed where it is applied, since a batch size that applies at the same step
        changes the rate too.
        """
        now = self.lr
        if not (math.isfinite(lr) and lr > 0):
            raise ValueError(f"kf.set_lr({lr}): must be a finite number above 0")
        if not now > 0:
            raise ValueError(f"kf.set_lr({lr}): the learning rate is 0 now, which no factor changes: set it later")
        if not FP32_MIN <= lr <= FP32_MAX:
            raise ValueError(f"kf.set_lr({lr}): must be {FP32_RANGE}, fp32's range")
        if why := self._rate_refusal(lr / now * self._progress.lr_scale):
            raise ValueError(f"kf.set_lr({lr}): {why}")
        self.request(lr=lr)

    def signals(self, stats: StepStats, context: StepContext) -> Signals:
        """What a policy sees of a finished step."""
        links = self._session.group.links
        return Signals(
            step=stats.step,
            micro_batch=self._settings.batch_micro,
            throughput=tuple(load_balance.relative_throughput(self._progress.throughput, self._session.workers)),
            corrupt_workers=tuple(
                rank for rank, worker in enumerate(self._session.workers) if worker in self._progress.corrupt
            ),
            previous_step_time_s=stats.previous_step_time_s,
            previous_data_wait_s=stats.previous_data_wait_s,
            eval_accuracy=self._progress.accuracy,
            bounds=self._settings.bounds,
            under_interference=self._progress.interference,
            link_latencies=None if links is None else links.latencies,
            link_throughputs=None if links is None else links.throughputs,
            base_batch_size=self._settings.batch_size,
            epoch_samples=self._progress.epoch_samples,
            **{each.name: getattr(context, each.name) for each in fields(StepSettings)},
            **{each.name: getattr(stats, each.name) for each in fields(Measured)},
        )

    def request_within_bounds(self, decision: Decision) -> None:
        """Requests what a policy or a script decided, within the bounds. An event records what is changed."""
        if decision.workers is not None and not self._session.elastic:
            self._report_fixed_workers(decision.workers)
            decision = replace(decision, workers=None)
        decision = self._clip(decision)
        if decision.workers is not None:
            self._request_workers(decision.workers)
        if decision.replace is not None:
            self._request_replacement(decision.replace)
        self.request(batch_size=decision.batch_size, lr_scale=decision.lr_scale)
        for name in ("sync", "topology", "tree"):
            if (value := getattr(decision, name)) is not None:
                self._request_if_possible(name, value)

    def _report_fixed_workers(self, workers: int) -> None:
        """A policy asks for a number of workers in a job without a supervisor: reported once, while it stays so."""
        size = self._session.group.size
        if workers != size and self.workers_requested in (0, size):
            self._report_clipped(f"workers {workers}: this job's number of workers is fixed")
        self.workers_requested = workers

    def _clip(self, asked: Decision) -> Decision:
        """The decision within the bounds, without a factor that the learning rate cannot have. Reports what changes."""
        decision, notes = asked.clipped(self._settings.bounds)
        if decision.lr_scale is not None and (why := self._rate_refusal(decision.lr_scale)) is not None:
            notes.append(f"lr_scale {decision.lr_scale} dropped: {why}")
            decision = replace(decision, lr_scale=None)
        by_name = {note.split()[0]: note for note in notes}
        for name in ("batch_size", "workers", "lr_scale"):
            if getattr(asked, name) is not None:
                self._report_if_clipped(name, by_name.get(name))
        return decision

    def _request_workers(self, workers: int) -> None:
        """Asks the supervisor for so many workers, unless that was done before or training is input-bound."""
        if not self._is_held_back(workers) and workers != self.workers_requested:
            self.request(workers=workers)

    def _request_replacement(self, rank: int) -> None:
        """Asks the supervisor for a new worker in place of the one of this rank."""
        session = self._session
        ranks = range(len(session.workers))
        refused = f"replace {rank}: must be a rank from 0 to {ranks[-1]} of an elastic job"
        granted = session.elastic and rank in ranks
        self._report_if_clipped("replace", None if granted else refused)
        if granted:
            session.ask_supervisor("replace", worker=session.workers[rank])

    def _rate_refusal(self, lr_scale: float) -> str | None:
        """Why the optimizer's rates cannot have this factor; None if they can. A rate of 0 can have any.

        The gain for the batch size counts too. Warm-up and decay do not: they may well lead to 0.
        """
        for rate in filter(None, self._opt.base_rates()):
            scaled = rate * self._gain() * lr_scale
            if not FP32_MIN <= abs(scaled) <= FP32_MAX:
                return f"a learning rate of {rate} would become {scaled:.3g}, out of fp32's range, {FP32_RANGE}"
        return None

    def _is_held_back(self, workers: int) -> bool:
        """Whether a policy's request for more workers is refused: training is input-bound, and they would wait too.

        An event records the first refusal; the next one comes after training was not input-bound for a while. Batch
        sizes are never refused here: they change the trained model, and the model must not depend on timing.
        """
        at, now = self._progress, self._session.group.size
        if not at.input_bound or workers <= now or self._calls.policy.grows_when_input_bound:
            return False
        if not at.held_back:
            part = input_bound.fraction(at.waiting)
            self._reporter.event(at.step, "input_bound", workers=[now, workers], waiting=part)
        at.held_back = True
        return True

    def _request_if_possible(self, name: str, value: Any) -> None:
        """Requests one setting. An event records what this job cannot have."""
        refusal, asked = None, {name: value}
        try:
            self.request(**asked)
        except ValueError as error:
            refusal = f"{error}; it stays as it is"
        self._report_if_clipped(name, refusal)

    def _report_if_clipped(self, name: str, note: str | None) -> None:
        """Reports that a request was clipped: once, until the note changes. note: None where it was granted."""
        if note is not None and note != self._clipped.get(name):
            self._report_clipped(note)
        self._clipped[name] = note

    def _report_clipped(self, note: str) -> None:
        self._reporter.event(self._progress.step, "clipped", note=note)

    # -- announced ------------------------------------------------------------------------------------------------

    def announce(self) -> int:
        """On rank 0: sends what the coming step announces, and returns its number; 0 on the others, and for nothing.

        Raises CommError.
        """
        self._announced = dict(self._requested)
        if self._session.group.rank != 0:
            return 0
        stop = self._session.stop_reason() or (self.stop_requests or [""])[-1]
        index = STOP_REASONS.index(stop) if stop in STOP_REASONS else 0
        of_the_job = {"generation": self._session.proposed_generation(), "stop": index}
        content = self._announced | {name: value for name, value in of_the_job.items() if value}
        return self._published.send(content) if content else 0

    def take_requested(self) -> dict[str, Any]:
        """Returns what is requested, which is no longer so: it goes over the control channel (pair averaging)."""
        requested, self._requested = self._requested, {}
        return requested

    def receive(self, lag: int) -> None:
        """Waits for what was announced with the steps not yet read, but for the newest `lag` ones. Raises CommError."""
        for step, number in self._opt.statistics.decisions(lag):
            context = self._progress.contexts.get(step)  # None: its update was interrupted, and the step comes again
            if context is not None and step not in self._under_way:
                self._under_way[step] = self._published.receive(context.members[0], number)

    def announcement_sent(self) -> None:
        """The step that carried the announcement is complete: what was announced is no longer requested.

        `lr` is now what the update had: a loop's body may set group["lr"] before opt.step().
        """
        self.lr = self._opt.last_lr
        self._requested = {name: it for name, it in self._requested.items() if it != self._announced.get(name)}
        self._announced = {}

    # -- applied --------------------------------------------------------------------------------------------------

    def apply(self, announced: Mapping[str, Any], members: Sequence[int] | None = None) -> None:
        """Applies what rank 0 announced, on every worker, from the next step on.

        members: the workers' numbers as it was made, in rank order; None: the present ones.
        """
        if not announced:
            return
        at = self._progress
        batch_size, lr, gain = at.batch_size, self._opt.base_lr * self._lr_factor(), self._gain()
        at.batch_size = announced.get("batch_size", at.batch_size)
        if at.batch_size != batch_size and self._settings.lr_change_warmup_steps:
            at.batch_change = (at.schedule, gain)
        before, at.lr_scale = at.lr_scale, announced.get("lr_scale", at.lr_scale)
        if "lr" in announced:
            self._apply_lr(announced["lr"])
        if at.lr_scale != before or at.batch_size != batch_size:
            pairs: dict[str, list[float]] = {
                "batch_size": [batch_size, at.batch_size],
                "lr": [lr, self._opt.base_lr * self._lr_factor()],
            }
            self._report_change(**{name: pair for name, pair in pairs.items() if pair[0] != pair[1]})
        if (topology := announced.get("topology", self.topology)) != self.topology:
            self.topology = topology
            self._report_change(topology=self.topology)
            _LOG.info("step %d: transport %s from here on, as decided", self._progress.step, self.topology)
        self._apply_tree(announced.get("tree", self.tree), members)
        self.use_transport()
        if (sync := announced.get("sync", at.sync)) != at.sync:
            self._report_change(sync=[at.sync, sync])
            at.sync = sync

    def _apply_tree(self, tree: str | list[int] | None, members: Sequence[int] | None) -> None:
        workers = self._session.workers
        if isinstance(tree, list) and (len(tree) != len(workers) or list(members or workers) != workers):
            self._report_clipped(f"tree {tree} dropped: the workers have changed since")
        elif tree != self.tree:
            self.tree = tree
            self._report_change(tree=self.tree)

    def _apply_lr(self, lr: float) -> None:
        """The coming step has this rate, whatever its batch size is. What is left of a change's warm-up is dropped."""
        at = self._progress
        steps = at.counted(self._settings, at.step + 1)
        if self._schedule.done(steps, at.samples) >= 1:
            return  # no step comes
        at.batch_change = None
        rate = self._opt.base_lr * self._lr_factor(at.step + 1, lr_scale=1.0)
        dropped = f"set_lr {lr} dropped: the learning rate is 0 in this step, which no factor changes"
        self._report_if_clipped("set_lr", None if rate > 0 else dropped)
        if rate > 0:
            at.lr_scale = lr / rate

    def _report_change(self, **changed: Any) -> None:
        self._reporter.event(self._progress.step, "decision", **changed)

    def use_transport(self) -> None:
        """Sets the engine's transport and tree shape; does nothing if they are set already.

        While workers are apart their engines have none: each reduces alone.
        """
        if not self._session.apart:
            self._opt.engine.use_transport(
                self.topology, tuple(self.tree) if isinstance(self.tree, list) else self.tree
            )

    def leave_view(self) -> None:
        """The workers have changed: drops a list of parents, in use or requested, for the configured shape.

        Whether there is interference is unknown again.
        """
        self._progress.interference = None
        requested_list = isinstance(self._requested.get("tree"), list)
        if isinstance(self.tree, list) or requested_list:
            self.tree = None if isinstance(self.tree, list) else self.tree
            if requested_list:
                del self._requested["tree"]
            self._report_change(tree=self.tree or self._session.comm.tree, why="the workers have changed")

    def measure_links(self) -> None:
        """Between two steps, on every worker: measures the links where the tree needs them; reports new figures.

        Raises CommError if a worker is lost meanwhile.
        """
        group = self._session.group
        if self.tree == "latency" and group.links is None and group.size > 1 and not self._session.apart:
            measure(group)
        if (links := group.links) is not self._reported_links and links is not None and group.size > 1:
            figures = {"latency_s": links.latencies, "bytes_per_s": links.throughputs}
            self._reporter.event(self._progress.step, "links", **figures)
        self._reported_links = links

    def set_learning_rate(self) -> None:
        """Sets the factor of the coming update, and `lr` for reports (DistributedOptimizer.base_lr)."""
        self._opt.lr_factor = self._lr_factor()
        self.lr = self._opt.base_lr * self._opt.lr_factor

    def _lr_factor(self, steps: int | None = None, lr_scale: float | None = None) -> float:
        """steps: optimizer steps before the one that it is for; None: as many as are complete. lr_scale: None: that in
        force.
        """
        at = self._progress
        done = self._schedule.done(at.counted(self._settings, at.step if steps is None else steps), at.samples)
        scale = at.lr_scale if lr_scale is None else lr_scale
        return self._schedule.factor(
            at.schedule, done, at.batch_size, scale, at.mean_grad_sq, at.mean_grad_variance, self._batch_change
        )

    def _gain(self) -> float:
        """The part of it that follows the batch size."""
        at = self._progress
        return self._schedule.gain(
            at.schedule, at.batch_size, at.mean_grad_sq, at.mean_grad_variance, self._batch_change
        )

    @property
    def _batch_change(self) -> BatchChange | None:
        return None if self._progress.batch_change is None else BatchChange(*self._progress.batch_change)

    def count_update(self, samples: int) -> None:
        """The step's update, with `samples` samples, is made: the schedule advances."""
        at = self._progress
        # Apart, each worker has statistics of its own; but all must be over at one step.
        known = (None, None) if at.is_apart else (at.mean_grad_sq, at.mean_grad_variance)
        at.schedule = self._schedule.advance(at.schedule, samples, at.batch_size, *known, self._batch_change)

    def done(self, samples: int) -> float | None:
        """The part of the run that is over after the step under way, whose update is counted, and so many samples.

        None where it has no set length.
        """
        if self._schedule.total is None:
            return None
        return self._schedule.done(self._progress.counted(self._settings, self._progress.step + 1), samples)

    # -- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What applies, and what is requested and not yet applied: a resumed run must make the same decisions."""
        self.receive(lag=0)
        listed = isinstance(self._requested.get("tree"), list)
        return {
            "topology": self.topology,
            "tree": None if isinstance(self.tree, list) else self.tree,  # a list is of this view only
            "workers_requested": self.workers_requested,
            "requested": {name: it for name, it in self._requested.items() if not (listed and name == "tree")},
            "under_way": dict(self._under_way),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over the state of another worker or of a checkpoint. A list of parents in use stays: all of the view
        have it.
        """
        self.topology = state["topology"]
        if state["tree"] is not None or not isinstance(self.tree, list):
            self.tree = state["tree"]
        self.workers_requested = state["workers_requested"]
        self._requested, self._under_way = dict(state["requested"]), dict(state["under_way"])
        self.use_transport()


_RUNNING: list[Decisions] = []


def running() -> Decisions | None:
    """The decisions of the training that began last and has not ended; None if there is none."""
    return _RUNNING[-1] if _RUNNING else None


def _whole_numbers(tree: object) -> list[int]:
    """A list of parents. Raises ValueError for what is none."""
    try:
        return list(map(operator.index, tree))  # type: ignore[call-overload]
    except TypeError:
        what = f"must be one of {', '.join(transport_names.TREES)}, or a list with each rank's parent, a whole number"
        raise ValueError(f"tree {tree!r}: {what}") from None


def _check_name(what: str, name: str, allowed: Sequence[str]) -> None:
    if name not in allowed:
        raise ValueError(f"{what} {name!r}: must be one of {', '.join(allowed)}")
