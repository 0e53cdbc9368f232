"""What the step benchmark says: ratios with their intervals, the machine they hold for, a table and a JSON file."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from machine import command, machine, versions
from numpy.typing import NDArray
from step_variants import Settings

Pairs = tuple[tuple[str, str], ...]

PAIRS: Pairs = (
    ("allreduce", "allreduce-no-stats"),
    ("reproducible", "reproducible-no-stats"),
    ("allreduce", "ddp-adascale"),
    ("allreduce", "ddp-noise-scale"),
    ("reproducible", "allreduce"),
)
RESAMPLES = 2000


def report(
    benchmark: str,
    compared: Pairs,
    outcome: dict[str, Any],
    settings: Settings,
    rounds: int,
    steps: int,
    path: Path | None,
) -> None:
    """Prints the tables; writes all numbers to `path`, where one is given. compared: variants in pairs."""
    names = list(outcome["rounds"][0])
    seconds = {name: np.array([r[name][0] for r in outcome["rounds"]]) for name in names}
    exposed = {name: np.array([r[name][1] for r in outcome["rounds"]]) for name in names}
    cpu = {name: np.array([r[name][2] for r in outcome["rounds"]]) for name in names}
    variants = {
        name: {
            "step_ms": _median_ms(seconds[name]),
            "to_ddp": median_interval(seconds[name] / seconds["ddp"]),
            "exposed_ms": _median_ms(exposed[name]),
            "over_local_ms": _median_ms(seconds[name] - seconds["local"]),
            "cpu_ms": _median_ms(cpu[name]),
            "cpu_to_ddp": median_interval(cpu[name] / cpu["ddp"]),
        }
        for name in names
    }
    pairs = {
        f"{a} / {b}": {"step": median_interval(seconds[a] / seconds[b]), "cpu": median_interval(cpu[a] / cpu[b])}
        for a, b in compared
        if a in names and b in names
    }
    _print(variants, pairs, settings, outcome, rounds, steps)
    if path is None:
        return
    record = {
        "benchmark": benchmark,
        "command": command(),
        "machine": machine(),
        "versions": versions(("torch", "numpy", "fairscale")),
        "settings": {**asdict(settings), "rounds": rounds, "steps": steps, "parameters": outcome["parameters"]},
        "variants": variants,
        "pairs": pairs,
        "largest_loss_difference_to_ddp": outcome["loss_differences"],
        "step_ms_by_round": {name: np.round(1e3 * seconds[name], 2).tolist() for name in names},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def _median_ms(seconds: NDArray[np.float64]) -> float:
    return round(1e3 * float(np.median(seconds)), 3)


def median_interval(ratios: NDArray[np.float64]) -> dict[str, float]:
    """The median of per-round ratios, and the 95 % percentile-bootstrap interval over rounds."""
    generator = np.random.default_rng(0)
    drawn = np.median(generator.choice(ratios, size=(RESAMPLES, len(ratios))), axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return {"median": round(float(np.median(ratios)), 4), "low": round(float(low), 4), "high": round(float(high), 4)}


def _print(
    variants: dict[str, Any], pairs: dict[str, Any], s: Settings, outcome: dict[str, Any], rounds: int, steps: int
) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(
        f"{s.workers} workers; GPT of {outcome['parameters'] / 1e6:.1f} M parameters; a worker's step has "
        f"{s.micro_batches} x {s.samples} sequences of {s.block} tokens; medians of {rounds} rounds of {steps} steps; "
        f"losses differ from ddp's by at most {max(outcome['loss_differences'].values()):.1e}",
        highlight=False,
    )
    table = Table(box=SIMPLE, padding=0)
    for column in ("variant", "step ms", "to ddp", "95 %", "exposed", "+local", "cpu/ddp"):
        table.add_column(column, justify="left" if column == "variant" else "right", no_wrap=True)
    for name, v in variants.items():
        numbers = f"{v['exposed_ms']:.1f}", f"{v['over_local_ms']:.1f}", f"{v['cpu_to_ddp']['median']:.3f}"
        table.add_row(name, f"{v['step_ms']:.1f}", *_ratio(v["to_ddp"]), *numbers)
    console.print(table)
    if pairs:
        other = Table(box=SIMPLE, padding=0)
        for column in ("pair", "ratio", "95 %", "cpu ratio"):
            other.add_column(column, justify="left" if column == "pair" else "right", no_wrap=True)
        for name, pair in pairs.items():
            other.add_row(name, *_ratio(pair["step"]), f"{pair['cpu']['median']:.3f}")
        console.print(other)


def _ratio(ratio: dict[str, float]) -> tuple[str, str]:
    return f"{ratio['median']:.3f}", f"{ratio['low']:.3f}-{ratio['high']:.3f}"
