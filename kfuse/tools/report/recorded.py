"""A recorded run as columns, few enough to be drawn."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kfuse.settings.tree import ConfigError
from kfuse.tools.run_files import config_path, read_metrics, read_yaml

MOST_STEPS = 1500
"""Steps that are drawn of a run: a screen has no more columns."""
SHOWN_EVENTS = {
    "decision": "decision",
    "failure": "worker lost",
    "view": "new group of workers",
    "resumed": "resumed from a checkpoint",
    "corruption": "wrong results of a worker",
    "went_back": "went back to an earlier step",
    "left_out": "samples left out",
    "skipped": "no update",
    "records_lost": "records lost",
    "policy_failed": "policy failed",
}
_DRAWN = (
    "step", "samples", "loss", "lr", "batch_size", "workers", "noise_scale", "noise_scale_low", "noise_scale_high",
    "step_time_s", "data_wait_s",
)  # fmt: skip

Column = NDArray[np.float64]


@dataclass(frozen=True)
class Event:
    """Something that happened. seconds: as of `Recorded`."""

    step: int
    seconds: float
    kind: str
    text: str


@dataclass(frozen=True)
class Recorded:
    """A run.

    steps: columns of metrics.jsonl by name, NaN where unknown, of at most 3 * MOST_STEPS steps, and `seconds`, the sum
    of the step times until then. evaluations: the columns step, samples, seconds, loss, accuracy.
    """

    name: str
    count: int  # of steps recorded
    steps: dict[str, Column]
    evaluations: dict[str, Column]
    events: list[Event]
    summary: dict[str, Any]
    settings: dict[str, Any]


def read_run(path: Path) -> Recorded:
    """Reads a run's directory. Raises ConfigError for what is none."""
    lines = read_metrics(path)
    columns = {name: np.array([line[name] for line in lines], np.float64) for name in _DRAWN}
    columns["seconds"] = np.nan_to_num(columns["step_time_s"]).cumsum()
    events = _json_lines(path / "events.jsonl")
    known = [event for event in events if isinstance(event["step"], int)]
    # The last evaluation comes after the last step, and events may too.
    last = len(lines) - 1
    row = [min(int(np.searchsorted(columns["step"], event["step"])), last) for event in known]
    at = [row[k] for k, event in enumerate(known) if event["kind"] == "evaluation"]
    evaluations = {name: columns[name][at] for name in ("step", "samples", "seconds")}
    for name in ("loss", "accuracy"):
        values = [event.get(name) for event in known if event["kind"] == "evaluation"]
        evaluations[name] = np.array(values, np.float64)
    shown = [
        Event(event["step"], float(columns["seconds"][row[k]]), event["kind"], _words(event))
        for k, event in enumerate(known)
        if event["kind"] in SHOWN_EVENTS
    ]
    kept = _drawn(columns["loss"])
    return Recorded(
        name=path.resolve().name,
        count=len(lines),
        steps={name: values[kept] for name, values in columns.items()},
        evaluations=evaluations,
        events=shown,
        summary=_json(path / "summary.json"),
        settings=_flat(read_yaml(config_path(path))) if config_path(path).exists() else {},
    )


def _drawn(loss: Column) -> NDArray[np.intp]:
    """Returns the rows to draw: all, or of each of MOST_STEPS parts the first one and those of least and most loss."""
    if len(loss) <= 3 * MOST_STEPS:
        return np.arange(len(loss))
    rows = {0, len(loss) - 1}
    for part in np.array_split(np.arange(len(loss)), MOST_STEPS):
        known = part[np.isfinite(loss[part])]
        rows.add(int(part[0]))
        if len(known):
            rows |= {int(known[loss[known].argmin()]), int(known[loss[known].argmax()])}
    return np.array(sorted(rows))


def _words(event: Mapping[str, Any]) -> str:
    """Returns an event in words."""
    skipped = ("time", "step", "kind", "traceback", "pid")
    known = {name: value for name, value in event.items() if name not in skipped and value not in (None, "", [], {})}
    if event["kind"] == "view":
        known = {"workers": len(event["workers"]), "reason": event["reason"], "pause_s": event.get("pause_s")}
    words = []
    for name, value in known.items():
        pair = isinstance(value, list) and len(value) == 2
        text = f"{_short(value[0])} to {_short(value[1])}" if pair else _short(value)
        words.append(f"{name.removesuffix('_s').replace('_', ' ')} {text}{' s' if name.endswith('_s') else ''}")
    return f"{SHOWN_EVENTS[event['kind']]}: {', '.join(words)}"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _json(path: Path) -> dict[str, Any]:
    """Returns a file's object; an empty one where there is none: a run under way has no summary."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    return found


def _json_lines(path: Path) -> list[dict[str, Any]]:
    """Returns a file's whole lines that are events; none where it is missing."""
    found = []
    try:
        for line in path.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                record = json.loads(line)
                if isinstance(record, dict) and {"kind", "step"} <= record.keys():
                    found.append(record)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    return found


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the leaves of nested settings, by dotted name."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found
