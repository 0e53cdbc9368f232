"""The parts of gpu.sh, one after the other, each a process of its own with its own time limit: one that fails, hangs or
crashes does not take the rest along."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from machine import machine, versions

HERE = Path(__file__).parent
KEPT_LINES = 40


@dataclass(frozen=True)
class Part:
    name: str
    command: list[str]
    limit_s: float


@dataclass(frozen=True)
class Outcome:
    part: str
    status: str
    """ok | failed | timed out | absent"""
    seconds: float
    note: str


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON files")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.exit(2, f"{parser.prog}: --device cuda: torch sees no CUDA device; DEVICE=cpu runs the parts without\n")
    options.out.mkdir(parents=True, exist_ok=True)
    outcomes = [_run(part) for part in _parts(options.device, options.out.absolute())]
    if options.device == "cpu" or shutil.which("compute-sanitizer") is None:
        why = "not on a CPU" if options.device == "cpu" else "no compute-sanitizer on this machine"
        outcomes.append(Outcome("kernels under compute-sanitizer", "absent", 0.0, why))
    print(f"\n{'part':<34} {'status':<10} {'seconds':>7}  note")
    for outcome in outcomes:
        print(f"{outcome.part:<34} {outcome.status:<10} {outcome.seconds:>7.1f}  {outcome.note}")
    record = {
        "benchmark": "gpu",
        "device": options.device,
        "machine": machine(),
        "versions": versions(("torch", "triton", "numpy")),
        "parts": [asdict(outcome) for outcome in outcomes],
    }
    (options.out / f"gpu_parts_{options.device}.json").write_text(json.dumps(record, indent=1) + "\n")
    return int(any(outcome.status in ("failed", "timed out") for outcome in outcomes))


def _parts(device: str, out: Path) -> list[Part]:
    """On a CPU the same parts at a size that a laptop bears."""
    gpu = device == "cuda"
    patience = 1 if gpu else 3  # on a GPU all limits together are below nine minutes

    def script(name: str, *arguments: str) -> list[str]:
        return [sys.executable, str(HERE / name), *arguments]

    def result(name: str) -> list[str]:
        return ["--json", str(out / f"{name}_{device}.json")]

    check = script("gpu_check.py", "--device", device)
    sizes = "64,1024,gpt2,resnet50,16" if gpu else "1"  # in the order of what must be known
    rounds, limit_s = "7" if gpu else "3", str(140 * patience)
    options = ["--device", device, "--sizes", sizes, "--rounds", rounds, "--limit-s", limit_s]
    kernels = script("kernels.py", *options)
    ranks = script("gpu_ranks.py", "--device", device)
    parts = [
        Part("kernels are right", [*check, *result("check")], 45 * patience),
        Part("kernels beside their peers", [*kernels, *result("kernels")], 200 * patience),
        Part("a training step", [*script("step_gpu.py", "--device", device), *result("step_gpu")], 60 * patience),
        Part("two workers, every transport", [*ranks, "transports", *result("transports")], 75 * patience),
        Part("growth, and a worker killed", [*ranks, "elastic", *result("elastic")], 95 * patience),
    ]
    if gpu and (sanitizer := shutil.which("compute-sanitizer")):
        command = [sanitizer, "--tool", "memcheck", "--error-exitcode", "9", *check, "--small"]
        parts.insert(1, Part("kernels under compute-sanitizer", command, 60))
    return parts


def _run(part: Part) -> Outcome:
    print(f"\n== {part.name} (at most {part.limit_s:.0f} s)", flush=True)
    started = time.monotonic()
    process = subprocess.Popen(
        part.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        text, _ = process.communicate(timeout=part.limit_s)
        status = "ok" if process.returncode == 0 else "failed"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its own workers too
        text, _ = process.communicate()
        status = "timed out"
    lines = text.splitlines()
    shown = lines if status == "ok" else lines[-KEPT_LINES:]
    print("\n".join(shown), flush=True)
    note = "" if status == "ok" else next((line for line in reversed(lines) if line.strip()), "no output")
    return Outcome(part.name, status, round(time.monotonic() - started, 1), note[:160])


if __name__ == "__main__":
    sys.exit(main())
