"""How long training stands still: from a worker's SIGKILL to the next completed step, and at planned growth.

    python benchmarks/elastic.py --json benchmarks/results/elastic.json

One job (digits, gloo, reproducible) on this machine; workers of random rank are killed one after another, each after
the replacement of the one before has joined, so that every growth is measured too. The job must end with the bits of
an undisturbed run on one worker. Times are taken in the supervisor's process: a kill counts until the first step that
was not complete before it is reported.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import OmegaConf
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kfuse.config import validate
from kfuse.elastic.launchers import LocalLauncher
from kfuse.elastic.supervisor import Elasticity, Supervisor

_STEADY = 20  # steps between a view and the next kill


class Recorder:
    """The supervisor's sink: remembers views, and when each step was reported."""

    def __init__(self) -> None:
        self.step, self.step_at, self.steady_from = -1, 0.0, 0
        self.gaps: list[float] = []
        self.views: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.killed: tuple[float, int] | None = None
        self.stepped = asyncio.Event()

    def record(self, kind: str, data: dict[str, Any]) -> None:
        now = time.perf_counter()
        if kind == "metrics" and data["step"] > self.step:
            self.step, self.step_at = data["step"], now
            # Statistics are reported a step late: step k's line says that step k + 1 is complete.
            if self.killed is not None and data["step"] > self.killed[1] + 1:
                self.gaps.append(now - self.killed[0])
                self.killed = None
            self.stepped.set()
        elif kind == "event" and data["kind"] == "view":
            self.views.append(data)
            self.steady_from = self.step + _STEADY
        elif kind == "summary":
            self.summary = data

    def line(self, text: str) -> None:
        """Workers print nothing in a normal run; tracebacks end up in the error."""


def job(overrides: list[str]) -> dict[str, Any]:
    with hydra.initialize_config_module("kfuse.configs", version_base="1.3"):
        cfg = hydra.compose("config", overrides)
    validate(cfg)
    values: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    return {**values, "run_dir": "/nonexistent"}  # no checkpoints are written


async def kill_one_after_another(recorder: Recorder, workers: int, kills: int, progress: Any) -> None:
    """Kills a worker of the view in force, whenever that view is complete and has been steady for a while."""
    chance = random.Random(0)
    for _ in range(kills):
        while (
            recorder.killed is not None
            or not recorder.views
            or len(recorder.views[-1]["workers"]) < workers
            or recorder.step < recorder.steady_from
        ):
            recorder.stepped.clear()
            await recorder.stepped.wait()
        victim = chance.choice(recorder.views[-1]["workers"])
        recorder.steady_from = sys.maxsize  # until the next view
        recorder.killed = (time.perf_counter(), recorder.step)
        os.kill(victim["pid"], signal.SIGKILL)
        progress()


async def run(overrides: list[str], workers: int, kills: int, progress: Any) -> Recorder:
    recorder = Recorder()
    elasticity = Elasticity(workers, 1, workers, max_failures=5)
    supervisor = Supervisor(LocalLauncher(), job(overrides), recorder, elasticity)
    killer = asyncio.create_task(kill_one_after_another(recorder, workers, kills, progress))
    try:
        ended = asyncio.create_task(supervisor.run())
        await asyncio.wait([ended, killer], return_when=asyncio.FIRST_COMPLETED)
        await ended
    finally:
        killer.cancel()
    return recorder


def percentiles(values: list[float]) -> dict[str, float | int | None]:
    ordered = sorted(values)
    if not ordered:
        return {"n": 0, "median": None, "p95": None, "max": None}
    p95 = ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))]
    return {"n": len(ordered), "median": statistics.median(ordered), "p95": p95, "max": ordered[-1]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=1500, help="long enough for all kills and replacements")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.workers < 2 or args.kills < 1:
        parser.error("--workers must be at least 2 and --kills at least 1")
    overrides = [
        f"train.epochs={args.epochs}",
        "train.eval_every=1000000",
        "policy=none",
        "batch.size=64",
        "comm.reproducible=true",
        f"workers.count={args.workers}",
        f"workers.max={args.workers}",
    ]
    with Progress(transient=True) as bar:
        task = bar.add_task("kills", total=args.kills)
        disturbed = asyncio.run(run(overrides, args.workers, args.kills, lambda: bar.advance(task)))
        bar.add_task("an undisturbed run on one worker", total=None)
        alone = [o for o in overrides if not o.startswith("workers.count")] + ["workers.count=1"]
        undisturbed = asyncio.run(run(alone, 1, 0, lambda: None))
    equal = disturbed.summary["params_sha256"] == undisturbed.summary["params_sha256"]
    growth = [view for view in disturbed.views if view["reason"] == "grow"]
    figures = {
        "kill to next completed step, s": percentiles(disturbed.gaps),
        "pause at planned growth, s": percentiles([view["pause_s"] for view in growth]),
        "  of which forming the group": percentiles([view["regroup_s"] for view in growth]),
        "  of which the state's transfer": percentiles([view["transfer_s"] for view in growth]),
    }
    table = Table(title=f"{args.workers} workers, {len(disturbed.gaps)} kills; bitwise equal to one worker: {equal}")
    for heading in ("", "n", "median", "p95", "max"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, row in figures.items():
        table.add_row(name, *(str(v) if isinstance(v, int) else "-" if v is None else f"{v:.3f}" for v in row.values()))
    Console().print(table)
    if args.json:
        machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        machine |= {"load_average": os.getloadavg()[0], "torch": torch.__version__, "python": platform.python_version()}
        result = {"command": " ".join(sys.argv), "machine": machine, "bitwise_equal": equal, "figures": figures}
        args.json.write_text(json.dumps({**result, "gaps_s": disturbed.gaps}, indent=2) + "\n")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
