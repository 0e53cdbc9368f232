"""Draws the estimates and the truth that noise_quality.py has written.

    python benchmarks/noise_quality_plot.py benchmarks/results/noise_quality.json benchmarks/results/noise_quality.png

One column for each problem, of the first run. Above, the noise scale of gradients; below, that of gradients weighted as
Adam weighs them. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

PEERS = {"KungFu": "#e69f00", "FairScale": "#009e73", "AdaptDL": "#d55e00", "k-diffusion": "#cc79a7"}
OURS, TRUE = "#0072b2", "black"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()

    from matplotlib.figure import Figure

    problems = json.loads(args.results.read_text())["problems"].values()
    figure = Figure(figsize=(6.5 * len(problems), 10), layout="constrained")
    kinds = (draw_plain, ""), (draw_adam, ", weighted as Adam weighs them")
    for part, (draw, weights) in zip(figure.subfigures(2, 1), kinds, strict=True):
        axes = part.subplots(1, len(problems), squeeze=False)[0]
        for axis, problem in zip(axes, problems, strict=True):
            draw(axis, problem)
            axis.set(yscale="log", xlabel="step", ylabel=f"noise scale, {problem['unit']}")
            axis.set_title(f"{problem['name']}: batch {problem['batch']}, M = {problem['micro_batches']}{weights}")
            axis.axhline(problem["batch"], color="grey", linewidth=0.8, linestyle=":", label="batch")
            axis.grid(alpha=0.2)
        handles, labels = axes[0].get_legend_handles_labels()
        part.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(args.picture, dpi=100)


def draw_plain(axis: Any, problem: dict[str, Any]) -> None:
    course, truth = problem["course"], of_first_run(problem)
    axis.plot(truth["step"], truth["noise_scale"], "o", color=TRUE, markersize=5, zorder=5, label="truth")
    for name, colour in PEERS.items():
        axis.plot(gaps(course[name]), color=colour, linewidth=0.7 if name == "KungFu" else 1.4, label=name)
    low, high, number = (gaps(course[name]) for name in ("kfuse low", "kfuse high", "kfuse"))
    axis.fill_between(range(len(low)), low, high, color=OURS, alpha=0.25, label="kfuse, its interval")
    alone = [end if math.isnan(other) else math.nan for end, other in zip(low, high, strict=True)]
    axis.plot(alone, color=OURS, linewidth=1.2, linestyle="--", label="kfuse, low end known alone")
    axis.plot(number, color=OURS, linewidth=2, label="kfuse")
    axis.set_ylim(*limits(truth["noise_scale"], 6))


def draw_adam(axis: Any, problem: dict[str, Any]) -> None:
    course, truth = problem["course"], of_first_run(problem)
    axis.plot(truth["step"], truth["noise_scale"], "o", color="grey", markersize=3, label="truth, unweighted")
    axis.plot(truth["step"], truth["D"], "o", color=TRUE, markersize=5, label="truth, D")
    axis.plot(truth["step"], truth["D^2"], "s", color=PEERS["AdaptDL"], markersize=4, label="truth, D²")
    axis.plot(gaps(course["kfuse's formula, D"]), color=OURS, linewidth=2, label="kfuse's formula, D")
    axis.plot(gaps(course["kfuse's formula, D^2"]), color="#56b4e9", linewidth=2, label="kfuse's formula, D²")
    axis.plot(gaps(course["AdaptDL's for Adam, D^2"]), color=PEERS["AdaptDL"], linewidth=1.4, label="AdaptDL's, D²")
    axis.set_ylim(*limits(truth["noise_scale"] + truth["D"] + truth["D^2"], 3))


def of_first_run(problem: dict[str, Any]) -> dict[str, list[float]]:
    points = [point for point in problem["truth"] if point["seed"] == 0]
    return {name: [point[name] for point in points] for name in points[0]}


def gaps(values: list[float | None]) -> list[float]:
    """NaN, which is not drawn, where a value is unknown."""
    return [math.nan if value is None else value for value in values]


def limits(values: list[float], factor: float) -> tuple[float, float]:
    return min(values) / factor, max(values) * factor


if __name__ == "__main__":
    main()
