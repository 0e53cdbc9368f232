"""Each event of events.jsonl as a sentence, for the terminal, `kfuse status` and the report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Events that are for events.jsonl alone: nobody has to do anything about them.
_QUIET = ("schedule", "links", "ready", "checkpoint", "copy_beside", "evaluation")

_WHY = {  # by the reason of a view
    "start": "training begins",
    "restart": "training begins again",
    "grow": "one has joined",
    "shrink": "one has left, as asked",
    "notice": "one has left after its notice",
    "replace": "one has been replaced",
    "failure": "one was lost",
    "quit": "one's script has ended",
    "stop": "those behind have caught up",
}


def sentence(event: Mapping[str, Any]) -> str | None:
    """Returns what has happened, in a line; None for an event that is for events.jsonl alone."""
    kind = str(event.get("kind"))
    try:
        return None if kind in _QUIET else _SENTENCES.get(kind, _plainly)(event)
    except (LookupError, TypeError, ValueError):  # another version has written it
        return _plainly(event)


def since(moment: float) -> str:
    """Returns how long ago a moment (Unix time) was: "5 s", "12 min", "3 h", "2 days"."""
    seconds = max(0.0, time.time() - moment)
    for size, unit in ((86_400, "days"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _view(event: Mapping[str, Any]) -> str:
    count, why = len(event["workers"]), _WHY.get(event["reason"], event["reason"])
    waited = f" ({event['pause_s']:.2g} s without a step)" if event["generation"] > 1 else ""
    return f"{count} worker{'s train' if count > 1 else ' trains'}: {why}{waited}"


def _decision(event: Mapping[str, Any]) -> str:
    names = {"batch_size": "batch size", "lr": "learning rate", "workers": "workers asked for", "sync": "comm.sync"}
    changes = [
        f"{names[name]} {_number(a)} -> {_number(b)}" for name in names if (a_b := event.get(name)) for a, b in [a_b]
    ]
    changes += [f"{name} {event[name]}" for name in ("topology", "tree") if event.get(name) is not None]
    if event.get("replace") is not None:
        changes.append(f"worker {event['replace']} is to be replaced")
    return ", ".join(changes)


def _failure(event: Mapping[str, Any]) -> str:
    if "how" not in event:
        return f"the job has failed: {event.get('why')}"
    return f"worker {event['worker']}{_on(event)} {event['how']}"


def _corruption(event: Mapping[str, Any]) -> str:
    what = f"micro-batch {event['micro_batch']}"
    if event.get("worker") is None:
        return f"two workers computed other gradients of {what}: {event.get('note') or 'which is wrong is unknown'}"
    return f"worker {event['worker']} computes wrongly: two others contradict it about {what}"


def _left_out(event: Mapping[str, Any]) -> str:
    behind = zip(event["workers"], event["steps"], strict=True)
    return "took the furthest worker's state: " + ", ".join(
        f"worker {who}, {steps} steps behind" for who, steps in behind
    )


def _cut(event: Mapping[str, Any]) -> str:
    pairs = ", ".join(f"{one} and {other}" for one, other in event["workers"])
    gone = f"; {_workers(event['evicted'])} had to go" if event["evicted"] else ""
    return f"workers that do not reach each other: {pairs}{gone}"


_SENTENCES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "view": _view,
    "decision": _decision,
    "failure": _failure,
    "corruption": _corruption,
    "left_out": _left_out,
    "cut": _cut,
    "clipped": lambda e: f"a request was changed: {e['note']}",
    "input_bound": lambda e: str(e["note"]),
    "policy_failed": lambda e: f"the policy's {e['method']} failed on worker {e['worker']}: {e['why']}",
    "skipped": lambda e: f"no update was made: {e['why']}",
    "straggler": lambda e: (
        f"worker {e['worker']} is slow: {e['throughput']:.0%} of the median rate; it gets less to do"
    ),
    "waiting": lambda e: f"worker {e['worker']} waits: {e['note']}",
    "notice": lambda e: f"worker {e['worker']}{_on(e)} was given notice, and leaves",
    "quit": lambda e: f"worker {e['worker']} {e['how']}: the others go on without it",
    "went_back": lambda e: f"{e['steps']} steps are made again: {e['why']}",
    "host_joined": lambda e: f"host {e['host']} offers {e['slots']} slot{'s' if e['slots'] > 1 else ''}",
    "host_left": lambda e: f"host {e['host']} has left after its notice",
    "host_lost": lambda e: f"host {e['host']} is gone, with {_workers(e['workers'])}",
    "records_lost": lambda e: f"lines of steps {e['steps'][0]} to {e['steps'][1]} are missing: {e['why']}",
    "loader_lost": lambda e: f"a loader process of worker {e['worker']} {e['how']}; another one takes its place",
    "checkpoint_failed": lambda e: f"no checkpoint was written: {e['why']}",
    "checkpoint_rejected": lambda e: f"a checkpoint is passed over: {e['why']}",
    "resumed": lambda e: f"training resumes from {e['path']}",
    "started": lambda e: str(e["note"]),
    "model_failed": lambda e: f"{e['path']} could not be written: {e['why']}",
    "note": lambda e: str(e["note"]),
    "disk": lambda e: str(e["note"]),
}


def _on(event: Mapping[str, Any]) -> str:
    return f" on {event['host']}" if event.get("host") else ""


def _workers(numbers: Sequence[int]) -> str:
    return ("worker " if len(numbers) == 1 else "workers ") + ", ".join(map(str, numbers))


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _plainly(event: Mapping[str, Any]) -> str:
    """An event of another version, or of another program."""
    rest = {key: value for key, value in event.items() if key not in ("time", "step", "kind")}
    return f"{event.get('kind', 'event')}: " + ", ".join(f"{key} {value}" for key, value in rest.items())
