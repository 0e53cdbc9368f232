"""Runs a policy over a replay's steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kfuse.policies.signals import BasePolicy, Bounds, Decision, Signals, checked_decision
from kfuse.tools.replay.steps import DecidedSettings, Recorded, StepSource
from kfuse.train.input_bound import without_growth


@dataclass(frozen=True)
class Change:
    """A decision that changes something, as it is applied after a step."""

    step: int  # the step after which it is applied, as in events.jsonl; 0 for what the policy begins with
    samples: int  # samples used up to there
    before: DecidedSettings
    after: DecidedSettings
    others: Mapping[str, Any]  # sync, topology, tree and replace, where the decision has them and they are new
    notes: tuple[str, ...]  # what was clipped to the bounds
    seen: Signals | None  # the signals that the policy decided on; None for what it begins with
    rates: tuple[float, float]  # the factor on the learning rate before and after, of batch size and lr_scale


class Replay:
    """What a policy did on a recorded run."""

    def __init__(self, recorded: Recorded, bounds: Bounds) -> None:
        self._recorded, self._bounds = recorded, bounds
        self.changes: list[Change] = []
        self.steps = self.samples = 0  # steps made, and their samples
        self.cut_off = False  # the recorded run's end was not reached: the replay would take too many steps
        self.input_bound = 0  # steps after which growth was dropped: data wait was too long
        self.now = recorded.begin  # what the step that comes is made with
        # The number of workers that was last requested. Asking for it again changes nothing, as in training.
        self._workers_requested = self.now.workers
        # The present values of what is no setting of a step; None: unknown.
        self._others: dict[str, Any] = {"sync": recorded.sync, "topology": None, "tree": None, "replace": None}
        self.newest: deque[Signals] = deque(maxlen=2)  # the signals of the last two steps, the latest first

    def apply(self, start: int, decision: Decision, seen: Signals | None, samples: int) -> None:
        """Applies a decision from the step `start` on, within the bounds."""
        # A run that is resumed may have other bounds from then on.
        now, (granted, notes) = self.now, decision.clipped(self._bounds if seen is None else seen.bounds)
        scale = now.lr_scale if granted.lr_scale is None else granted.lr_scale
        self.now = DecidedSettings(
            granted.batch_size or now.batch_size,
            granted.workers if granted.workers not in (None, self._workers_requested) else now.workers,
            now.lr_scale if math.isclose(scale, now.lr_scale, rel_tol=1e-12) else scale,
        )
        self._workers_requested = granted.workers or self._workers_requested
        wanted = {name: value for name in self._others if (value := getattr(granted, name)) is not None}
        new = {name: value for name, value in wanted.items() if value != self._others[name]}
        self._others.update(wanted, replace=wanted.get("replace"))
        if new or self.now != now:
            # It is applied after the step start - 1. By then the statistics of start - 2 have been read, as the newest.
            read = next((each for each in self.newest if each.step <= start - 2), None)
            means = (None, None) if read is None else (read.mean_grad_sq, read.mean_grad_variance)
            before, after = (self._recorded.gain(s.batch_size, *means) * s.lr_scale for s in (now, self.now))
            change = Change(max(start - 1, 0), samples, now, self.now, new, tuple(notes), seen, (before, after))
            self.changes.append(change)


def run(policy: BasePolicy, source: StepSource) -> Replay:
    """Asks the policy after each step, and applies what it decides as training does: DECISION_LAG steps later.

    Workers come at once. Raises TypeError if the policy returns what is no decision, and whatever the policy raises.
    """
    out, name = Replay(source.recorded, source.bounds), type(policy).__name__
    pending: deque[tuple[int, Decision, Signals | None]] = deque()  # first step, decision, the signals behind it
    first, used, waits = source.next_step, source.samples, list[tuple[float, float]]()
    if first == 0 and (decision := checked_decision(policy.initial(), f"{name}.initial")) is not None:
        pending.append((0, decision, None))
    while True:
        while pending and pending[0][0] <= source.next_step:
            out.apply(*pending.popleft(), source.samples)
        if (seen := source.step(out.now)) is None:
            break
        out.now = DecidedSettings(seen.batch_size, seen.workers, seen.lr_scale)  # those in force now
        out.newest.appendleft(seen)
        decision = checked_decision(policy.decide(seen), f"{name}.decide")
        decision, dropped = without_growth(decision, seen, waits, policy, source.recorded.reproducible)
        out.input_bound += bool(dropped)
        if decision is not None:
            pending.append((seen.in_force_at, decision, seen))
    while pending and pending[0][0] <= source.next_step + 1:  # announced with the last step
        out.apply(*pending.popleft(), source.samples)
    out.steps, out.samples, out.cut_off = source.next_step - first, source.samples - used, source.cut_off
    return out
