"""Runs a policy over a replay's steps.

The run's own policy follows the recorded steps, and so makes the recorded decisions again. Another policy makes steps
of its own.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kfuse.policies.signals import BasePolicy, Bounds, Decision, Signals, checked_decision
from kfuse.tools.replay.simulated import DecidedSettings, Gain, StepSource

_AT_PRESENT = ("sync", "topology", "tree", "replace")
"""Fields of a decision that are not settings of a step, as `DecidedSettings` has them."""


@dataclass(frozen=True)
class Change:
    """A decision that changes something, as it is applied after a step."""

    step: int
    """The step after which it is applied, as in events.jsonl; 0 for what the policy begins with."""
    samples: int
    """Samples used up to there."""
    before: DecidedSettings
    after: DecidedSettings
    others: Mapping[str, Any]
    """sync, topology, tree and replace, where the decision has them and they are new."""
    notes: tuple[str, ...]
    """What was clipped to the bounds."""
    seen: Signals | None
    """The signals that the policy decided on; None for what it begins with."""
    means: tuple[float | None, float | None]
    """The running means of G2 and S as it is applied: of the newest step whose statistics have been read."""

    def rate_factors(self, gain: Gain) -> tuple[float, float]:
        """Returns the factor on the learning rate before and after, of batch size and lr_scale."""
        before, after = (gain(each.batch_size, *self.means) * each.lr_scale for each in (self.before, self.after))
        return before, after


@dataclass
class ReplayResult:
    """What a policy did on a recorded run."""

    changes: list[Change] = field(default_factory=list)
    steps: int = 0
    samples: int = 0
    """Samples of these steps."""
    curve: list[tuple[int, int, int]] = field(default_factory=list)
    """(samples so far, batch size, workers) of the first step, and of each step where one of the two is another."""
    seconds: float | None = 0.0
    """Time of all steps; None where some have a batch size and worker count that the run did not have."""
    cut_off: bool = False
    """The recorded run's end was not reached: the replay would take too many steps."""


def run(
    policy: BasePolicy, source: StepSource, begin: DecidedSettings, bounds: Bounds, sync: str | None = None
) -> ReplayResult:
    """Asks the policy after each step, and applies what it decides as training does: DECISION_LAG steps later.

    begin: what the run is configured with. sync: `comm.sync` of the run, if it is known. Workers come at once.
    Raises TypeError if the policy returns what is no decision, and whatever the policy raises.
    """
    return _Replay(policy, source, begin, bounds, sync).result()


class _Replay:
    """A replay under way. The methods are in the order in which they happen."""

    def __init__(
        self, policy: BasePolicy, source: StepSource, begin: DecidedSettings, bounds: Bounds, sync: str | None
    ) -> None:
        self._policy, self._source, self._bounds = policy, source, bounds
        self._now = begin
        """What the step that comes is made with."""
        self._workers_requested = begin.workers
        """The number of workers that was last requested. Asking for it again changes nothing, as in training."""
        self._others: dict[str, Any] = dict.fromkeys(_AT_PRESENT) | {"sync": sync}
        """The present value of each of `_AT_PRESENT`; None: unknown."""
        self._pending: deque[tuple[int, Decision, Signals | None]] = deque()
        """Decisions that do not apply yet: the first step of each, the decision, and the signals behind it."""
        self._newest: deque[Signals] = deque(maxlen=2)
        """The signals of the last two steps, the latest first."""
        self._out = ReplayResult()

    def result(self) -> ReplayResult:
        """Makes all steps. Raises as `run`."""
        source, out, name = self._source, self._out, type(self._policy).__name__
        first, used = source.next_step, source.samples
        if first == 0 and (decision := checked_decision(self._policy.initial(), f"{name}.initial")) is not None:
            self._pending.append((0, decision, None))
        while True:
            self._apply_until(source.next_step)
            seen = source.step(self._now)
            if seen is None:
                break
            self._take_in(seen)
            decision = checked_decision(self._policy.decide(seen), f"{name}.decide")
            if decision is not None:
                self._pending.append((seen.in_force_at, decision, seen))
        self._apply_until(source.next_step + 1)  # announced with the last step
        out.steps, out.samples, out.cut_off = source.next_step - first, source.samples - used, source.cut_off
        return out

    def _apply_until(self, step: int) -> None:
        """Applies the decisions that are in force at this step."""
        while self._pending and self._pending[0][0] <= step:
            self._apply(*self._pending.popleft())

    def _apply(self, start: int, decision: Decision, seen: Signals | None) -> None:
        """Applies a decision from the step `start` on, within the bounds, and notes what it changes."""
        # A run that is resumed may have other bounds from then on.
        now, (granted, notes) = self._now, decision.clipped(self._bounds if seen is None else seen.bounds)
        scale = now.lr_scale if granted.lr_scale is None else granted.lr_scale
        after = DecidedSettings(
            granted.batch_size or now.batch_size,
            granted.workers if granted.workers not in (None, self._workers_requested) else now.workers,
            now.lr_scale if math.isclose(scale, now.lr_scale, rel_tol=1e-12) else scale,
        )
        self._workers_requested = granted.workers or self._workers_requested
        wanted = {name: value for name in _AT_PRESENT if (value := getattr(granted, name)) is not None}
        new = {name: value for name, value in wanted.items() if value != self._others[name]}
        self._others.update(wanted, replace=wanted.get("replace"))
        if new or after != now:
            # It is applied after the step start - 1. By then the statistics of start - 2 have been read, as the newest.
            read = next((each for each in self._newest if each.step <= start - 2), None)
            means = (None, None) if read is None else (read.mean_grad_sq, read.mean_grad_variance)
            applied = max(start - 1, 0)
            change = Change(applied, self._source.samples, now, after, new, tuple(notes), seen, means)
            self._out.changes.append(change)
        self._now = after

    def _take_in(self, seen: Signals) -> None:
        """Adds the step that was made last to the result. A recorded step's own settings are those in force now."""
        now, out = DecidedSettings(seen.batch_size, seen.workers, seen.lr_scale), self._out
        if not out.curve or out.curve[-1][1:] != (now.batch_size, now.workers):
            out.curve.append((seen.samples, now.batch_size, now.workers))
        took = self._source.seconds()
        out.seconds = None if took is None or out.seconds is None else out.seconds + took
        self._newest.appendleft(seen)
        self._now = now
