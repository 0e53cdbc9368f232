"""time_to_accuracy.py's costs, ratios, tables and result file.

A run is a record as `tta_systems.run` makes it. Its `curve` has rows of samples, steps, seconds and quality, of which
lower is better; the quality is None where it is no number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from report import RESAMPLES, origin, table
from tta_problems import PROBLEMS

FIXED_COSTS = (16, 64, 256)
"""r: what a step costs beside its samples, in samples."""

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


def final(curve: Curve) -> float:
    """The median of the last three qualities; infinite where that is no number."""
    return sorted(math.inf if row[-1] is None else float(row[-1]) for row in curve[-3:])[len(curve[-3:]) // 2]


def reached(curve: Curve, target: float) -> dict[str, float]:
    """Samples, steps and seconds at which the smoothed curve first comes to the target; infinite where it never does.

    Between two rows by a straight line; a row without a number counts as not there yet.
    """
    rows, names = smooth(curve), ("samples", "steps", "seconds")
    for before, after in zip([None, *rows], rows, strict=False):
        if after[-1] is None or after[-1] > target:
            continue
        if before is None or before[-1] is None:
            return dict(zip(names, map(float, after), strict=False))
        share = (before[-1] - target) / (before[-1] - after[-1])
        return {name: a + share * (b - a) for name, a, b in zip(names, before, after, strict=False)}
    return dict.fromkeys(names, math.inf)


def cost(run: Run, target: float, r: float | None) -> float:
    """steps x r + samples to the target, seconds for None; infinite where it is not reached."""
    found = reached(run["curve"], target)
    return found["seconds"] if r is None else found["steps"] * r + found["samples"]


def ratio(value: float, base: float) -> float:
    """Of a pair; infinite where `value` was not reached, 0 where only `base` was not."""
    return math.inf if math.isinf(value) else 0.0 if math.isinf(base) else value / base


def interval(values: Sequence[float]) -> dict[str, float | None]:
    """The median and its 95 % percentile-bootstrap interval; None is infinite. No value is interpolated."""
    drawn = np.random.default_rng(0).choice(np.array(values), size=(RESAMPLES, len(values)))
    ends = zip(("low", "high"), (0.025, 0.975), ("lower", "higher"), strict=True)
    found = {"median": float(np.median(values))}
    found |= {name: float(np.quantile(np.median(drawn, axis=1), q, method=way)) for name, q, way in ends}  # type: ignore[call-overload]
    return {name: round(value, 4) if math.isfinite(value) else None for name, value in found.items()}


# -- the runs of a row -----------------------------------------------------------------------------------------------


def best_runs(found: Run, r: float | None) -> list[Run]:
    """Those of the fixed batch size and rate with the least cost, by the median over the seeds."""
    by: dict[tuple[int, float], list[Run]] = {}
    for each in found["runs"]:
        if each["system"] == "fixed":
            by.setdefault((each["batch_size"], each["lr"]), []).append(each)
    return min(by.values(), key=lambda runs: median(cost(each, each["target"], r) for each in runs))


def runs_of(found: Run, row: str, r: float | None) -> list[Run]:
    """The runs of a row, by seed. row: `small`, `best` or a system's name. r: None: by seconds."""
    runs = [each for each in found["runs"] if each["r"] in (None, r)]
    picked = best_runs(found, r) if row == "best" else [each for each in runs if each["system"] == row]
    return sorted(picked, key=lambda each: each["seed"])


def rows_of(found: Run) -> list[str]:
    systems = dict.fromkeys(each["system"] for each in found["runs"])
    return ["small", "best", *(each for each in systems if each not in ("small", "fixed"))]


def summarize(found: Run) -> dict[str, Any]:
    """By r (`s`: in seconds) and row: what it took, over the best fixed batch and over the small one."""
    tuned, summary = found["tuned"], dict[str, Any]()
    for r in (None,) if "step_s" in tuned else FIXED_COSTS:
        costs = {row: [cost(each, tuned["target"], r) for each in runs_of(found, row, r)] for row in rows_of(found)}
        summary["s" if r is None else str(r)] = {
            row: {
                "cost": interval(values),
                **{f"/ {base}": interval(list(map(ratio, values, costs[base]))) for base in ("best", "small")},
                "reached": sum(map(math.isfinite, values)),
                "runs": len(values),
                "batches": sorted({size for each in runs_of(found, row, r) for _, size in each["batch_sizes"]}),
                **{what: _median(what, runs_of(found, row, r), tuned["target"]) for what in ("steps", "samples")},
            }
            for row, values in costs.items()
        }
        if r is not None:
            swept = sum(_whole(each, r) for each in tuned["sweep"])
            one = median(_whole(each, r) for each in runs_of(found, "goodput", r))
            summary[str(r)][f"sweep of {len(tuned['sweep'])} runs over one goodput run"] = round(swept / one, 1)
    if growths := first_growths(found):
        summary["first growth / truth passes the batch"] = growths
    if ramps := runs_of(found, "ramp", None):
        own = runs_of(found, "goodput", 64)
        steps = [[reached(each["curve"], tuned["target"])["steps"] for each in runs] for runs in (ramps, own)]
        summary["steps, ramp / goodput"] = interval(list(map(ratio, *steps)))
    if "decay" in tuned:
        summary["within a decay"] = _within_decay(tuned["decay"])
    return summary


def _whole(run: Run, r: float) -> float:
    """steps x r + samples of the whole run, until it ended."""
    samples, steps = run["curve"][-1][:2]
    return float(steps * r + samples)


def _median(what: str, runs: Sequence[Run], target: float) -> float | None:
    middle = median(reached(run["curve"], target)[what] for run in runs)
    return round(middle) if math.isfinite(middle) else None


def first_growths(found: Run) -> list[float | None]:
    """By seed: the step of gns' first growth, over the first one at which the true noise scale is above the batch."""
    grown = {each["seed"]: each["batch_sizes"] for each in runs_of(found, "gns", None)}
    out = list[float | None]()
    for each in runs_of(found, "small", None):
        passed = next((step for step, noise in each["truth"] if noise > each["batch_size"]), None)
        changes = grown.get(each["seed"], [])
        out.append(round(changes[1][0] / passed, 2) if passed and len(changes) > 1 else None)
    return out if any(each is not None for each in out) else []


def _within_decay(runs: Sequence[Run]) -> dict[str, Any]:
    """By decay and system: final quality and steps over those of the best fixed batch within the same decay.

    That batch, and its rate, are the best ones within a cosine decay. Seesaw takes the place of that decay.
    """
    by: dict[tuple[str, str], list[Run]] = {}
    for each in sorted(runs, key=lambda run: run["seed"]):
        by.setdefault((each["decay"], each["system"]), []).append(each)
    best = by["cosine", "fixed"]
    out: dict[str, Any] = {"batch": best[0]["batch_size"], "lr": best[0]["lr"]}
    for (decay, system), group in by.items():
        pairs = list(zip(group, by.get((decay, "fixed"), best), strict=True))
        out[f"{system}, {decay}" if decay != "none" else system] = {
            "quality": interval([final(each["curve"]) for each in group]),
            "/ fixed": interval([ratio(final(a["curve"]), final(b["curve"])) for a, b in pairs]),
            "steps / fixed": interval([a["curve"][-1][1] / b["curve"][-1][1] for a, b in pairs]),
        }
    return out


# -- tables, file ----------------------------------------------------------------------------------------------------


def report(found: Mapping[str, Run], file: Path | None) -> None:
    """Prints the tables; writes the record where it is asked for."""
    figures = {name: summarize(each) for name, each in found.items()}
    for name, each in found.items():
        for r, rows in figures[name].items():
            if isinstance(rows, dict) and "small" in rows:
                _show(name, each["tuned"], r, rows)
            else:
                print(f"{name}: {r}: {json.dumps(rows)}")
    if file is not None:
        runs = [
            json.dumps(run, allow_nan=False)
            for each in found.values()
            for run in (*each["tuned"]["sweep"], *each["runs"], *each["tuned"].get("decay", []))
        ]
        about = {**origin(["torch", "numpy", "scikit-learn"]), "figures": figures}
        head = json.dumps(about, indent=1, allow_nan=False)
        # A run is a line: with one number a line the file would have a hundred thousand.
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f'{head[:-2]},\n "runs": [\n' + ",\n".join(runs) + "\n ]\n}\n")


def _show(name: str, tuned: Run, r: str, found: Mapping[str, Any]) -> None:
    what = "seconds" if r == "s" else f"steps x {r} + samples"
    rows = []
    for row, each in found.items():
        if isinstance(each, dict):
            sizes, counts = each["batches"], (each["steps"], each["samples"])
            cells = (
                f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else f"{sizes[0]}",
                f"{each['reached']} of {each['runs']}",
                *("-" if count is None else f"{count:,}" for count in counts),
                _number(each["cost"]["median"]),
                *(_spread(each[f"/ {base}"]) for base in ("best", "small")),
            )
            rows.append((row, *cells))
    title = f"\n{name}: {what} to a {PROBLEMS[name].quality} of {tuned['target']:.4g}; median (95 %)"
    table(title, ("", "batch", "reached", "steps", "samples", what, "/ best", "/ small"), rows)
    print(*(f"{row}: {each}" for row, each in found.items() if not isinstance(each, dict)), sep="\n")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _spread(found: Mapping[str, float | None]) -> str:
    middle, low, high = ("inf" if found[name] is None else _number(found[name]) for name in ("median", "low", "high"))
    return f"{middle} ({low} to {high})"
