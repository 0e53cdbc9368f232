"""The parts of gpu.sh, one after the other, each a process of its own with its own time limit: one that fails, hangs or
crashes does not take the rest along. At the end there is one table, and one JSON file with what every part wrote.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
KEPT_LINES = 40
ABSENT = 3  # a part's exit status, as in gpu_workers, which needs torch
PATIENCE_ON_CPU = 3
"""On a CPU each part may take so many times its limit. On one GPU all limits together are below nine minutes."""


@dataclass(frozen=True)
class Part:
    """One row of the table."""

    name: str
    command: list[str]
    limit_s: float
    environment: dict[str, str] = field(default_factory=dict)
    absent: str | None = None
    """Why it cannot run here; None: it can."""


@dataclass(frozen=True)
class Outcome:
    """How a part ended, and what it wrote."""

    part: str
    status: str
    """ok | failed | timed out | absent"""
    seconds: float
    note: str
    """The last line of its output; why it is absent."""
    result: Any = None
    """The part's own JSON record, as far as it came."""


def main() -> int:
    """Runs all parts. Returns the exit status: 1 where a part failed, 2 where torch sees no GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON file")
    parser.add_argument("--only", nargs="+", metavar="PART", help="these parts alone, by name")
    options = parser.parse_args()
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # every part's process inherits it
    import torch
    from report import write

    if options.device == "cuda" and not torch.cuda.is_available():
        why = "torch sees no GPU: see nvidia-smi, and whether torch is built for CUDA"
        parser.exit(2, f"{parser.prog}: {why} (here {torch.__version__}); DEVICE=cpu runs the parts without\n")
    gpus = torch.cuda.device_count() if options.device == "cuda" else 0
    with tempfile.TemporaryDirectory(prefix="kfuse-gpu-") as folder:
        found = {part.name: part for part in parts(options.device, gpus, Path(folder))}
        if unknown := set(options.only or ()) - set(found):
            parser.exit(2, f"{parser.prog}: --only: no part {min(unknown)!r}; there are: {', '.join(found)}\n")
        chosen = [part for name, part in found.items() if options.only is None or name in options.only]
        path = options.out / f"gpu_{options.device}.json"
        outcomes: list[Outcome] = []
        for part in chosen:  # written after each: what is known is kept where the machine goes, or time is over
            outcomes.append(run(part))
            done = [asdict(outcome) for outcome in outcomes]
            write(path, ("torch", "triton", "numpy"), benchmark="gpu", device=options.device, gpus=gpus, parts=done)
    print(f"\n{'part':<34} {'status':<10} {'seconds':>7}  note")
    for outcome in outcomes:
        print(f"{outcome.part:<34} {outcome.status:<10} {outcome.seconds:>7.1f}  {outcome.note}")
    print(f"\nAll of it is in {path}")
    return int(any(outcome.status in ("failed", "timed out") for outcome in outcomes))


def parts(device: str, gpus: int, folder: Path) -> list[Part]:
    """All rows of the table; on a CPU the same parts at a size that a laptop bears.

    gpus: how many torch sees. folder: for the parts' JSON files.
    """
    on_gpu = device == "cuda"
    patience = 1 if on_gpu else PATIENCE_ON_CPU
    needs_gpu = None if on_gpu else "needs a GPU"
    sanitizer = shutil.which("compute-sanitizer")
    # In the order of what must be known, so that --limit-s cuts off the rest.
    sizes, rounds, limit_s = ("64,1024,gpt2,resnet50", "5", "45") if on_gpu else ("1", "3", "180")
    found: list[Part] = []

    def part(
        name: str, limit_s: float, script: str, *arguments: str, absent: str | None = None, tool: tuple[str, ...] = ()
    ) -> None:
        json_file = folder / f"{len(found)}.json"
        command = [*tool, sys.executable, str(HERE / script), "--device", device, *arguments, "--json", str(json_file)]
        # Else torch hands out pieces of one large allocation, beyond whose ends a piece's neighbours lie.
        environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool else {}
        found.append(Part(name, command, limit_s * patience, environment, absent))

    memcheck = (sanitizer or "", "--tool", "memcheck", "--error-exitcode", "9")
    no_tool = None if sanitizer else "no compute-sanitizer on this machine (it comes with the CUDA toolkit)"
    one_gpu = "one GPU: two ranks would wait for each other's turn on it" if gpus == 1 else None
    # On a fresh machine: some 70 kernels, which Triton keeps on the disk for the parts that follow.
    part("kernels are compiled", 50, "gpu_check.py", "--processes", str(min(12, os.cpu_count() or 1)), absent=needs_gpu)
    part("kernels are right", 50, "gpu_check.py")
    part("buffers of over 2^31 elements", 40, "gpu_check.py", "--large", absent=needs_gpu)
    part("kernels under compute-sanitizer", 50, "gpu_check.py", "--small", absent=needs_gpu or no_tool, tool=memcheck)
    part("kernels beside their peers", 70, "kernels.py", "--sizes", sizes, "--rounds", rounds, "--limit-s", limit_s)
    few = ("--rounds", "15", "--steps", "3") if on_gpu else ("--rounds", "3", "--steps", "1")
    part("a training step", 55, "step.py", "--workers", "1", "--micro-batches", "2", *few)
    part("two workers, every transport", 60, "gpu_ranks.py")
    beside = ("--workers", str(min(8, gpus)) if on_gpu else "2", "--micro-batches", "2", *few)
    part("communication beside DDP", 60, "step.py", *beside, absent=one_gpu)
    reproducible = (*beside, "--variants", "reproducible,reproducible-no-stats")
    part("reproducible sums beside DDP", 60, "step.py", *reproducible, absent=one_gpu)
    part("growth, and workers killed", 110, "gpu_elastic.py")
    part("a large state", 45, "gpu_state.py")
    return found


def run(part: Part) -> Outcome:
    """Runs one part, and ends all of its processes when it is over or its time is."""
    if part.absent is not None:
        return Outcome(part.name, "absent", 0.0, part.absent)
    print(f"\n== {part.name} (at most {part.limit_s:.0f} s)", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as output:  # a process left behind could keep a pipe open
        process = subprocess.Popen(
            part.command,
            env=os.environ | part.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = {0: "ok", ABSENT: "absent"}.get(process.wait(part.limit_s), "failed")
        except subprocess.TimeoutExpired:
            status = "timed out"
        finally:
            _kill_group(process)
        output.seek(0)
        lines = [line.rstrip() for line in output.read().splitlines() if line.strip()]
    if status == "failed" and any("Device not supported" in line for line in lines):
        status = "absent"  # compute-sanitizer does not know this GPU yet
    print("\n".join(lines if status == "ok" else lines[-KEPT_LINES:]), flush=True)
    result = _result(part)
    note = lines[-1][:160] if lines else "no output"
    return Outcome(part.name, status, round(time.monotonic() - started, 1), note, result)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Its own workers too: those of an elastic job, in groups of their own, are killed as their supervisor ends."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _result(part: Part) -> Any:
    """What the part wrote; None where it wrote nothing, or was cut off while writing."""
    try:
        return json.loads(Path(part.command[-1]).read_text())
    except (OSError, ValueError):
        return None


if __name__ == "__main__":
    sys.exit(main())
