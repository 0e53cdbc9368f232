"""What elastic.py reads off the lines that a system's workers write, and what it reports.

How a job went on, what its final model is of, and what kills and notices cost.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from elastic_systems import BATCH, EPOCH_STEPS, SAMPLES, WORKERS
from report import table, write


@dataclass(frozen=True)
class Line:
    """See `elastic_systems.Log`."""

    time: float
    """Seconds since the epoch."""
    pid: int
    step: int
    workers: int
    """0: the step has begun; else it is done."""
    rank: int
    epoch: int
    samples: tuple[int, ...]


@dataclass
class Reader:
    """The lines so far, in the order in which they were written."""

    path: Path
    begun: list[Line] = field(default_factory=list)
    done: list[Line] = field(default_factory=list)
    _read: int = 0

    def update(self) -> None:
        if not self.path.exists():
            return
        with self.path.open() as file:
            file.seek(self._read)
            text = file.read()
        complete = text[: text.rfind("\n") + 1]
        self._read += len(complete)
        for nanoseconds, *numbers, samples in map(json.loads, complete.splitlines()):
            line = Line(nanoseconds / 1e9, *numbers, tuple(samples))
            (self.done if line.workers else self.begun).append(line)

    def since(self, moment: float) -> list[Line]:
        """Completed steps."""
        recent = []
        for line in reversed(self.done):
            if line.time < moment - 1:  # lines of different processes may be a little out of order
                break
            recent.append(line)
        return sorted((line for line in recent if line.time >= moment), key=lambda line: line.time)


def longest_gap(lines: list[Line]) -> float:
    return max((b.time - a.time for a, b in pairwise(lines)), default=0.0)


def made_again(lines: list[Line], going_on: Line) -> int:
    """Of the completed steps, those that count no more: made by workers that are gone, and again by those after them.

    lines: from before the disturbance until all are back. going_on: the first line of the workers after it.
    """
    there = {line.pid for line in lines[-4 * WORKERS :] if line.time >= going_on.time}
    again = {line.step for line in lines if line.time >= going_on.time and line.pid in there}
    gone = Counter(line.step for line in lines if line.pid not in there and line.step in again)
    # A survivor's line says that a step which a dead worker completed was its own too, in the same update.
    shared = {line.step for line in lines if line.time < going_on.time and line.pid in there}
    return sum(-(-count // WORKERS) for step, count in gone.items() if step not in shared)


@dataclass(frozen=True)
class Contents:
    """Which samples the updates of the final model are of."""

    planned: int
    """Samples of the epochs that the job's steps are."""
    lost: int
    """In no update."""
    twice: int
    """Uses beyond the first one."""
    steps: int
    drifted: int
    """Steps whose global batch was not the one that was asked for."""


def contents(reader: Reader, epochs: int) -> Contents:
    """An update that was undone, by going back to a checkpoint or with its worker's death, is no part of the model.

    Of a step that was made several times the last one counts, with as many workers as it says. They are those that
    began it last before that.
    """
    last = {line.step: line for line in sorted(reader.done, key=lambda line: line.time)}
    begun: dict[int, list[Line]] = defaultdict(list)
    for line in reader.begun:
        begun[line.step].append(line)
    used, drifted = Counter[tuple[int, int]](), 0
    for step, line in last.items():
        latest = {each.pid: each for each in begun[step] if each.time <= line.time}
        others = sorted((each for pid, each in latest.items() if pid != line.pid), key=lambda each: -each.time)
        parts = [latest[line.pid], *others[: line.workers - 1]]
        drifted += sum(len(part.samples) for part in parts) != BATCH
        used.update(_named(parts))
    within = {name: count for name, count in used.items() if name[0] < epochs}
    twice = sum(used.values()) - len(used)
    planned = epochs * SAMPLES
    return Contents(planned, planned - len(within), twice, epochs * EPOCH_STEPS, drifted)


def _named(parts: Iterable[Line]) -> Iterable[tuple[int, int]]:
    return ((part.epoch, sample) for part in parts for sample in part.samples)


# -- what a system costs ----------------------------------------------------------------------------------------------

_PARTS = ("boot", "join", "regroup", "transfer")


@dataclass(frozen=True)
class Episode:
    kind: str
    rank: int
    """Of the worker that was killed."""
    recovery_s: float
    """From the signal to the next step completed by fewer workers, or by a new one."""
    rejoin_s: float | None
    """The survivors' longest time between two steps as the new worker comes in; None where nobody survives."""
    standstill_s: float
    """The longest time in which no worker completed a step, until all are back."""
    again: int
    """Steps made again."""


@dataclass
class Result:
    start_s: list[float] = field(default_factory=list)
    undisturbed_per_second: list[float] = field(default_factory=list)
    """Samples, by job to which nothing was done."""
    samples_per_second: list[float] = field(default_factory=list)
    """Once all workers are back, until the next kill or notice."""
    episodes: list[Episode] = field(default_factory=list)
    not_back: list[str] = field(default_factory=list)
    """What was seen where a kill was the job's end; another was then started."""
    undisturbed: list[Contents] = field(default_factory=list)
    """Of the jobs to which nothing was done."""
    contents: list[Contents] = field(default_factory=list)
    equal: list[bool] = field(default_factory=list)
    """By job: whether its final model has the bits of the first undisturbed job's."""
    difference: list[float] = field(default_factory=list)
    growth_s: list[float] = field(default_factory=list)
    shrink_s: list[float] = field(default_factory=list)
    growths: list[dict[str, float]] = field(default_factory=list)


def percentiles(values: Sequence[float | None]) -> dict[str, float | int | None]:
    """n, median, p95 and maximum of what is known."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return {"n": 0, "median": None, "p95": None, "max": None}
    p95 = ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))]
    return {"n": len(ordered), "median": statistics.median(ordered), "p95": p95, "max": ordered[-1]}


def summarize(result: Result) -> dict[str, Any]:
    kills = [each for each in result.episodes if each.kind == "kill"]
    notices = [each for each in result.episodes if each.kind == "notice"]
    done = result.contents
    planned, steps = sum(each.planned for each in done), sum(each.steps for each in done)
    return {
        "kills": len(kills),
        "notices of 5 s": len(notices),
        "jobs that a kill or notice ended": len(result.not_back),
        "kill: to next step, s": percentiles([each.recovery_s for each in kills]),
        "kill: steps made again": percentiles([each.again for each in kills]),
        "kill: survivors' gap at the join, s": percentiles([each.rejoin_s for each in kills]),
        "notice: longest time without a step, s": percentiles([each.standstill_s for each in notices]),
        "notice: steps made again": percentiles([each.again for each in notices]),
        "jobs with the bits of the undisturbed": f"{sum(result.equal)} of {len(result.equal)}",
        "largest difference of a parameter": max(result.difference, default=None),
        "samples lost, %": 100 * sum(each.lost for each in done) / planned if planned else None,
        "samples done twice, %": 100 * sum(each.twice for each in done) / planned if planned else None,
        "steps with another batch, %": 100 * sum(each.drifted for each in done) / steps if steps else None,
        "samples lost or done twice, undisturbed": sum(each.lost + each.twice for each in result.undisturbed),
        "samples a second, undisturbed": percentiles(result.undisturbed_per_second)["median"],
        "samples a second, between kills": percentiles(result.samples_per_second)["median"],
        "start to first step, s": percentiles(result.start_s),
        "planned shrink: the other's gap, s": percentiles(result.shrink_s),
        "planned growth: the other's gap, s": percentiles(result.growth_s),
        **{f"growth: {part}, s": percentiles([each[part] for each in result.growths]) for part in _PARTS},
    }


def report(results: Mapping[str, Result], file: Path | None) -> dict[str, dict[str, Any]]:
    """The figures of each system; written where asked for."""
    figures = {name: summarize(result) for name, result in results.items()}
    measured = {name: asdict(result) for name, result in results.items()}
    write(file, ["torch", "torchft-nightly", "ray"], figures=figures, measured=measured)
    return figures


def show(figures: Mapping[str, dict[str, Any]], back_s: float) -> None:
    title = f"One worker of two is killed or gets notice; median (p95). Back within {back_s:.0f} s, or ended"
    rows = [(row, *(_cell(each[row]) for each in figures.values())) for row in next(iter(figures.values()))]
    table(title, ("", *figures), rows)


def _cell(value: Any) -> str:
    if value is None or (isinstance(value, dict) and value["n"] == 0):
        return "-"
    if isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return f"{value:.4g}"
    if all(isinstance(value[key], int) or value[key] == int(value[key]) for key in ("median", "p95")):
        return f"{value['median']:.0f} ({value['p95']:.0f})"
    return f"{value['median']:.3f} ({value['p95']:.3f})"
