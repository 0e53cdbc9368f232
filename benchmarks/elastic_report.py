"""elastic.py's table, result file and picture."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from machine import write
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Episode:
    """One kill."""

    rank: int
    """Of the worker that was killed."""
    recovery_s: float
    """From the kill to the next completed step."""
    rejoin_s: float | None
    """The survivors' longest time between two steps as the new worker comes in; None where nobody survives."""
    samples: int
    """Progress: how much farther training was at the end than before the kill."""
    seconds: float


@dataclass
class Result:
    """What was seen of one system."""

    start_s: list[float] = field(default_factory=list)
    samples_per_second: list[float] = field(default_factory=list)
    episodes: list[Episode] = field(default_factory=list)
    not_back: list[str] = field(default_factory=list)
    """What was seen where a kill was the job's end; it was then started anew."""
    growth_s: list[float] = field(default_factory=list)
    shrink_s: list[float] = field(default_factory=list)
    splits: list[dict[str, float]] = field(default_factory=list)
    """Of kfuse's planned growth: boot, join, regroup and transfer, seconds."""


def percentiles(values: Sequence[float | None]) -> dict[str, float | int | None]:
    """n, median, p95 and maximum of what is known."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return {"n": 0, "median": None, "p95": None, "max": None}
    p95 = ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))]
    return {"n": len(ordered), "median": statistics.median(ordered), "p95": p95, "max": ordered[-1]}


def summarize(result: Result, back_s: float) -> dict[str, Any]:
    """`back_s`: how long each job that did not come back was waited for."""
    made = sum(e.samples for e in result.episodes)
    spent = sum(e.seconds for e in result.episodes) + back_s * len(result.not_back)
    rate = statistics.median(result.samples_per_second)
    ranks = {f"kill of rank {r}": [e.recovery_s for e in result.episodes if e.rank == r] for r in (0, 1)}
    return {
        "kills": len(result.episodes) + len(result.not_back),
        "kills after which it did not come back": len(result.not_back),
        "kill to next step, s": percentiles([e.recovery_s for e in result.episodes]),
        **{f"{kill} to next step, s": percentiles(seconds) for kill, seconds in ranks.items()},
        "survivors' gap as a new worker comes in, s": percentiles([e.rejoin_s for e in result.episodes]),
        "survivors' gap at planned growth, s": percentiles(result.growth_s),
        "survivors' gap at planned shrink, s": percentiles(result.shrink_s),
        **{f"growth: {part}, s": percentiles([split[part] for split in result.splits]) for part in _PARTS},
        "samples a second, undisturbed": rate,
        "samples a second, under kills": made / spent,
    }


_PARTS = ("boot", "join", "regroup", "transfer")


def report(results: Mapping[str, Result], every_s: float, back_s: float, file: Path | None) -> None:
    figures = {name: summarize(result, back_s) for name, result in results.items()}
    table = Table(title=f"A worker of two killed every {every_s:g} s; median (p95) over the kills")
    table.add_column("", no_wrap=True)
    for name in figures:
        table.add_column(name, justify="right")
    for row in next(iter(figures.values())):
        table.add_row(row, *(_cell(figures[name][row]) for name in figures))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    measured = {name: asdict(result) for name, result in results.items()}
    write(file, ["torch", "torchft-nightly"], figures=figures, measured=measured)


def _cell(value: Any) -> str:
    if isinstance(value, int | float):
        return f"{value:.3g}"
    if value is None or value["n"] == 0:
        return "-"
    return f"{value['median']:.3f} ({value['p95']:.3f})"
