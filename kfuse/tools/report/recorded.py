"""A recorded run as columns, and which of its steps are drawn."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kfuse.observe import flattened
from kfuse.observe.sentences import sentence
from kfuse.tools.run_files import read_events, read_metrics, read_summary

_MOST_IN_A_NAME = 3  # settings
MOST_PARTS = 1500
"""Of so many parts of a long run some steps each are drawn: a screen has no more columns."""
_COLUMNS = (
    "step", "samples", "loss", "lr", "batch_size", "workers", "noise_scale", "noise_scale_low", "noise_scale_high",
    "step_time_s", "data_wait_s", "best_lr", "curvature_noise_scale",
)  # fmt: skip

Column = NDArray[np.float64]


@dataclass(frozen=True)
class Event:
    """Something that happened."""

    step: int
    row: int  # of the step in the columns; the last one for what came after it
    kind: str
    of_worker: bool  # it names one
    text: str  # a sentence


@dataclass(frozen=True)
class Recorded:
    """A run.

    steps: columns of metrics.jsonl by name, NaN where unknown, and `seconds`, the sum of the step times until then.
    drawn: the rows of them that are drawn. evaluations: the columns step, samples, seconds, loss, accuracy.
    """

    name: str
    steps: dict[str, Column]
    drawn: NDArray[np.intp]
    evaluations: dict[str, Column]
    events: list[Event]
    summary: dict[str, Any]
    settings: dict[str, Any]


def read_runs(paths: Sequence[Path]) -> list[Recorded]:
    """Reads runs' directories. They are named by the settings that differ, where these tell them apart; else by paths.

    Raises ConfigError for what is none.
    """
    runs = [_read(path, name) for path, name in zip(paths, _names(paths), strict=True)]
    differ = [name for name in differing(runs) if not name.startswith("run.")]
    names = [
        " ".join(f"{name.removesuffix('._target_')}={run.settings[name]}" for name in differ if name in run.settings)
        for run in runs
    ]
    if 0 < len(differ) <= _MOST_IN_A_NAME and len({*names}) == len(names):
        return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]
    return runs


def differing(runs: Sequence[Recorded]) -> list[str]:
    """Returns the names of the settings that are not the same in all of these runs."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    return [name for name in names if len({str(run.settings.get(name, "")) for run in runs}) > 1]


def _read(path: Path, name: str) -> Recorded:
    kept = {name: array("d") for name in _COLUMNS}
    for record in read_metrics(path):
        for column, values in kept.items():
            values.append(_number(record[column]))
    columns = {name: np.array(values) for name, values in kept.items()}
    columns["seconds"] = np.nan_to_num(columns["step_time_s"]).cumsum()
    evaluations, events = list[dict[str, Any]](), list[dict[str, Any]]()
    for event in read_events(path):
        if event["kind"] in ("evaluation", "resumed", "went_back"):  # what was recorded of later steps comes again
            evaluations = [each for each in evaluations if each["step"] < event["step"]]
        if event["kind"] == "evaluation":
            evaluations.append(event)
        elif sentence(event) is not None:
            events.append(event)

    def rows(found: Sequence[Mapping[str, Any]]) -> NDArray[np.intp]:
        """The last evaluation comes after the last step, and events may too."""
        return np.searchsorted(columns["step"], [each["step"] for each in found]).clip(max=len(columns["step"]) - 1)

    of_evaluations = {name: columns[name][rows(evaluations)] for name in ("step", "samples", "seconds")}
    for figure in ("loss", "accuracy"):
        of_evaluations[figure] = np.array([_number(each.get(figure)) for each in evaluations])
    origin = read_summary(path, "settings.json")
    return Recorded(
        name=name,
        steps=columns,
        drawn=_drawn(columns),
        evaluations=of_evaluations,
        events=[
            Event(each["step"], int(row), each["kind"], "worker" in each, sentence(each) or "")
            for each, row in zip(events, rows(events), strict=True)
        ],
        summary=read_summary(path),
        settings=dict(flattened({**origin.get("settings", {}), "run": origin.get("run", {})}, ".")),
    )


def _names(paths: Sequence[Path]) -> list[str]:
    """Returns of each path as much of its end as tells it from the others."""
    parts = [path.resolve().parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{number} {path}" for number, path in enumerate(paths, 1)]  # the same run twice


def _drawn(columns: Mapping[str, Column]) -> NDArray[np.intp]:
    """Returns the rows to draw: all of a short run.

    Of a long one of each of MOST_PARTS parts the first row and those of least and most loss; and where the batch size
    or the workers have changed the rows before and after.
    """
    loss = columns["loss"]
    if len(loss) <= 3 * MOST_PARTS:
        return np.arange(len(loss))
    rows = {0, len(loss) - 1}
    for part in np.array_split(np.arange(len(loss)), MOST_PARTS):
        known = part[np.isfinite(loss[part])]
        rows.add(int(part[0]))
        if len(known):
            rows |= {int(known[loss[known].argmin()]), int(known[loss[known].argmax()])}
    for name in ("batch_size", "workers"):
        changed = np.flatnonzero(np.diff(columns[name]))[:MOST_PARTS]
        rows |= {*changed.tolist(), *(changed + 1).tolist()}
    return np.array(sorted(rows))


def _number(value: Any) -> float:
    """Returns a number as recorded, NaN for what is none."""
    return float(value) if isinstance(value, int | float) else np.nan
