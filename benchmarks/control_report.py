"""The table and the picture of control_plane.py."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PHASES = ("start", "growth", "loss of 1", "loss of half", "loss of half within a second", "refill")
BAR_CPU_S, BAR_KB, BAR_WORKERS = 1.0, 100.0, 1000  # of a loss; of memory a worker
EXTRAPOLATED = 4096  # workers


def show(results: Mapping[int, dict[str, Any]]) -> None:
    """Prints a table."""
    table = Table("workers", *(f"{phase}: CPU s (views)" for phase in PHASES), "steady, share of a core", "kB a worker")
    for size, result in results.items():
        phases = (result["phases"][phase] for phase in PHASES)
        cells = [f"{each['cpu_s']:.3f} ({each['views']:g})" for each in phases]
        table.add_row(str(size), *cells, f"{result['steady_share_of_a_core']:.3f}", f"{result['kb_a_worker']:.0f}")
    Console(width=160).print(table)
    if (result := results.get(BAR_WORKERS)) is not None:
        worst = max(result["phases"][phase]["cpu_s"] for phase in ("loss of 1", "loss of half"))
        kept = worst <= BAR_CPU_S and result["kb_a_worker"] <= BAR_KB
        print(
            f"{BAR_WORKERS} workers: at most {BAR_CPU_S:g} s a loss, {BAR_KB:g} kB a worker: {'yes' if kept else 'NO'}"
        )


def plot(results: Mapping[int, dict[str, Any]], before: Mapping[int, dict[str, Any]], path: Path) -> None:
    """Draws CPU seconds of each phase, and the steady share, over the number of workers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 6), layout="constrained")
    given = {"now": results} | ({"before": before} if before else {})
    panels = figure.subplots(1, len(given), sharey=True, squeeze=False)[0]
    for axis, (name, sizes) in zip(panels, given.items(), strict=True):
        values = {phase: {n: each["phases"][phase]["cpu_s"] for n, each in sizes.items()} for phase in PHASES}
        values["steady: share of a core"] = {n: each["steady_share_of_a_core"] for n, each in sizes.items()}
        for place, (label, points) in enumerate(values.items()):
            axis.plot([*points], [*points.values()], "o-", color=f"C{place}", label=f"{label} (measured)")
            line = extrapolate(points)
            axis.plot([*line], [*line.values()], "x--", color=f"C{place}", label="_")
        axis.plot([], [], "x--", color="grey", label="extrapolated")
        axis.axhline(BAR_CPU_S, color="grey", linewidth=0.8, linestyle=":")
        axis.set(xscale="log", yscale="log", xlabel="workers", ylabel="the supervisor's CPU seconds", title=name)
        axis.grid(alpha=0.2)
        axis.legend(frameon=False)
    figure.savefig(path, dpi=90)


def extrapolate(points: Mapping[int, float]) -> dict[int, float]:
    """The power law through the two largest sizes, up to `EXTRAPOLATED`; nothing where that is measured."""
    if len(points) < 2 or max(points) >= EXTRAPOLATED:
        return {}
    low, high = sorted(points)[-2:]
    power = math.log(points[high] / points[low]) / math.log(high / low)
    return {high: points[high], EXTRAPOLATED: points[high] * (EXTRAPOLATED / high) ** power}
