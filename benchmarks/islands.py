"""Two islands over one slow link: averages on two levels (comm.sync=pair:N,M) beside local SGD, and a cut of the link.

    python benchmarks/islands.py --json benchmarks/results/islands.json
    python benchmarks/islands.py --cut 60 --workers 4 --modes pair:1,8

Each host is a network namespace (tests/hosts.py) whose link to all others has a rate in both directions (tc's tbf); the
supervisor has none. Runs take turns, by seed. Every run of as many steps has the same batch, learning rates and
schedule, and for a seed the same initial model and order of samples. What counts is the held-out loss of the common
model after the last meeting, and the time from the first view to the end: meeting and evaluation are in it. The time to
a loss that local SGD ends with is that of the shortest run, of these numbers of steps, that ends with none above it.

--cut: the last host's link passes no packet for so many seconds in the middle of the run, and nobody is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from links import shaper
from report import parser_of, table, warn_if_busy, write

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from elastic_job import Job, run_job, until, words
from hosts import HostLauncher, let_pass, network

HOSTS = 2
TRAINING = words(
    "model=gpt data=text data.heldout=0.02 optimizer=adamw lr.base=0.001 lr.decay=cosine train.clip_norm=1.0",
    "train.epochs=null comm.timeout_s=300 elastic.heartbeat_timeout_s=200 train.save_model=false",
)


def run(mode: str, seed: int, steps: int, options: Any) -> dict[str, Any]:
    """The figures of one training. Raises RuntimeError where it fails or loses a worker."""
    given = [*TRAINING, f"comm.sync='{mode}'", f"seed={seed}", f"train.steps={steps}", f"batch.size={options.batch}"]
    given += [f"batch.min={options.batch}", f"batch.micro={options.micro}", f"lr.warmup_steps={steps // 10}"]
    given += [f"workers.{name}={options.workers}" for name in ("count", "max")]
    cut = dict[str, Any]()

    async def during(_: Any, job: Job) -> None:
        if not options.cut:
            return
        await until("a third of the run", lambda: len(job.metrics) > steps // 3)
        let_pass(first, HOSTS - 1, packets=False)
        cut["before"] = newest(job)
        await asyncio.sleep(options.cut)
        cut["here_during"] = newest(job)
        let_pass(first, HOSTS - 1, packets=True)
        told = asyncio.get_running_loop().time()
        await until(
            "the others' lines", lambda: all(step > cut["before"][each] + 5 for each, step in newest(job).items())
        )
        cut["all_after"], cut["lines_after_s"] = newest(job), asyncio.get_running_loop().time() - told

    with (
        tempfile.TemporaryDirectory() as folder,
        network(HOSTS) as (first, hosts),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        for index, host in enumerate(hosts):
            for side, interface in ((host, "eth0"), (first, f"port{index}")):
                side.run(f"tc qdisc add dev {interface} root {' '.join(shaper(options.rate))}")
        job = run_job(Path(folder, "run"), given, during, HostLauncher(first.address, hosts, Path(folder)))
        if job.error is not None or len(job.views) > 1:
            raise RuntimeError(f"{mode}, seed {seed}: {job.told()}")
        summary, used = job.summary, Counter(index for entry in job.ledger for index in entry["indices"])
    figures = {
        name: summary.get(name) for name in ("heldout_loss", "wall_s", "near_averages", "far_averages", "failed_pulls")
    }
    figures |= {"mode": mode, "seed": seed, "steps": steps, "samples": len(used), "twice": used.total() - len(used)}
    return figures | ({"lost": steps * options.batch - len(used), **cut} if options.cut else {})


def newest(job: Job) -> dict[int, int]:
    """The newest step of each worker that the supervisor has a line of."""
    return {entry["worker"]: entry["step"] for entry in job.ledger}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--modes", nargs="+", default=["local:8", "local:32", "pair:1,8"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, nargs="+", default=[320], help="of pair; local SGD has the first number")
    parser.add_argument("--workers", type=int, default=HOSTS, help="by turns on each host")
    parser.add_argument("--batch", type=int, default=16, help="samples of a step, over all workers")
    parser.add_argument("--micro", type=int, default=4)
    parser.add_argument("--rate", default="20mbit")
    parser.add_argument("--cut", type=float, default=0.0, help="seconds")
    options = parser.parse_args()
    warn_if_busy()
    runs: list[dict[str, Any]] = []
    for seed in range(options.seeds):
        for mode in options.modes:
            for steps in options.steps if mode.startswith("pair") else options.steps[:1]:
                runs.append(run(mode, seed, steps, options))
                print(runs[-1], flush=True)
                write(options.json, ["torch", "numpy"], rate=options.rate, batch=options.batch, runs=runs)
    rows = dict[tuple[str, int], list[Mapping[str, Any]]]()
    for each in runs:
        rows.setdefault((each["mode"], each["steps"]), []).append(each)
    cells = []
    for (mode, steps), found in rows.items():
        losses, times = [[each[name] for each in found] for name in ("heldout_loss", "wall_s")]
        said = (f"{median(losses):.4f} ({min(losses):.4f} to {max(losses):.4f})", f"{median(times):.1f}")
        cells.append((mode, str(steps), *said, str(sum(each["far_averages"] or 0 for each in found) // len(found))))
    table(
        f"{options.workers} workers on {HOSTS} hosts, {options.rate}",
        ("comm.sync", "steps", "held-out loss", "s", "far"),
        cells,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
