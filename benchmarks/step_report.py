"""What the step benchmark says: ratios with their intervals, the machine they hold for, a table and a JSON file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from machine import write
from numpy.typing import NDArray
from step_variants import Settings

Pairs = tuple[tuple[str, str], ...]

PAIRS: Pairs = (
    ("allreduce", "allreduce-no-stats"),
    ("reproducible", "reproducible-no-stats"),
    ("allreduce", "ddp-adascale"),
    ("allreduce", "ddp-noise-scale"),
    ("allreduce", "local-noise-scale"),
    ("allreduce-bf16", "ddp-bf16"),
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
    seconds, exposed, cpu, host = (
        {name: np.array([r[name][what] for r in outcome["rounds"]]) for name in names} for what in range(4)
    )
    base = "ddp" if "ddp" in names else "local"
    on_gpu = settings.device == "cuda"
    variants = {
        name: {
            "step_ms": _median_ms(seconds[name]),
            f"to_{base}": median_interval(seconds[name] / seconds[base]),
            "exposed_ms": _median_ms(exposed[name]),
            "over_local_ms": _median_ms(seconds[name] - seconds["local"]),
            "cpu_ms": _median_ms(cpu[name]),
            f"cpu_to_{base}": median_interval(cpu[name] / cpu[base]),
            "host_ms": _median_ms(host[name]) if on_gpu else None,
            "peak_gib": round(outcome["peak_bytes"][name] / 2**30, 3) if on_gpu else None,
        }
        for name in names
    }
    pairs = {
        f"{a} / {b}": {"step": median_interval(seconds[a] / seconds[b]), "cpu": median_interval(cpu[a] / cpu[b])}
        for a, b in compared
        if a in names and b in names
    }
    _print(variants, base, pairs, settings, outcome, rounds, steps)
    write(
        path,
        ("torch", "numpy", "fairscale"),
        benchmark=benchmark,
        settings={**asdict(settings), "rounds": rounds, "steps": steps, "parameters": outcome["parameters"]},
        variants=variants,
        pairs=pairs,
        largest_loss_difference=outcome["loss_differences"],
        step_ms_by_round={name: np.round(1e3 * seconds[name], 2).tolist() for name in names},
    )


def _median_ms(seconds: NDArray[np.float64]) -> float:
    return round(1e3 * float(np.median(seconds)), 3)


def median_interval(ratios: NDArray[np.float64]) -> dict[str, float]:
    """The median of per-round ratios, and the 95 % percentile-bootstrap interval over rounds."""
    generator = np.random.default_rng(0)
    drawn = np.median(generator.choice(ratios, size=(RESAMPLES, len(ratios))), axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return {"median": round(float(np.median(ratios)), 4), "low": round(float(low), 4), "high": round(float(high), 4)}


def _print(
    variants: dict[str, Any],
    base: str,
    pairs: dict[str, Any],
    s: Settings,
    outcome: dict[str, Any],
    rounds: int,
    steps: int,
) -> None:
    print(
        f"{s.workers} workers on {s.device}; GPT of {outcome['parameters'] / 1e6:.1f} M parameters; a worker's step: "
        f"{s.micro_batches} x {s.samples} sequences of {s.block} tokens; medians of {rounds} rounds of {steps} steps; "
        f"losses differ from {base}'s by at most {max(outcome['loss_differences'].values()):.1e}"
    )
    print(
        f"{'variant':<22} {'step ms':>9} {f'to {base}':>9} {'95 %':>13} {'exposed':>8} {'+local':>8} "
        f"{'cpu':>7} {'host ms':>8} {'peak GiB':>9}"
    )
    for name, v in variants.items():
        on_gpu = [f"{v[key]:.2f}" if v[key] is not None else "-" for key in ("host_ms", "peak_gib")]
        print(
            f"{name:<22} {v['step_ms']:>9.1f} {_ratio(v[f'to_{base}'])} {v['exposed_ms']:>8.1f} "
            f"{v['over_local_ms']:>8.1f} {v[f'cpu_to_{base}']['median']:>7.3f} {on_gpu[0]:>8} {on_gpu[1]:>9}"
        )
    for name, pair in pairs.items():
        print(f"{name:<32} {_ratio(pair['step'])}, cpu {pair['cpu']['median']:.3f}")


def _ratio(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:>9.3f} {ratio['low']:.3f}-{ratio['high']:.3f}"
