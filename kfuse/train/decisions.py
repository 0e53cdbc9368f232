"""Decisions: from a policy's request, to rank 0's announcement, to the settings of later steps.

Every worker runs this with the same values and reaches the same result; only rank 0's requests are sent. A decision's
number travels in the tail of the next step's gradients, so that all apply it after the same step; its content goes over
the session's link. docs/architecture.md shows the steps. With pair averaging see `kfuse.train.pair`.
"""

from __future__ import annotations

import operator
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any

from kfuse.comm.group import CommError, Links
from kfuse.comm.settings import TRANSPORT_NAMES, TREES, Sync
from kfuse.elastic.protocol import ControlError
from kfuse.membership import Session
from kfuse.optim import DistributedOptimizer
from kfuse.policies.signals import BasePolicy, Bounds, Decision, Signals, checked_decision
from kfuse.settings import rules
from kfuse.settings.tree import ConfigError, TrainSettings
from kfuse.statistics.figures import Measured, StepContext, StepSettings
from kfuse.statistics.step_stats import StepStats
from kfuse.train.input_bound import reads, without_growth
from kfuse.train.learning_rate import LearningRate
from kfuse.train.progress import STOP_REASONS, Progress
from kfuse.train.reporter import Reporter
from kfuse.train.step import relative_throughput

_SETTINGS, _MEASURED = ([each.name for each in fields(kind)] for kind in (StepSettings, Measured))


@dataclass(eq=False)
class Decisions:
    """What is requested, announced and applied in one training. The methods follow a decision in this order."""

    session: Session
    opts: Sequence[DistributedOptimizer]
    rate: LearningRate
    facts: rules.Facts  # what `kfuse.settings.rules` are asked of, where a decision changes one
    progress: Progress
    reporter: Reporter

    def __post_init__(self) -> None:
        self._opt = self.opts[0]
        self._requested: dict[str, Any] = {}  # what is not announced yet, or announced with the step under way
        self._announced: dict[str, Any] = {}  # what the step under way announces of it
        self._under_way: dict[int, dict[str, Any]] = {}  # by step: what it announced, if it is here and not applied yet
        self.topology: str | None = None  # the transport that a decision chose; None: the configured one
        # Chosen for the transport `tree`; a list is for this view alone. None: as configured.
        self.tree: str | list[int] | None = None
        self._reported_links: Links | None = None
        self.workers_requested = 0  # the number of workers that was last requested; 0: none was
        self._clipped: dict[str, str | None] = {}  # by setting: how its latest request was clipped; None if it was not

    # -- requested ------------------------------------------------------------------------------------------------

    def request(self, workers: int | None = None, **asked: Any) -> None:
        """Requests changes: rank 0 announces them with the next step, or sends them to the supervisor (`workers`).

        batch_size: samples, over all workers. lr_scale or lr: replaces an earlier request of either. topology, sync.
        tree: a name, or each rank's parent. None: no request. Raises TypeError where `workers` is not a whole number,
        ValueError for what does not exist or is out of reach, and for what other settings rule out.
        """
        made: dict[str, Callable[[Any], Any]] = {"batch_size": int, "lr_scale": float, "lr": self.rate.reachable}
        made |= {"topology": self._transport, "tree": self._shape, "sync": self._mode}
        asked = {name: made[name](value) for name, value in asked.items() if value is not None}
        if "lr_scale" in asked or "lr" in asked:
            self._requested.pop("lr", None)
            self._requested.pop("lr_scale", None)
            # The same rate may be under way already, without the batch size that is requested with this one.
            self._announced.pop("lr", None)
        self._requested |= asked
        if workers is not None:
            self.workers_requested = operator.index(workers)
            self.session.ask_supervisor("resize", workers=self.workers_requested)

    def _mode(self, sync: str) -> str:
        mode = str(Sync.parse(sync))
        rules.check({**self.facts, "comm.sync": mode})
        return mode

    def _transport(self, topology: str) -> str:
        rules.check({**self.facts, "comm.schedule": topology})
        name = self.session.comm.transport(topology)
        if name == "symmetric" and self.session.comm.schedule != "symmetric":
            raise ValueError(f"topology {name!r}: must be named at the start, as comm.schedule")
        if name not in TRANSPORT_NAMES:
            raise ValueError(f"topology {name!r}: must be one of {', '.join(TRANSPORT_NAMES)}")
        return name

    def _shape(self, tree: str | Sequence[int]) -> str | list[int]:
        if isinstance(tree, str) and tree in TREES:
            rules.check({**self.facts, "comm.tree": tree})
            return tree
        try:
            parents = [operator.index(parent) for parent in tree]  # type: ignore[arg-type]
        except TypeError:
            known = ", ".join(TREES)
            raise ValueError(f"tree {tree!r}: must be one of {known}, or a list with each rank's parent") from None
        from kfuse.comm.topology import check_parents  # few jobs need it

        check_parents(parents, self.session.group.size)
        return parents

    def report_if_clipped(self, name: str, note: str | None) -> None:
        """Reports that a request was clipped: once, until the note changes. note: None where it was granted."""
        if note is not None and note != self._clipped.get(name):
            self.report_clipped(note)
        self._clipped[name] = note

    def report_clipped(self, note: str) -> None:
        self.reporter.event(self.progress.step, "clipped", note=note)

    # -- announced ------------------------------------------------------------------------------------------------

    def announce(self) -> int:
        """On rank 0: sends what the coming step announces; returns its number, 0 for none. Raises CommError."""
        self._announced = dict(self._requested)
        if self.session.group.rank or self.session.part[0]:  # it does not lead: asked in each step, without a call
            return 0
        stop = self.session.link.stop
        index = STOP_REASONS.index(stop) if stop in STOP_REASONS else 0
        of_the_job = {"generation": self.session.proposed_generation(), "stop": index}
        content = self._announced | {name: value for name, value in of_the_job.items() if value}
        try:
            return self.session.link.publish(content) if content else 0
        except RuntimeError as error:
            raise CommError(f"rank 0 could not send a decision: {error}") from error

    def take_requested(self) -> dict[str, Any]:
        """Returns what is requested, which is no longer so: before the first step, and with pair averaging."""
        requested, self._requested = self._requested, {}
        return requested

    def receive(self, lag: int) -> None:
        """Waits for what was announced with the steps not yet read, but for the newest `lag` ones. Raises CommError."""
        for step, number in self._opt.statistics.decisions(lag):
            context = self.progress.contexts.get(step)  # None: its update was interrupted, and the step comes again
            if context is not None and step not in self._under_way:
                fetch = partial(self._fetch, context.members[0], number)
                self._under_way[step] = self.session.together(fetch, f"decision {number}")

    def _fetch(self, leader: int, number: int) -> dict[str, Any]:
        try:
            return self.session.link.fetch(leader, number, self.session.group.timeout_s)
        except (RuntimeError, TimeoutError) as error:
            raise CommError(f"decision {number} of rank 0 (worker {leader}) has not arrived: {error}") from error

    def announcement_sent(self) -> None:
        """The step that carried the announcement is complete: what was announced is no longer requested."""
        self.rate.now = self._opt.last_lr  # the update's: a loop's body may set group["lr"] before opt.step()
        self._requested = {name: it for name, it in self._requested.items() if it != self._announced.get(name)}
        self._announced = {}

    # -- applied --------------------------------------------------------------------------------------------------

    def apply_announced(self, stats: StepStats, context: StepContext) -> None:
        """Applies what rank 0 announced with a finished step. context: the settings that the step was made with."""
        at, announced = self.progress, self._under_way.pop(stats.step, {})
        self.apply(announced, context.members)
        at.generation = announced.get("generation", at.generation)
        at.stop = announced.get("stop", at.stop)

    def apply(self, announced: Mapping[str, Any], members: Sequence[int] | None = None) -> None:
        """Applies what rank 0 announced, from the next step on. members: the workers then, in rank order; None: now."""
        if not announced:
            return
        at = self.progress
        batch_size, lr, scale = at.batch_size, self.rate.scheduled(), at.lr_scale
        at.batch_size = announced.get("batch_size", batch_size)
        at.lr_scale = announced.get("lr_scale", scale)
        if "lr" in announced:
            dropped = f"set_lr {announced['lr']} dropped: the learning rate is 0 in this step, which no factor changes"
            self.report_if_clipped("set_lr", None if self.rate.reach(announced["lr"]) else dropped)
        if at.lr_scale != scale or at.batch_size != batch_size:
            pairs: dict[str, Any] = {"batch_size": [batch_size, at.batch_size], "lr": [lr, self.rate.scheduled()]}
            self._report_change(**{name: pair for name, pair in pairs.items() if pair[0] != pair[1]})
        if (topology := announced.get("topology", self.topology)) != self.topology:
            self.topology = topology
            self._report_change(topology=topology)
        tree, workers = announced.get("tree", self.tree), self.session.workers
        if isinstance(tree, list) and (len(tree) != len(workers) or list(members or workers) != workers):
            self.report_clipped(f"tree {tree} dropped: the workers have changed since")
        elif tree != self.tree:
            self.tree = tree
            self._report_change(tree=tree)
        self.use_transport()
        if (sync := announced.get("sync", at.sync)) != at.sync:
            self._report_change(sync=[at.sync, sync])
            at.sync = sync

    def _report_change(self, **changed: Any) -> None:
        self.reporter.event(self.progress.step, "decision", **changed)

    def use_transport(self) -> None:
        if not self.session.apart:  # else each engine reduces alone
            tree = tuple(self.tree) if isinstance(self.tree, list) else self.tree
            for opt in self.opts:
                opt.engine.use_transport(self.topology, tree)

    def leave_view(self) -> None:
        """The workers have changed: a list of parents is dropped."""
        requested = isinstance(self._requested.get("tree"), list) and self._requested.pop("tree")
        if isinstance(self.tree, list) or requested:
            self.tree = None if isinstance(self.tree, list) else self.tree
            self._report_change(tree=self.tree or self.session.comm.tree, why="the workers have changed")

    def measure_links(self) -> None:
        """Between two steps: measures the links where the tree needs them; reports new figures. Raises CommError."""
        group = self.session.group
        if self.tree == "latency" and group.links is None and group.size > 1 and not self.session.apart:
            from kfuse.comm.topology import measure  # few jobs need it

            measure(group)
        if (links := group.links) is not self._reported_links and links is not None and group.size > 1:
            figures = {"latency_s": links.latencies, "bytes_per_s": links.throughputs}
            self.reporter.event(self.progress.step, "links", **figures)
        self._reported_links = links

    def state_dict(self) -> dict[str, Any]:
        """Returns what applies, and what is requested and not yet applied: a resumed run must decide the same."""
        self.receive(lag=0)
        return {
            "topology": self.topology,
            "tree": self.tree,
            "workers_requested": self.workers_requested,
            "requested": dict(self._requested),
            "under_way": dict(self._under_way),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for made in (state, state["requested"], *state["under_way"].values()):
            for name, check in (("topology", self._transport), ("sync", self._mode)):
                if made.get(name) is not None:
                    try:
                        check(made[name])
                    except ValueError as error:  # the settings are others than as it was decided
                        raise ConfigError(f"another training's state, which has decided a {name}: {error}") from error
        self.topology, self.tree = state["topology"], state["tree"]
        if isinstance(self.tree, list) and len(self.tree) != len(self.session.workers):  # of a job of other workers
            self.tree = None
        self.workers_requested = state["workers_requested"]
        self._requested, self._under_way = dict(state["requested"]), dict(state["under_way"])
        self.use_transport()

    def forget_job(self) -> None:
        """What was loaded is of another run, whose views, stop and number of workers do not count here."""
        self.progress.stop = self.progress.generation = 0
        theirs = ("generation", "stop")
        for step, announced in self._under_way.items():
            self._under_way[step] = {name: value for name, value in announced.items() if name not in theirs}
        if self.session.view is not None:
            self.workers_requested = 0


@dataclass(eq=False)
class PolicyCalls:
    """The calls of one policy in one training. As a part of the training state it is the policy's.

    An error of the policy is reported, and ends the job on all workers. Only an `Exception` is one: KeyboardInterrupt
    (Ctrl-C) and SystemExit pass through, as elsewhere in a script.
    """

    policy: BasePolicy
    settings: TrainSettings
    bounds: Bounds  # of what the policy may request
    session: Session
    decisions: Decisions
    progress: Progress
    reporter: Reporter
    _reported: Exception | None = None  # the error that ends training; None: none does
    _reads: tuple[float, int, int] | None = None  # at the first decision here
    _input_bound: bool = False  # growth was dropped, and that was reported

    @cached_property
    def decides(self) -> bool:
        """Whether the policy has a `decide` of its own."""
        return getattr(self.policy.decide, "__func__", None) is not BasePolicy.decide

    def begin(self) -> None:
        """Applies the policy's initial settings, on rank 0, before the first step: all workers start from its state."""
        if self.decide("initial"):
            self.decisions.apply(self.decisions.take_requested())

    def decide(self, method: str, *given: Signals) -> bool:
        """Calls `decide` with the signals of a finished step, or `initial`. Returns whether the policy has decided."""
        act = getattr(self.policy, method)
        decision: Decision | None = self._call(method, lambda: checked_decision(act(*given), self._name(method)))
        at, reproducible = self.progress, self.session.comm.reproducible
        for signals in given:
            self._reads = self._reads or reads()
            decision, note = without_growth(decision, signals, at.waits, self.policy, reproducible)
            if note and not self._input_bound:
                self._report_input_bound(note, *self._reads)
        if decision is not None:
            self.request_within_bounds(decision)
        return decision is not None

    def _report_input_bound(self, note: str, *before: float) -> None:
        """Reports growth that was dropped, once in this process. before: `reads` at the first decision here."""
        self._input_bound = True
        seconds, *read = (now - then for now, then in zip(reads(), before, strict=True))
        note += f"; this worker and its loaders read {max(read) / seconds / 1e6:.3g} MB/s" if any(read) else ""
        self.reporter.event(self.progress.step, "input_bound", note=note)

    def state_dict(self) -> dict[str, Any]:
        """Returns the policy's state. What a checkpoint cannot hold is an error of the policy too."""
        from kfuse.comm.chunks import plain_copy  # for other workers and checkpoints

        what = f"the value of {self._name('state_dict')}"
        return self._call("state_dict", lambda: plain_copy(self.policy.state_dict(), what)) or {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._call("load_state_dict", lambda: self.policy.load_state_dict(state))

    def hook(self, name: str) -> None:
        """Calls a hook. Raises CommError if a worker is lost in a collective of it."""
        self._call(name, getattr(self.policy, name))

    def _call(self, method: str, act: Callable[[], Any]) -> Any:
        """Calls it. Reports an error of it with its traceback, once, and raises it. A supervisor ends all workers."""
        try:
            return act()
        except (CommError, ControlError):  # of a hook's collective: a worker, or the supervisor, is lost
            raise
        except Exception as error:
            if error is self._reported:  # of kf.state_dict, which a hook has called
                raise
            self._reported = error
            name, step = self._name(method), self.progress.step
            why = " ".join("".join(traceback.format_exception_only(error)).split())
            told = f"kfuse: step {step}: the policy's {name} has raised an error; training ends"
            frames = "".join(traceback.format_exception(error))
            event = {"step": step, "kind": "policy_failed", "worker": self.session.worker, "method": name}
            event |= {"why": why, "traceback": frames}
            if self.session.elastic:
                self.session.link.give_up(f"the policy's {name} has raised {why}", event, [told, *frames.splitlines()])
            else:
                self.reporter.report("event", event)
                print(told, file=sys.stderr, flush=True)  # Python prints the traceback of what is raised here
            raise

    def _name(self, method: str) -> str:
        return f"{type(self.policy).__name__}.{method}"

    # -- what it sees, and what of its decisions is requested -----------------------------------------------------

    def signals(self, stats: StepStats, context: StepContext) -> Signals:
        """Returns what a policy sees of a finished step. context: the settings that the step was made with."""
        at, workers, links = self.progress, self.session.workers, self.session.group.links
        return Signals(
            step=stats.step,
            micro_batch=self.settings["micro_batch"] or 1,
            throughput=tuple(relative_throughput(at.throughput, workers)),
            corrupt_workers=tuple(rank for rank, worker in enumerate(workers) if worker in at.corrupt),
            previous_step_time_s=stats.previous_step_time_s,
            previous_data_wait_s=stats.previous_data_wait_s,
            heldout_accuracy=at.evaluation.accuracy,
            bounds=self.bounds,
            link_latencies=None if links is None else links.latencies,
            link_throughputs=None if links is None else links.throughputs,
            base_batch_size=self.settings["batch_size"],
            epoch_samples=at.epoch_samples,
            **{name: getattr(context, name) for name in _SETTINGS},
            **{name: getattr(stats, name) for name in _MEASURED},
        )

    def request_within_bounds(self, decision: Decision) -> None:
        """Requests what a policy or a script decided, within the bounds. Events tell what was clipped."""
        decisions, elastic, size = self.decisions, self.session.elastic, self.session.group.size
        if decision.workers is not None and not elastic:
            if decision.workers != size and decisions.workers_requested in (0, size):  # once, while it stays so
                decisions.report_clipped(f"workers {decision.workers}: this job's number of workers is fixed")
            decisions.workers_requested = decision.workers
            decision = replace(decision, workers=None)
        nearest, notes = decision.clipped(self.bounds)
        if nearest.lr_scale is not None and (why := decisions.rate.refusal(nearest.lr_scale)) is not None:
            notes.append(f"lr_scale {nearest.lr_scale} dropped: {why}")
            nearest = replace(nearest, lr_scale=None)
        by_name = {note.split()[0]: note for note in notes}
        bounded = ("batch_size", "workers", "lr_scale")
        told = {name: by_name.get(name) for name in bounded if getattr(decision, name) is not None}
        if nearest.workers != decisions.workers_requested:
            decisions.request(workers=nearest.workers)
        if (rank := decision.replace) is not None:
            told["replace"] = f"replace {rank}: must be a rank from 0 to {size - 1} of an elastic job"
            if elastic and rank in range(size):
                told["replace"] = None
                self.session.ask_supervisor("replace", worker=self.session.workers[rank])
        decisions.request(batch_size=nearest.batch_size, lr_scale=nearest.lr_scale)
        for name in ("sync", "topology", "tree"):
            if (value := getattr(decision, name)) is not None:
                told[name] = None
                try:
                    decisions.request(**{name: value})
                except ValueError as error:  # this job cannot have it
                    told[name] = f"{error}; it stays as it is"
        for name, note in told.items():
            decisions.report_if_clipped(name, note)
