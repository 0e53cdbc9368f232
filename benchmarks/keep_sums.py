"""What elastic.keep_sums saves when a worker is lost, and what it costs while none is.

    python benchmarks/keep_sums.py --rounds 7 --json benchmarks/results/keep_sums.json

Three workers on this machine (gloo, one thread each) train an MLP.

1) Steps that nobody disturbs. Two optimizers in the same processes, one of them with the option, take turns: a few
   steps each, round after round. A step has one micro-batch a worker: with more of them the same cost is a smaller
   part. Bytes are those of the buckets' flat buffers after these steps, over the number of parameters.
2) Jobs, in which rank 1 is killed in the reduction of a step. With the option and without it take turns, one job of
   each in a round, with 8 and with 32 micro-batches a step. Seconds are those from the kill to that step's end on
   rank 0: to notice the loss, to form a new group, and to make the step again. No new worker is started.

Ratios are of a round's times.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from machine import command, machine, versions, warn_if_busy
from rich.console import Console
from rich.table import Table
from step_report import median_interval
from turns import network, seconds_in_turns

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests")]

from distributed import run_workers  # noqa: E402
from elastic_job import assert_exact, override, read_lines, run_job, words  # noqa: E402
from keep_policy import begun  # noqa: E402

import kfuse as kf  # noqa: E402

MICRO_BATCHES, MICRO_BATCH, STEP, HIDDEN = (8, 32), 32, 20, 1500
SCHEDULES: dict[str, dict[str, Any]] = {
    "all_to_all (reproducible)": {"reproducible": True},
    "allreduce": {"schedule": "allreduce"},
}
WITH = ("without", "with")
TRAINING = words(
    f"model=mlp data=digits model.hidden=[{HIDDEN},{HIDDEN}] batch.micro={MICRO_BATCH} batch.max=100000 train.steps=26",
    "train.epochs=1000 train.eval_every=1000 train.save_model=false comm=reproducible comm.bucket_mb=4",
    "workers.count=3 workers.max=3 workers.min=1 workers.balance=false elastic.replace=false",
    "policy._target_=keep_policy.Counting",
)


def steps_in_turns(rounds: int, steps: int, options: dict[str, Any]) -> tuple[list[list[float]], list[float]]:
    """On each of several workers: by round, seconds a step without the option and with it; bytes a parameter."""
    session = kf.init(kf.CommOptions(bucket_mb=4.0, **options))
    pairs = []
    for keep in (False, True):
        session.comm = replace(session.comm, keep_sums=keep)
        model = network(HIDDEN)
        pairs.append((model, kf.FusedAdamW(model.parameters(), lr=1e-3)))
    found = seconds_in_turns(pairs, MICRO_BATCH, rounds, steps)
    return found, [bytes_per_parameter(opt) for _, opt in pairs]


def bytes_per_parameter(opt: Any) -> float:
    """Of the buckets' flat buffers."""
    buckets = opt.engine.buckets
    held = {flat.data_ptr(): flat.nbytes for bucket in buckets for flat in (*bucket.slots, bucket.sum)}
    return sum(held.values()) / sum(p.numel() for p in opt.engine.params)


def run(directory: Path, micro_batches: int, keep: bool) -> dict[str, float]:
    """One job in which a worker is lost."""
    events = [{"step": STEP, "moment": "mid_reduction", "rank": 1, "how": "kill", "workers": 3}]
    marks = directory / "events"
    given = [override("+policy.directory", str(marks)), override("+policy.events", events), "+policy.adaptive=false"]
    sizes = [f"batch.size={micro_batches * MICRO_BATCH}", f"elastic.keep_sums={str(keep).lower()}"]
    job = run_job(directory / "run", [*TRAINING, *sizes, *given])
    assert job.error is None, job.told()
    assert_exact(job)
    struck = (marks / "event-0").stat().st_mtime
    (ended,) = (line["time"] for line in read_lines(marks / "ends") if line["step"] == STEP)
    return {"seconds": ended - struck, "run_again": float(begun(marks)[STEP] - micro_batches)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="of jobs (default 7)")
    parser.add_argument("--turns", type=int, default=60, help="rounds of steps (default 60)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    warn_if_busy()
    console = Console()
    path = os.pathsep.join([*sys.path[:2], *filter(None, [os.environ.get("PYTHONPATH")])])
    found: dict[int, dict[bool, list[dict[str, float]]]] = {m: {False: [], True: []} for m in MICRO_BATCHES}
    with patch.dict(os.environ, {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}):
        steps = {name: undisturbed(console, name, args.turns) for name in SCHEDULES}
        for number in range(args.rounds):
            for count in MICRO_BATCHES:
                for keep in (False, True) if number % 2 else (True, False):
                    told = io.StringIO()  # for a failed test
                    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(told):
                        found[count][keep].append(run(Path(name), count, keep))
    rows = report(console, found)
    if args.json is not None:
        origin = {"command": command(), "machine": machine(), "versions": versions(["torch"])}
        rounds = {str(count): {str(keep): each for keep, each in runs.items()} for count, runs in found.items()}
        args.json.write_text(json.dumps({**origin, "steps": steps, "rows": rows, "rounds": rounds}, indent=1) + "\n")
    return 0


def undisturbed(console: Console, name: str, rounds: int) -> dict[str, Any]:
    """What the option costs steps over the schedule of this name. Prints it."""
    turns, sizes = run_workers(3, steps_in_turns, rounds, 3, SCHEDULES[name])[0]
    seconds = np.array(turns)
    ratio = median_interval(seconds[:, 1] / seconds[:, 0])
    console.print(
        f"{name}: a step with the option: {ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f}) of one "
        f"without, which takes {1e3 * np.median(seconds[:, 0]):.1f} ms; {sizes[0]:.1f} and {sizes[1]:.1f} bytes a "
        f"parameter; {rounds} rounds in turns"
    )
    return {"ratio": ratio, "bytes_per_parameter": dict(zip(WITH, sizes, strict=True)), "turns_s": turns}


def report(console: Console, found: dict[int, dict[bool, list[dict[str, float]]]]) -> dict[str, Any]:
    """Prints what is saved after a loss. Returns it by the number of micro-batches."""
    rounds = len(found[MICRO_BATCHES[0]][True])
    table = Table(title=f"A worker of 3 is lost in the reduction of a step, {rounds} rounds")
    for heading in ("micro-batches", "kill to end, s", "kept: s", "ratio (95 %)", "run again", "kept: run again"):
        table.add_column(heading, justify="right")
    rows: dict[str, Any] = {}
    for count, runs in found.items():
        pairs = zip(runs[True], runs[False], strict=True)
        ratio = median_interval(np.array([kept["seconds"] / plain["seconds"] for kept, plain in pairs]))
        middle: dict[str, dict[str, float]] = {
            name: {key: float(np.median([each[key] for each in runs[keep]])) for key in runs[keep][0]}
            for name, keep in zip(WITH, (False, True), strict=True)
        }
        plain, kept = (middle[name] for name in WITH)
        rows[str(count)] = {"seconds_ratio": ratio, **middle}
        table.add_row(
            *(str(count), f"{plain['seconds']:.2f}", f"{kept['seconds']:.2f}"),
            f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})",
            *(f"{plain['run_again']:.0f}", f"{kept['run_again']:.0f}"),
        )
    console.print(table)
    return rows


if __name__ == "__main__":
    sys.exit(main())
