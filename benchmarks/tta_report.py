"""time_to_accuracy.py's targets, ratios, tables, result file and picture.

    python benchmarks/tta_report.py RESULTS.json PICTURE.png      # the tables and the picture of results that are there

A run is a record as `tta_systems.run` makes it. Its `curve` has rows of samples, steps, seconds and quality, of which
lower is better; the quality is None where it is no number.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from machine import command, machine, versions
from rich.console import Console
from rich.table import Table
from tta_problems import PROBLEMS
from tta_systems import FIXED

BASE, PEER = "fixed", "ddp-best"
"""What the ratios are to: kfuse's fixed small batch, and DDP at its best."""
MOST_STEPS, MOST_SECONDS = 0.5, 1.1
"""What an adaptive policy shall reach: so many steps over the base's, so many seconds over the best fixed setting's."""
RESAMPLES = 2000
LARGEST_DEVIATION, LARGEST_MEAN = 8.0, 4.0
"""Of a loss on the quadratic model, in standard deviations: of one, and of the mean of a few seeds' last ones over its
own standard deviation. The loss is a sum of squares, so single ones are far out now and then."""

Run = Mapping[str, Any]
Curve = Sequence[Sequence[Any]]


def smooth(curve: Curve) -> list[list[Any]]:
    """The curve with each quality but the first and last replaced by the median of it and its two neighbours.

    With a constant learning rate the quality goes up and down: one low measurement, by chance, shall not count as the
    target reached.
    """
    values = [math.inf if row[-1] is None else row[-1] for row in curve]
    middle = [sorted(values[k - 1 : k + 2])[1] for k in range(1, len(values) - 1)]
    smoothed = [values[0], *middle, values[-1]]
    return [[*row[:-1], each if math.isfinite(each) else None] for row, each in zip(curve, smoothed, strict=True)]


def at_samples(curve: Curve, part: float) -> float:
    """The quality after this part of the run's samples, on the smoothed curve, between two rows by a straight line."""
    rows = [(row[0], row[-1]) for row in smooth(curve) if row[-1] is not None]
    return float(np.interp(part * curve[-1][0], *zip(*rows, strict=True)))


def final(curve: Curve) -> float | None:
    """The median of the last three qualities; None where that is no number."""
    value = sorted(math.inf if row[-1] is None else row[-1] for row in curve[-3:])[len(curve[-3:]) // 2]
    return value if math.isfinite(value) else None


def target_of(runs: Sequence[Run], problem: str, part: float) -> float:
    """The median over the seeds of the base's quality after this part of its samples."""
    return median(at_samples(each["curve"], part) for each in _of(runs, problem, BASE))


def reached(curve: Curve, target: float) -> dict[str, float] | None:
    """Samples, steps and seconds at which the smoothed curve first comes to the target; None where it never does.

    Between two rows by a straight line; a row without a number counts as not there yet.
    """
    rows = smooth(curve)
    for before, after in zip([None, *rows], rows, strict=False):
        if after[-1] is None or after[-1] > target:
            continue
        names = ("samples", "steps", "seconds")
        if before is None or before[-1] is None:
            return dict(zip(names, map(float, after), strict=False))
        share = (before[-1] - target) / (before[-1] - after[-1])
        return {name: a + share * (b - a) for name, a, b in zip(names, before, after, strict=False)}
    return None


def ratio(value: float | None, base: float | None) -> float:
    """Of a pair; infinite where `value` was not reached, 0 where only `base` was not. 0 over 0 is 1."""
    if value is None:
        return math.inf
    if base is None:
        return 0.0
    if base == 0:
        return math.inf if value else 1.0
    return value / base


def interval(values: Sequence[float]) -> dict[str, float | None]:
    """The median and its 95 % percentile-bootstrap interval; None is infinite. No value is interpolated."""
    drawn = np.random.default_rng(0).choice(np.array(values), size=(RESAMPLES, len(values)))
    ends = zip(("low", "high"), (0.025, 0.975), ("lower", "higher"), strict=True)
    found = {"median": float(np.median(values))}
    found |= {name: float(np.quantile(np.median(drawn, axis=1), q, method=way)) for name, q, way in ends}  # type: ignore[call-overload]
    return {name: round(value, 4) if math.isfinite(value) else None for name, value in found.items()}


def summarize(runs: Sequence[Run], problem: str, target: float) -> dict[str, dict[str, Any]]:
    """By system, from its runs on one problem: how it came to the target, and its ratios to the base and to DDP."""
    systems = list(dict.fromkeys(each["system"] for each in sorted(runs, key=_rank) if each["problem"] == problem))
    found = {name: [reached(each["curve"], target) for each in _of(runs, problem, name)] for name in systems}
    seconds = {name: [each["seconds"] if each else math.inf for each in found[name]] for name in systems}
    best = min((name for name in systems if name in FIXED), key=lambda name: median(seconds[name]))

    def ratios(name: str, of: str, base: str) -> dict[str, float | None]:
        pairs = zip(found[name], found[base], strict=True)
        return interval([ratio(a and a[of], b and b[of]) for a, b in pairs])

    summary: dict[str, dict[str, Any]] = {}
    for name in systems:
        here = _of(runs, problem, name)
        finals = [final(each["curve"]) for each in here]
        base = [final(each["curve"]) for each in _of(runs, problem, BASE)]
        summary[name] = {
            "batch": [[each["batch_sizes"][0][1] for each in here], [each["batch_sizes"][-1][1] for each in here]],
            "lr": here[0]["lr"],
            "reached": sum(each is not None for each in found[name]),
            "runs": len(here),
            **{of: interval([each[of] if each else math.inf for each in found[name]]) for of in _MEASURES},
            "worker_seconds": interval([s * each["workers"] for s, each in zip(seconds[name], here, strict=True)]),
            "final": interval([math.inf if each is None else each for each in finals]),
            **{f"{of} / {BASE}": ratios(name, of, BASE) for of in _MEASURES},
            f"seconds / {PEER}": ratios(name, "seconds", PEER),
            "best_fixed": best,
            "seconds / best fixed": ratios(name, "seconds", best),
            f"final / {BASE}": interval([ratio(a, b) for a, b in zip(finals, base, strict=True)]),
        }
    return summary


_MEASURES = ("steps", "samples", "seconds")


def holds(figures: Mapping[str, Any]) -> bool:
    """Whether the 95 % bounds are within MOST_STEPS and MOST_SECONDS."""
    steps, seconds = figures[f"steps / {BASE}"]["high"], figures["seconds / best fixed"]["high"]
    return steps is not None and seconds is not None and steps <= MOST_STEPS and seconds <= MOST_SECONDS


def disagreement(runs: Sequence[Run]) -> str:
    """Whether the losses on the quadratic model are far from their exact distribution: what is wrong, or "".

    Only of systems whose rate and batch size do not depend on the gradients: for these the distribution is exact.
    """
    lasts: dict[int, list[float]] = {}
    for each in runs:
        if each["system"] not in FIXED or not each.get("deviations"):
            continue
        worst = max(map(abs, each["deviations"]))
        if worst > LARGEST_DEVIATION:
            said = f"a loss is {worst:.1f} standard deviations from its expectation"
            return f"{each['problem']}, {each['system']}, seed {each['seed']}: {said}"
        lasts.setdefault(each["seed"], []).append(each["deviations"][-1])
    means = [sum(found) / len(found) for found in lasts.values()]  # a seed's runs have the same noise
    mean = abs(sum(means)) / math.sqrt(len(means)) if means else 0.0
    return f"the last losses are {mean:.1f} standard deviations from their expectation" if mean > LARGEST_MEAN else ""


def report(
    tuned: Mapping[str, Mapping[str, Any]], runs: Sequence[Run], file: Path | None, picture: Path | None
) -> None:
    """Prints the tables; writes the record and the picture where they are asked for."""
    figures = {name: summarize(runs, name, each["target"]) for name, each in tuned.items()}
    console = Console(width=None if sys.stdout.isatty() else 190)
    for name, each in tuned.items():
        console.print(_table(name, each, figures[name]))
        adaptive = {system: found for system, found in figures[name].items() if system not in FIXED}
        good = [system for system, found in adaptive.items() if holds(found)]
        said = f"steps <= {MOST_STEPS:g} of {BASE}'s, seconds <= {MOST_SECONDS:g} of the best fixed setting's"
        console.print(f"{name}: {said}, at the 95 % bound: {', '.join(good) or 'no policy'}\n", highlight=False)
    if file is not None:
        origin = {"command": command(), "machine": machine(), "versions": versions(["torch", "numpy", "scikit-learn"])}
        head = json.dumps({**origin, "figures": figures, "tuned": tuned}, indent=1, allow_nan=False)
        # A run is a line: with one number a line the file would have a hundred thousand.
        rows = ",\n".join(json.dumps(each, allow_nan=False) for each in runs)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f'{head[:-2]},\n "runs": [\n{rows}\n ]\n}}\n')
    if picture is not None:
        plot(tuned, runs, picture)


def _table(name: str, tuned: Mapping[str, Any], figures: Mapping[str, Any]) -> Table:
    first = next(iter(figures.values()))
    said = f"{PROBLEMS[name].quality} {tuned['target']:.4g}; {first['runs']} seeds; best fixed: {first['best_fixed']}"
    table = Table(title=f"{name}: to a {said}; median (95 %)")
    for heading in ("system", "batch", "reached", "steps"):
        table.add_column(heading, justify="left" if heading == "system" else "right", no_wrap=True)
    for heading in (f"/ {BASE}", f"samples / {BASE}", "s", f"/ {BASE}", f"/ {PEER}", "worker-s", "final"):
        table.add_column(heading, justify="right", no_wrap=True)
    for system, found in figures.items():
        sizes = sorted({*found["batch"][0], *found["batch"][1]})
        table.add_row(
            system,
            f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else f"{sizes[0]}",
            f"{found['reached']} of {found['runs']}",
            "-" if found["steps"]["median"] is None else f"{found['steps']['median']:.0f}",
            *(_spread(found[f"{of} / {BASE}"]) for of in ("steps", "samples")),
            _number(found["seconds"]["median"]),
            *(_spread(found[f"seconds / {base}"]) for base in (BASE, PEER)),
            _number(found["worker_seconds"]["median"]),
            _spread(found["final"]),
        )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _spread(found: Mapping[str, float | None]) -> str:
    middle, low, high = ("inf" if found[name] is None else _number(found[name]) for name in ("median", "low", "high"))
    return f"{middle} ({low} to {high})"


def plot(tuned: Mapping[str, Mapping[str, Any]], runs: Sequence[Run], picture: Path) -> None:
    """By problem: quality over seconds and over steps, a line a run, in the system's colour; and the batch sizes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4 * len(tuned)), layout="constrained")
    axes = figure.subplots(len(tuned), 3, squeeze=False)
    systems = list(dict.fromkeys(each["system"] for each in sorted(runs, key=_rank)))
    colours = {name: f"C{k}" for k, name in enumerate(systems)}
    for row, (name, each) in zip(axes, tuned.items(), strict=True):
        for run in (run for run in runs if run["problem"] == name):
            colour, style = colours[run["system"]], "--" if run["system"] in FIXED else "-"
            label = run["system"] if run["seed"] == 0 else None
            quality = [math.nan if point[-1] is None else point[-1] for point in run["curve"]]
            for axis, of in ((row[0], 2), (row[1], 1)):
                axis.plot([point[of] for point in run["curve"]], quality, style, color=colour, label=label, linewidth=1)
            samples = [point[0] for point in run["curve"]]
            sizes = np.interp([point[1] for point in run["curve"]], *zip(*_stairs(run), strict=True))
            row[2].plot(samples, sizes, style, color=colour, linewidth=1)
        start = median(run["curve"][1][-1] or math.inf for run in runs if run["problem"] == name)
        for axis, unit in ((row[0], "seconds"), (row[1], "steps")):
            axis.axhline(each["target"], color="black", linestyle=":", linewidth=1)
            axis.set(xlabel=unit, ylabel=f"{name}: {PROBLEMS[name].quality}", xscale="log", yscale="log")
            axis.set_ylim(top=1.2 * start)
            axis.grid(alpha=0.3)
        row[2].set(xlabel="samples", ylabel="batch size", yscale="log")
        row[2].grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    figure.savefig(picture, dpi=100)


def _stairs(run: Run) -> list[tuple[float, float]]:
    """The batch size over the steps, as points of a line."""
    changes, points = run["batch_sizes"], []
    ends = [*(step for step, _ in changes[1:]), math.inf]
    for (step, size), end in zip(changes, ends, strict=True):
        points += [(step, size), (min(end, 1e12) - 0.5, size)]
    return points


def _rank(run: Run) -> int:
    """Fixed systems first, in their order; then the others, as they are."""
    return FIXED.index(run["system"]) if run["system"] in FIXED else len(FIXED)


def _of(runs: Sequence[Run], problem: str, system: str) -> list[Run]:
    """The runs of one system on one problem, by seed."""
    found = [each for each in runs if each["problem"] == problem and each["system"] == system]
    return sorted(found, key=lambda each: each["seed"])


if __name__ == "__main__":
    record = json.loads(Path(sys.argv[1]).read_text())
    report(record["tuned"], record["runs"], None, Path(sys.argv[2]))
