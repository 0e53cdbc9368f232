"""elastic.py's table and result file."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from elastic_log import Contents
from machine import write
from rich.console import Console
from rich.table import Table

_PARTS = ("boot", "join", "regroup", "transfer")


@dataclass(frozen=True)
class Episode:
    """One kill, or one notice."""

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
    """What was seen of one system."""

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


def save(results: Mapping[str, Result], file: Path | None) -> None:
    figures = {name: summarize(result) for name, result in results.items()}
    measured = {name: asdict(result) for name, result in results.items()}
    write(file, ["torch", "torchft-nightly", "ray"], figures=figures, measured=measured)


def show(results: Mapping[str, Result], back_s: float) -> None:
    figures = {name: summarize(result) for name, result in results.items()}
    table = Table(
        title=f"One worker of two is killed or gets notice; median (p95). Back within {back_s:.0f} s, or ended"
    )
    table.add_column("", no_wrap=True)
    for name in figures:
        table.add_column(name, justify="right")
    for row in next(iter(figures.values())):
        table.add_row(row, *(_cell(figures[name][row]) for name in figures))
    Console(width=None if sys.stdout.isatty() else 150).print(table)


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
