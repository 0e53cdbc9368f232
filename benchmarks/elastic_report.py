"""elastic.py's table, result file and picture."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from elastic import Result


@dataclass(frozen=True)
class Episode:
    """One kill."""

    recovery_s: float
    """From the kill to the next completed step."""
    rejoin_s: float | None
    """The survivors' longest time between two steps as the new worker comes in; None where nobody survives."""
    steps: int
    """Progress: how much farther training was at the end than before the kill."""
    seconds: float


def percentiles(values: Sequence[float | None]) -> dict[str, float | int | None]:
    """n, median, p95 and maximum of what is known."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return {"n": 0, "median": None, "p95": None, "max": None}
    p95 = ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))]
    return {"n": len(ordered), "median": statistics.median(ordered), "p95": p95, "max": ordered[-1]}


def summarize(result: Result) -> dict[str, Any]:
    steps, seconds = (sum(getattr(e, name) for e in result.episodes) for name in ("steps", "seconds"))
    rate = statistics.median(result.steps_per_second)
    return {
        "kill to next step, s": percentiles([e.recovery_s for e in result.episodes]),
        "survivors' gap as a new worker comes in, s": percentiles([e.rejoin_s for e in result.episodes]),
        "survivors' gap at planned growth, s": percentiles(result.growth_s),
        "survivors' gap at planned shrink, s": percentiles(result.shrink_s),
        **{f"growth: {part}, s": percentiles([split[part] for split in result.splits]) for part in _PARTS},
        "steps a second, undisturbed": rate,
        "progress under kills, of undisturbed": steps / seconds / rate,
    }


_PARTS = ("boot", "join", "regroup", "transfer")


def report(
    results: Mapping[str, Result], every_s: float, load_average: float, file: Path | None, picture: Path | None
) -> None:
    figures = {name: summarize(result) for name, result in results.items()}
    table = Table(title=f"A worker of two killed every {every_s:g} s; median (p95) over the kills")
    table.add_column("")
    for name in figures:
        table.add_column(name, justify="right")
    for row in next(iter(figures.values())):
        table.add_row(row, *(_cell(figures[name][row]) for name in figures))
    Console().print(table)
    if file is not None:
        machine = {"processor": _processor(), "cores": os.cpu_count(), "load_average": load_average}
        machine |= {"torch": torch.__version__, "python": platform.python_version(), "torchft": _version("torchft")}
        raw = {name: {k: v for k, v in asdict(result).items() if k != "steps"} for name, result in results.items()}
        content = {"command": " ".join(sys.argv), "machine": machine, "figures": figures, "measured": raw}
        file.write_text(json.dumps(content, indent=1) + "\n")
    if picture is not None:
        _plot(results, picture)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if value["n"] == 0:
        return "-"
    return f"{value['median']:.3f} ({value['p95']:.3f})"


def _plot(results: Mapping[str, Result], picture: Path) -> None:
    """Progress over time, of the first round, each system at its own undisturbed rate: a flat piece is lost time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for name, result in results.items():
        rate, first = statistics.median(result.steps_per_second), result.steps[0][1]
        best: list[tuple[float, float]] = []
        for time, step in sorted(result.steps):
            if not best or (step - first) / rate > best[-1][1]:
                best.append((time, (step - first) / rate))
        axes.step(*zip(*best, strict=True), where="post", label=name)
    axes.set_xlabel("seconds since the first kill")
    axes.set_ylabel("progress, in seconds of undisturbed training")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(picture, dpi=120)


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
