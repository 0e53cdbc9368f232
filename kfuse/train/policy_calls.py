"""Calls the policy of a training, and requests what it decides within the bounds.

An error of the policy is reported, and ends the job on all workers. Only an `Exception` is one: KeyboardInterrupt
(Ctrl-C) and SystemExit pass through, as elsewhere in a script.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, NoReturn, TypeVar

from kfuse.checkpoint import plain_copy
from kfuse.comm.group import CommError
from kfuse.elastic.client import ControlError
from kfuse.policies import BasePolicy
from kfuse.policies.signals import Decision, Signals, checked_decision
from kfuse.statistics.figures import Measured, StepContext, StepSettings
from kfuse.statistics.step_stats import StepStats
from kfuse.train.context import TrainContext
from kfuse.train.decisions import Decisions
from kfuse.train.load_balance import relative_throughput

_KILLED_S = 5.0

Returned = TypeVar("Returned")


class PolicyCalls:
    """The calls of one policy in one training. As a part of the training state it is the policy's."""

    def __init__(self, training: TrainContext, decisions: Decisions) -> None:
        self.policy, self._settings, self._decisions = training.policy, training.settings, decisions
        self._session, self._progress, self._reporter = training.session, training.progress, training.reporter
        self._reported: Exception | None = None
        """The error that ends training; None: none does."""

    def begin(self) -> None:
        """Applies the policy's initial settings, on rank 0, before the first step."""
        decision = self._call("initial", lambda: checked_decision(self.policy.initial(), self._name("initial")))
        if decision is not None:
            self.request_within_bounds(decision)
            self._decisions.apply_requested()

    def decide(self, signals: Signals) -> None:
        """The policy decides on a finished step."""
        if getattr(self.policy.decide, "__func__", None) is BasePolicy.decide:
            return
        decision = self._call("decide", lambda: checked_decision(self.policy.decide(signals), self._name("decide")))
        if decision is not None:
            self.request_within_bounds(decision)

    def state_dict(self) -> dict[str, Any]:
        """Returns the policy's state. What a checkpoint cannot hold is an error of the policy too."""
        what = f"the value of {self._name('state_dict')}"
        state: dict[str, Any] = self._call("state_dict", lambda: plain_copy(self.policy.state_dict(), what))
        return state or {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The policy takes over another worker's state, or a checkpoint's."""
        self._call("load_state_dict", lambda: self.policy.load_state_dict(state))

    def hook(self, name: str) -> None:
        """Calls a hook. Raises CommError if a worker is lost in a collective of it."""
        method = getattr(self.policy, name)
        if getattr(method, "__func__", None) is not getattr(BasePolicy, name):
            self._call(name, method)

    def _call(self, method: str, act: Callable[[], Returned]) -> Returned:
        """Calls it, and reports an error of it."""
        try:
            return act()
        except (CommError, ControlError):  # of a hook's collective: a worker, or the supervisor, is lost
            raise
        except Exception as error:
            self._end(method, error)

    def _end(self, method: str, error: Exception) -> NoReturn:
        """Reports the error with its traceback, once, and raises it. A supervisor ends all workers."""
        if error is self._reported:  # of kf.state_dict, which a hook has called
            raise error
        self._reported = error
        name, step = self._name(method), self._progress.step
        why = " ".join("".join(traceback.format_exception_only(error)).split())
        told = f"kfuse: step {step}: the policy's {name} has raised an error; training ends"
        frames = "".join(traceback.format_exception(error))
        about = {"method": name, "why": why, "traceback": frames}
        event = {"step": step, "kind": "policy_failed", "worker": self._session.worker, **about}
        if self._session.elastic:
            self._session.give_up(f"the policy's {name} has raised {why}", event, [told, *frames.splitlines()])
            time.sleep(_KILLED_S)  # the supervisor has told it, and kills this process
        else:
            self._reporter.of_any_worker(event)
            print(told, file=sys.stderr, flush=True)  # Python prints the traceback of what is raised here
        raise error

    def _name(self, method: str) -> str:
        return f"{type(self.policy).__name__}.{method}"

    # -- what it sees, and what of its decisions is requested -----------------------------------------------------

    def signals(self, stats: StepStats, context: StepContext) -> Signals:
        """Returns what a policy sees of a finished step. context: the settings that the step was made with."""
        at, workers, links = self._progress, self._session.workers, self._session.group.links
        return Signals(
            step=stats.step,
            micro_batch=self._settings.batch_micro,
            throughput=tuple(relative_throughput(at.throughput, workers)),
            corrupt_workers=tuple(rank for rank, worker in enumerate(workers) if worker in at.corrupt),
            previous_step_time_s=stats.previous_step_time_s,
            previous_data_wait_s=stats.previous_data_wait_s,
            eval_accuracy=at.accuracy,
            bounds=self._settings.bounds,
            under_interference=at.interference,
            link_latencies=None if links is None else links.latencies,
            link_throughputs=None if links is None else links.throughputs,
            base_batch_size=self._settings.batch_size,
            epoch_samples=at.epoch_samples,
            **{each.name: getattr(context, each.name) for each in fields(StepSettings)},
            **{each.name: getattr(stats, each.name) for each in fields(Measured)},
        )

    def request_within_bounds(self, decision: Decision) -> None:
        """Requests what a policy or a script decided, within the bounds. Events tell what was clipped."""
        decisions, elastic, size = self._decisions, self._session.elastic, self._session.group.size
        if decision.workers is not None and not elastic:
            if decision.workers != size and decisions.workers_requested in (0, size):  # once, while it stays so
                decisions.report_clipped(f"workers {decision.workers}: this job's number of workers is fixed")
            decisions.workers_requested = decision.workers
            decision = replace(decision, workers=None)
        decision = self._clip(decision)
        workers = decision.workers
        if workers is not None and workers != decisions.workers_requested:
            decisions.request(workers=workers)
        if (rank := decision.replace) is not None:
            granted = elastic and rank in range(size)
            refused = f"replace {rank}: must be a rank from 0 to {size - 1} of an elastic job"
            decisions.report_if_clipped("replace", None if granted else refused)
            if granted:
                self._session.ask_supervisor("replace", worker=self._session.workers[rank])
        decisions.request(batch_size=decision.batch_size, lr_scale=decision.lr_scale)
        for name in ("sync", "topology", "tree"):
            if (value := getattr(decision, name)) is not None:
                refusal = None
                try:
                    decisions.request(**{name: value})
                except ValueError as error:  # this job cannot have it
                    refusal = f"{error}; it stays as it is"
                decisions.report_if_clipped(name, refusal)

    def _clip(self, asked: Decision) -> Decision:
        """Returns the decision within the bounds, without a factor that the rate cannot have. Reports what changes."""
        decision, notes = asked.clipped(self._settings.bounds)
        if decision.lr_scale is not None and (why := self._decisions.rate.refusal(decision.lr_scale)) is not None:
            notes.append(f"lr_scale {decision.lr_scale} dropped: {why}")
            decision = replace(decision, lr_scale=None)
        by_name = {note.split()[0]: note for note in notes}
        for name in ("batch_size", "workers", "lr_scale"):
            if getattr(asked, name) is not None:
                self._decisions.report_if_clipped(name, by_name.get(name))
        return decision
