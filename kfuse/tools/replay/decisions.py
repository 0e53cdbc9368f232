"""The decisions of a recorded run, and those of a replay beside them.

Both are `Event`s. The recorded ones come from the records of events.jsonl, the replayed ones from the changes of `run`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from kfuse.policies.signals import DECISION_LAG
from kfuse.tools.replay.run import Change
from kfuse.tools.replay.simulated import Gain

Event = tuple[int, dict[str, Any]]
"""A decision of events.jsonl: its step, and what changed."""


def decisions(events: Iterable[Mapping[str, Any]]) -> list[Event]:
    """Returns the decisions that hold in the end, in order: (step, what changed), from the records of events.jsonl.

    Where a run has gone back to an earlier step (it was resumed, or parts of its state were lost), it has made those
    after that step again. Numbers of workers are left out: they change when the workers are ready, at any step.
    An event that a new leader has sent again counts once.
    """
    found: list[Event] = []
    for event in events:
        kind, step = event["kind"], event["step"]
        if kind in ("resumed", "went_back", "started"):
            found = [each for each in found if kind != "started" and each[0] < step]
        elif kind == "decision" and "why" not in event:
            left_out = ("time", "step", "kind", "workers", "replace")
            changed = {name: value for name, value in event.items() if name not in left_out}
            is_again = bool(found) and step <= found[-1][0] and (step, changed) in found
            if changed and not is_again:
                found.append((step, changed))
    return sorted(found, key=lambda each: each[0])


def began_at(events: Iterable[Mapping[str, Any]]) -> int:
    """Returns the first step of which events.jsonl has events: 0, or that of the checkpoint of another directory."""
    first = next((event for event in events if event["kind"] in ("view", "resumed", "decision")), None)
    return first["step"] if first is not None and first["kind"] == "resumed" else 0


def compared(
    changes: Sequence[Change], gain: Gain, events: Sequence[Mapping[str, Any]], first: int, with_rates: bool
) -> str:
    """Compares what the run's own policy decides in a replay with what its events have, in a sentence.

    first: the step of the first line of metrics.jsonl. with_rates: the changes of the learning rate are compared too.
    """
    # Those announced before the first line were decided on steps that are not there.
    since = max(began_at(events), first + DECISION_LAG - 1 if first > 0 else 0)
    found = [each for each in decisions(events) if each[0] >= since]
    replayed = [each for each in _as_events(changes, gain) if each[0] >= since]
    if not with_rates:
        for _, changed in (*found, *replayed):
            changed.pop("lr", None)
    for number, (ours, theirs) in enumerate(zip_longest(replayed, found), 1):
        if ours is None or theirs is None or not _same_decision(ours, theirs):
            return f"not as recorded from decision {number} on: replayed {ours}, recorded {theirs}"
    return f"{len(found)} decisions, as recorded in events.jsonl"


def _as_events(changes: Sequence[Change], gain: Gain) -> list[Event]:
    """Returns the changes as decisions of events.jsonl: (step, fields) of each. `lr` has factors, not rates."""
    out: list[Event] = []
    for each in changes:
        sizes = [each.before.batch_size, each.after.batch_size]
        rates = [*each.rate_factors(gain)]
        pairs = {name: pair for name, pair in (("batch_size", sizes), ("lr", rates)) if pair[0] != pair[1]}
        rest = {name: [value] for name, value in each.others.items() if name != "replace"}
        out += [(each.step, fields) for fields in (pairs, *({name: value} for name, value in rest.items())) if fields]
    return out


def _same_decision(replayed: Event, recorded: Event) -> bool:
    """Returns whether step, fields and values are the same, rates in proportion."""
    (step, ours), (at, theirs) = replayed, recorded
    if step != at or ours.keys() != theirs.keys():
        return False
    for name, value in theirs.items():
        if name == "lr":
            same = None not in value and math.isclose(ours[name][1] * value[0], ours[name][0] * value[1], rel_tol=1e-9)
        elif name == "batch_size":
            same = ours[name] == value
        else:
            now = value[1] if name == "sync" else value
            same = _plain(ours[name][0]) == _plain(now)
        if not same:
            return False
    return True


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
