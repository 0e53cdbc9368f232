"""What the kernel benchmark says: one table and a JSON file."""

from __future__ import annotations

import argparse
import json
from statistics import median
from typing import Any

import torch
from machine import command, machine, versions

Result = dict[str, Any]
PACKAGES = ("torch", "triton", "numpy", "apex", "transformer-engine", "deepspeed")


def report(results: list[Result], left_out: list[str], options: argparse.Namespace) -> bool:
    """Prints the table, writes what was asked for, and says whether any contestant was wrong."""
    for result in results:
        result["summary"] = summary(result)
    _print(results, left_out, options)
    if options.json is not None:
        record = {
            "benchmark": "kernels",
            "command": command(),
            "machine": machine(),
            "versions": versions(PACKAGES),
            "settings": {
                "device": options.device,
                "threads": torch.get_num_threads(),
                "rounds": options.rounds,
                "block_ms": options.block_ms,
            },
            "left_out": left_out,
            "results": [_rounded(result) for result in results],
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return any(result["wrong"] for result in results)


def in_words(result: Result) -> str:
    """One result in a line, as it comes."""
    of = summary(result)
    if "kfuse" not in of:
        return f"WRONG: {result['wrong'].get('kfuse')}"
    peers = [f"{of[name]['kfuse_to_it']:.2f} of {name}'s time" for name in of if name not in ("kfuse", "copy")]
    return ", ".join([f"{of['kfuse']['gb_per_s']:.1f} GB/s", f"{of['kfuse']['of_copy']:.2f} of copy's speed", *peers])


def summary(result: Result) -> dict[str, dict[str, float]]:
    """For each contestant the median time, GB/s, and within rounds its share of the copy's speed and ours to it."""
    seconds, moved = result["seconds"], result["bytes"]
    ours = seconds.get("kfuse")
    found = {}
    for name, times in seconds.items():
        found[name] = {
            "us": 1e6 * median(times),
            "gb_per_s": moved / median(times) / 1e9,
            "tflop_per_s": result["arithmetic"] / median(times) / 1e12,
            "of_copy": median(copy / time for copy, time in zip(seconds["copy"], times, strict=True)),
        }
        if ours is not None:
            found[name]["kfuse_to_it"] = median(a / b for a, b in zip(ours, times, strict=True))
    return found


# GB/s of memory by NVIDIA's data sheets; the first name that is part of the device's.
DATA_SHEETS = {
    **{"B200": 8000, "H200": 4800, "H100 PCIe": 2000, "H100 NVL": 3900, "H100": 3350, "A100-SXM4-40GB": 1555},
    **{"A100-PCIE-40GB": 1555, "A100 80GB PCIe": 1935, "A100": 2039, "L40S": 864, "L4": 300, "A10": 600, "T4": 320},
    **{"V100": 900, "RTX 4090": 1008, "RTX 3090": 936},
}


def _rounded(result: Result) -> Result:
    rounded = {name: {key: round(v, 4) for key, v in of.items()} for name, of in result["summary"].items()}
    seconds = {name: [round(1e6 * s, 2) for s in times] for name, times in result["seconds"].items()}
    kept = {key: value for key, value in result.items() if key not in ("seconds", "summary")}
    return kept | {"summary": rounded, "us_by_round": seconds}


def _print(results: list[Result], left_out: list[str], options: argparse.Namespace) -> None:
    """Plain text: a bare machine with a GPU may have no rich."""
    peers = [name for name in options.peers if any(name in result["seconds"] for result in results)]
    threads = f", {torch.get_num_threads()} threads" if options.device == "cpu" else ""
    print(f"kfuse's kernels on {options.device}{threads}: medians of {options.rounds} rounds")
    if options.device == "cuda":
        name = torch.cuda.get_device_name()
        known = next((f"{speed} GB/s" for card, speed in DATA_SHEETS.items() if card in name), "not known here")
        print(f"{name}: bandwidth by its data sheet {known}; copy GB/s is what a copy reaches")
    print("of copy: speed as a share of a plain copy's of as many bytes; the last columns: kfuse's time to the peer's")
    heads = ["kernel", "dtype", "size", "GB/s", "copy GB/s", "of copy", "TFLOP/s", *peers]
    rows = [heads]
    for result in results:
        of = result["summary"]
        row = [result["kernel"], result["dtype"], result["size"]]
        if "kfuse" in of:
            ours = of["kfuse"]
            row += [f"{ours['gb_per_s']:.1f}", f"{of['copy']['gb_per_s']:.1f}", f"{ours['of_copy']:.2f}"]
            row.append(f"{ours['tflop_per_s']:.3g}" if result["arithmetic"] else "-")
            row += [f"{of[peer]['kfuse_to_it']:.2f}" if peer in of else "-" for peer in peers]
        else:
            row += ["WRONG"] + [""] * (3 + len(peers))
        rows.append(row)
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    for row in rows:
        left = [cell.ljust(width) for cell, width in zip(row[:3], widths[:3], strict=True)]
        right = [cell.rjust(width) for cell, width in zip(row[3:], widths[3:], strict=True)]
        print("  ".join(left + right))
    notes = {f"{n} is absent from {r['kernel']} {r['dtype']}: {why}" for r in results for n, why in r["absent"].items()}
    wrong = [f"WRONG: {n} in {_name(r)} {why}" for r in results for n, why in r["wrong"].items()]
    for line in [*wrong, *(f"left out: {line}" for line in left_out), *sorted(notes)]:
        print(line)


def _name(result: Result) -> str:
    return f"{result['kernel']} {result['dtype']} {result['size']}"
