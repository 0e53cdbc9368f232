"""The parts of gpu.sh, one after the other, each a process of its own with its own time limit: one that fails, hangs or
crashes does not take the rest along. At the end there are two tables, of the parts and of what was found in them beside
what is accepted, and one JSON file with what every part wrote.
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
"""On a CPU each part may take so many times its limit. On GPUs all limits together are ten minutes."""


@dataclass(frozen=True)
class Part:
    name: str
    command: list[str]
    limit_s: float
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
    rows: dict[str, Any] = field(default_factory=dict)
    """Of the second table: see report.row."""


def main() -> int:
    """Runs all parts. Returns the exit status: 1 where a part failed, 2 where torch sees no GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON file")
    parser.add_argument("--two", action="store_true", help="what takes two GPUs")
    parser.add_argument("--only", nargs="+", metavar="PART", help="these parts alone, by name")
    options = parser.parse_args()
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # every part's process inherits it
    import torch
    from report import show_rows, write

    if options.device == "cuda" and not torch.cuda.is_available():
        why = "torch sees no GPU: see nvidia-smi, and whether torch is built for CUDA"
        parser.exit(2, f"{parser.prog}: {why} (here {torch.__version__}); DEVICE=cpu runs the parts without\n")
    gpus = torch.cuda.device_count() if options.device == "cuda" else 0
    if options.two and gpus == 1:
        parser.exit(2, f"{parser.prog}: --two: torch sees one GPU\n")
    with tempfile.TemporaryDirectory(prefix="kfuse-gpu-") as folder:
        found = {part.name: part for part in parts(options.device, Path(folder), options.two)}
        if unknown := set(options.only or ()) - set(found):
            parser.exit(2, f"{parser.prog}: --only: no part {min(unknown)!r}; there are: {', '.join(found)}\n")
        chosen = [part for name, part in found.items() if options.only is None or name in options.only]
        path = options.out / f"gpu_{options.device}{'_two' * options.two}.json"
        outcomes: list[Outcome] = []
        for part in chosen:  # written after each: what is known is kept where the machine goes, or time is over
            outcomes.append(run(part, options.device))
            done = [asdict(outcome) for outcome in outcomes]
            write(path, ("torch", "triton", "numpy"), benchmark="gpu", device=options.device, gpus=gpus, parts=done)
    print(f"\n{'part':<34} {'status':<10} {'seconds':>7}  note")
    for outcome in outcomes:
        print(f"{outcome.part:<34} {outcome.status:<10} {outcome.seconds:>7.1f}  {outcome.note}")
    rows = {name: row for outcome in outcomes for name, row in outcome.rows.items()}
    show_rows(rows)
    missed = [name for name, row in rows.items() if row["verdict"] == "miss"]
    print(f"{len(missed)} of {len(rows)} rows missed", *missed, sep="\n  ")
    print(f"\nAll of it is in {path}")
    return int(any(outcome.status in ("failed", "timed out") for outcome in outcomes))


def parts(device: str, folder: Path, two: bool = False) -> list[Part]:
    """All rows of the first table; on a CPU the same parts at a size that a laptop bears.

    folder: for the parts' JSON files. two: what takes two GPUs.
    """
    on_gpu = device == "cuda"
    patience = 1 if on_gpu else PATIENCE_ON_CPU
    needs_gpu = None if on_gpu else "needs a GPU"
    sanitizer = shutil.which("compute-sanitizer")
    found: list[Part] = []

    def part(
        name: str, limit_s: float, script: str, *arguments: str, absent: str | None = None, tool: tuple[str, ...] = ()
    ) -> None:
        json_file = folder / f"{len(found)}.json"
        command = [*tool, sys.executable, str(HERE / script), "--device", device, *arguments, "--json", str(json_file)]
        found.append(Part(name, command, limit_s * patience, absent))

    # Without the cache torch hands out no pieces of a large allocation, beyond whose ends a piece's neighbours lie.
    memcheck: tuple[str, ...] = ("env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", sanitizer or "", "--tool", "memcheck")
    memcheck += ("--target-processes", "all", "--error-exitcode", "9")
    no_tool = None if sanitizer else "no compute-sanitizer on this machine (it comes with the CUDA toolkit)"
    if two:
        smi = shutil.which("nvidia-smi") if on_gpu else None
        found.append(Part("topology", [smi or "", "topo", "-m"], 20, absent=None if smi else "needs nvidia-smi"))
        part("two workers, every transport", 80, "gpu_ranks.py", tool=("env", "NCCL_DEBUG=INFO"))
        part("growth, and workers killed", 120, "gpu_elastic.py")
        part("steps beside DDP", 280, "gpu_step.py", "--two")
        symmetric = ("--only", "symmetric")
        part("symmetric under memcheck", 100, "gpu_ranks.py", *symmetric, absent=needs_gpu or no_tool, tool=memcheck)
        return found
    # On a fresh machine some 70 kernels are compiled first: Triton keeps them on the disk for the parts that follow.
    part("kernels and steps are right", 100, "gpu_check.py")
    part("buffers of over 2^31 elements", 20, "gpu_check.py", "--large", absent=needs_gpu)
    part("the same under compute-sanitizer", 30, "gpu_check.py", "--small", absent=needs_gpu or no_tool, tool=memcheck)
    part("steps beside torch", 200, "gpu_step.py")
    few = ("--limit-s", "65") if on_gpu else ("--sizes", "1", "--rounds", "3")
    part("kernels beside a copy", 75, "kernels.py", "--graphs", *few)
    part("two workers, every transport", 40, "gpu_ranks.py")
    part("growth, and workers killed", 95, "gpu_elastic.py")
    part("a large state", 40, "gpu_state.py")
    return found


def run(part: Part, device: str) -> Outcome:
    """Runs one part, and ends all of its processes when it is over or its time is."""
    if part.absent is not None:
        return Outcome(part.name, "absent", 0.0, part.absent)
    from report import row

    print(f"\n== {part.name} (at most {part.limit_s:.0f} s)", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as output:  # a process left behind could keep a pipe open
        process = subprocess.Popen(
            part.command,
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
    if status == "failed" and any("Device not supported" in line or "ModuleNotFoundError" in line for line in lines):
        status = "absent"  # compute-sanitizer does not know this GPU yet, or a package is not here
    said = [line for line in lines if "NCCL INFO" not in line]
    print("\n".join(said if status == "ok" else said[-KEPT_LINES:]), flush=True)
    note = said[-1][:160] if said else "no output"
    result = _result(part)
    rows = {} if status == "absent" else {f"{part.name}: failed": row(float(status != "ok"), 0.0, device)}
    rows |= _rows(result)
    if len(said) < len(lines):
        for way, most in (("P2P", None), ("NET", 0.0)):
            rows[f"NCCL's channels via {way}"] = row(float(sum(f"via {way}" in line for line in lines)), most, device)
    return Outcome(part.name, status, round(time.monotonic() - started, 1), note, result, rows)


def _rows(result: Any) -> dict[str, Any]:
    """Those of a part's record, and of the results in it."""
    if not isinstance(result, dict):
        return {}
    inner = result["results"].values() if isinstance(result.get("results"), dict) else ()
    return {name: row for each in (result, *inner) for name, row in each.get("rows", {}).items()}


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
