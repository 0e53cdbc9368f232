"""One job that is struck a few hundred times, ends with the bits of an undisturbed run, and leaks nothing on the way.

    python benchmarks/soak.py --events 200 --seed 0 --json benchmarks/results/soak.json

Events, seeded, at random moments, over 1 to 4 workers: SIGKILL, an exception at whatever line the worker is, os._exit,
SIGSTOP; growth, shrinkage; a decision on the transport. Then the same number of steps on one worker, undisturbed:
parameters, every step's metrics and the ledger must be the same, and no worker but those struck may have been lost.

After each event the supervisor's and the oldest worker's file descriptors, threads and memory are read, and the store's
keys. From event 20 (a tenth of the way, where there are fewer than 200) the oldest worker is spared: one process is
watched to the end. Flat means: the least-squares trend over the events from there, with the number of processes and
of members as further regressors (both open connections), rises over the whole stretch by no more than 4 descriptors,
threads or keys, or 5 % of the mean memory (at least 8 MiB).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from machine import parser_of, write
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests")]

from elastic_job import Job, assert_exact, assert_same_steps, compose, override, words  # noqa: E402
from soak_job import MOST, START, Recorder, Sample, Soak  # noqa: E402
from warm import WarmLauncher  # noqa: E402

from kfuse.comm.settings import CONTRIBUTIONS  # noqa: E402
from kfuse.elastic.supervisor import Elasticity, Supervisor  # noqa: E402
from kfuse.settings.tree import flat  # noqa: E402

TRAINING = words(
    "comm=reproducible comm.bucket_mb=0.02 lr.base=0.003 lr.scaling=adascale train.clip_norm=0.5 model=mlp",
    "model.hidden=[64] model.dropout=0.1 data._target_=soak_worker.blobs policy._target_=soak_worker.Obedient",
    f"batch.size=32 batch.micro=4 batch.max=64 train.eval_every=50 workers.max={MOST} observe.ledger=true",
    "workers.threads=1 elastic.max_failures=12 elastic.heartbeat_timeout_s=5 train.epochs=1000000",
)
COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
PACKAGES = ("torch", "numpy")
SLACK = {"fds": 4.0, "threads": 4.0, "keys": 4.0}


async def run(directory: Path, overrides: list[str], soak: dict[str, Any] | None = None) -> tuple[Recorder, Any]:
    """One job, with a soak of these settings, or without. Raises JobFailed, AssertionError."""
    config = compose([*TRAINING, *overrides])
    recorder = Recorder(directory)
    elasticity = Elasticity.of(flat(config))
    launcher = WarmLauncher(directory.with_suffix(".log"))
    supervisor = Supervisor(launcher, {**config, "run_dir": str(directory)}, recorder, elasticity)
    job = asyncio.create_task(supervisor.run())
    if soak is None:
        await job
        return recorder, None
    events = Soak(supervisor, recorder, **soak)
    striking = asyncio.create_task(events.run())
    try:
        await asyncio.wait([job, striking], return_when=asyncio.FIRST_COMPLETED)
        if striking.done():
            striking.result()
        await job
    finally:
        for task in (striking, job):
            task.cancel()
        await asyncio.gather(striking, job, return_exceptions=True)
        recorder.directory.close()
    return recorder, events


def trend(samples: list[Sample], values: list[float]) -> dict[str, float]:
    """mean: of the values. growth: of their trend, over all these events."""
    at = np.array([sample.event for sample in samples], dtype=float)
    others = [[sample.processes, sample.members] for sample in samples]
    design = np.column_stack([np.ones_like(at), at, np.array(others, dtype=float)])
    slope = np.linalg.lstsq(design, np.array(values), rcond=None)[0][1]
    return {"mean": float(np.mean(values)), "growth": float(slope * (at[-1] - at[0])), "last": values[-1]}


def verdicts(samples: list[Sample]) -> dict[str, dict[str, Any]]:
    """For each resource its trend, what it may be, and whether it is flat."""
    series: dict[str, list[float]] = {"store keys": [float(sample.keys) for sample in samples]}
    for who in ("supervisor", "witness"):
        for name in ("fds", "threads", "rss_mib"):
            series[f"{who} {name}"] = [float(getattr(sample, who)[name]) for sample in samples]
    result = {}
    for name, values in series.items():
        seen = trend(samples, values)
        allowed = SLACK.get(name.split()[-1]) or max(8.0, 0.05 * seen["mean"])
        result[name] = {**seen, "allowed": allowed, "flat": seen["growth"] <= allowed}
    return result


def soak(args: argparse.Namespace, console: Console) -> int:
    spare_from = min(20, args.events // 10)
    with tempfile.TemporaryDirectory() as name, Progress(*COLUMNS, console=console) as bar:
        directory = Path(name)
        requests = directory / "requests.json"
        task = bar.add_task("events", total=args.events)
        settings = {
            "requests": requests,
            "events": args.events,
            "spare_from": spare_from,
            "topologies": [*CONTRIBUTIONS],
            "chance": random.Random(args.seed),
            "done": lambda kind: bar.update(task, advance=1, description=f"events ({kind})"),
        }
        requests.write_text(json.dumps({"workers": START, "topology": None, "asked": 0}))
        policy = [override("+policy.requests", str(requests)), override("+policy.pace_s", args.pace)]
        started = time.perf_counter()
        recorder, events = asyncio.run(run(directory / "soak", [*policy, f"workers.count={START}"], settings))
        wall_s = time.perf_counter() - started
        job = Job(directory / "soak")
        steps = job.summary["steps"]
        bar.add_task(f"{steps} steps on one worker, undisturbed", total=None)
        asyncio.run(run(directory / "alone", [f"train.steps={steps}", "workers.count=1"]))
        alone = Job(directory / "alone")
        assert_exact(job)
        assert_same_steps(job, alone)
        sha256 = job.summary["params_sha256"]
        errors = (directory / "soak.log").read_text().split("Traceback (most recent call last):")[1:]
    watched = [sample for sample in events.samples if sample.event >= spare_from]
    assert len({sample.witness_pid for sample in watched}) == 1, "the witness changed"
    rows = verdicts(watched)
    flat = all(row["flat"] for row in rows.values())
    unexpected = [how for pid, how in recorder.lost.items() if pid not in events.struck]
    events_ = f"{args.events} events in {wall_s:.0f} s, {steps} steps"
    report(console, rows, f"{events_}: same bits as undisturbed, exact ledger")
    for how in unexpected:
        console.print(f"a worker that nothing had struck {how}")
    if unexpected:
        for error in errors:
            if "struck by the soak" not in error:
                console.print(error, markup=False, highlight=False)
    write(
        args.json,
        PACKAGES,
        events=Counter(sample.kind for sample in events.samples),
        wall_s=wall_s,
        steps=steps,
        params_sha256=sha256,
        watched_from_event=spare_from,
        flat=flat,
        unexpected_losses=unexpected,
        resources=rows,
        samples=[asdict(sample) for sample in events.samples],
    )
    return 0 if flat and not unexpected else 1


def report(console: Console, rows: dict[str, dict[str, Any]], title: str) -> None:
    table = Table(title=title)
    for heading in ("held", "mean", "last", "trend over the run", "allowed", "verdict"):
        table.add_column(heading, justify="left" if heading in ("held", "verdict") else "right")
    for name, row in rows.items():
        figures = (f"{row['mean']:.1f}", f"{row['last']:.1f}", f"{row['growth']:+.1f}", f"{row['allowed']:.1f}")
        table.add_row(name, *figures, "flat" if row["flat"] else "RISES")
    console.print(table)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--events", type=int, default=200, help="at least 20 (default 200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pace", type=float, default=0.03, help="seconds that a step takes at least (default 0.03)")
    args = parser.parse_args()
    if args.events < 20:
        parser.error(f"--events {args.events}: allowed is 20 or more")
    path = os.pathsep.join([*sys.path[:2], *filter(None, [os.environ.get("PYTHONPATH")])])
    with patch.dict(os.environ, {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}):
        return soak(args, Console())


if __name__ == "__main__":
    sys.exit(main())
