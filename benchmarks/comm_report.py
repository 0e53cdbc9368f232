"""What the communication benchmark says: a table for each size, ratios with their intervals, and a JSON file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from comm_variants import VARIANTS
from machine import write
from numpy.typing import NDArray
from step_report import median_interval

FIXED = ("allreduce", "all_to_all")
"""What `auto` chooses from."""


def report(sizes: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any], path: Path | None) -> None:
    """Prints the tables; writes all numbers to `path`, where one is given."""
    results = [{**size, "memory": _memory(size)} if "memory" in size else _size(size) for size in sizes]
    for result in results:
        _print_memory(result) if "memory" in result else _print(result)
    settings = {name: value for name, value in arguments.items() if name != "json"}
    write(path, ("torch", "numpy"), benchmark="comm", settings=settings, sizes=results)


def _size(size: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of one number of parameters and of workers."""
    variants: dict[str, Any] = {}
    pairs: dict[str, Any] = {}
    for rounds in size["groups"].values():
        names = [name for name in VARIANTS if name in rounds[0]]
        seconds, sent, cpu = ({n: np.array([r[n][k] for r in rounds]) for n in names} for k in range(3))
        for name in names:
            base = VARIANTS[name].base
            variants.setdefault(
                name,
                {
                    "step_ms": _milliseconds(seconds[name]),
                    "to_ddp": median_interval(seconds[name] / seconds["ddp"]),
                    "cpu_to_ddp": median_interval(cpu[name] / cpu["ddp"]),
                    "exposed_ms": None if base is None else _milliseconds(seconds[name] - seconds[base]),
                    "bytes_a_parameter": round(float(np.median(sent[name])) / size["parameters"], 2),
                    "cpu_ms": _milliseconds(cpu[name]),
                    "step_ms_by_round": np.round(1e3 * seconds[name], 3).tolist(),
                },
            )
        for a, b in _compared(names, seconds):
            pairs[f"{a} / {b}"] = {
                "step": median_interval(seconds[a] / seconds[b]),
                "cpu": median_interval(cpu[a] / cpu[b]),
            }
    facts = {name: size[name] for name in ("workers", "megabytes", "parameters")}
    return {**facts, "variants": variants, "pairs": pairs}


def _compared(names: Sequence[str], seconds: Mapping[str, NDArray[np.float64]]) -> list[tuple[str, str]]:
    """Each schedule with and without statistics; sharded state with ZeRO; auto with the best schedule that is fixed."""
    pairs = [(name, f"{name}-no-stats") for name in names if f"{name}-no-stats" in names]
    pairs += [(name, "zero") for name in names if "sharded" in name and "zero" in names]
    fixed = [name for name in FIXED if name in names]
    if "auto" in names and fixed:
        pairs.append(("auto", min(fixed, key=lambda name: float(np.median(seconds[name])))))
    return pairs


def _memory(size: Mapping[str, Any]) -> dict[str, Any]:
    """Bytes a parameter."""
    return {
        name: {key: round(value / size["parameters"], 2) for key, value in found.items()}
        for name, found in size["memory"].items()
    }


def _milliseconds(seconds: NDArray[np.float64]) -> float:
    return round(1e3 * float(np.median(seconds)), 3)


def _print(result: Mapping[str, Any]) -> None:
    columns = ("variant", "step ms", "to ddp", "95 %", "exposed ms", "bytes/param", "cpu ms")
    rows = [
        (
            name,
            f"{v['step_ms']:.2f}",
            *_ratio(v["to_ddp"]),
            "-" if v["exposed_ms"] is None else f"{v['exposed_ms']:.2f}",
            f"{v['bytes_a_parameter']:.2f}",
            f"{v['cpu_ms']:.2f}",
        )
        for name, v in result["variants"].items()
    ]
    _table(f"{result['megabytes']:g} MB of parameters, {result['workers']} workers", columns, rows)
    if result["pairs"]:
        pairs = [(name, *_ratio(p["step"]), *_ratio(p["cpu"])) for name, p in result["pairs"].items()]
        _table("", ("pair", "ratio", "95 %", "cpu ratio", "95 %"), pairs)


def _print_memory(result: Mapping[str, Any]) -> None:
    rows = [(name, f"{v['tensor_bytes']:.2f}", f"{v['resident_bytes']:.2f}") for name, v in result["memory"].items()]
    title = f"{result['megabytes']:g} MB of parameters, {result['workers']} workers: bytes a parameter"
    _table(title, ("variant", "tensors", "resident set"), rows)


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE, padding=0, title=title, title_justify="left")
    for k, column in enumerate(columns):
        table.add_column(column, justify="right" if k else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _ratio(ratio: Mapping[str, float]) -> tuple[str, str]:
    return f"{ratio['median']:.3f}", f"{ratio['low']:.3f}-{ratio['high']:.3f}"
