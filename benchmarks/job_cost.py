"""What a whole elastic job costs beside DDP under torchrun, and how long workers stand still as others come and go.

    python benchmarks/job_cost.py --json benchmarks/results/job_cost.json

cost: two workers (gloo, one thread each) train an MLP on random data, about 3 ms a step, as a job of `kfuse-run` with
    its supervisor and run directory, and by a loop with DDP and fused AdamW under torchrun. The jobs take turns. CPU
    time of all processes, in which starts do not count: each process tells its own at two steps.
gaps: the same job grows from two workers to three and shrinks again. The time between two steps of a worker that
    stays, the longest of them, less the median step of the run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from report import median_interval, parser_of, told, warn_if_busy, write
from rich.progress import track
from torch import Tensor, nn

WARM, STEPS = 300, 1500  # steps before the first look at the CPU time, and until the last
BATCH, LR = 64, 1e-3
GROWTH, SHRINK, END = 900, 1800, 2400  # steps of the job whose workers change


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    arguments = parser.parse_args()
    warn_if_busy()
    costs = []
    for number in track(range(arguments.rounds), "jobs in turns"):
        names = ("kfuse", "torchrun") if number % 2 else ("torchrun", "kfuse")
        costs.append({name: cost(name) for name in names})
    ratio = median_interval(np.array([each["kfuse"]["cpu_ms"] / each["torchrun"]["cpu_ms"] for each in costs]))
    wall = median_interval(np.array([each["kfuse"]["step_ms"] / each["torchrun"]["step_ms"] for each in costs]))
    parents = {
        name: 1e3 * float(np.median([each[name]["parent_ms"] for each in costs])) for name in ("kfuse", "torchrun")
    }
    gaps = [changes() for _ in track(range(max(3, arguments.rounds // 2)), "growth and shrink")]
    gap_s = {kind: float(np.median([each[kind] for each in gaps])) for kind in ("growth", "shrink")}
    print(f"CPU time of all processes, kfuse / DDP under torchrun: {told(ratio)}; wall time of a step: {told(wall)}")
    print(f"supervisor {parents['kfuse']:.0f} us a step, torchrun's agent {parents['torchrun']:.0f}")
    print(f"workers that stay stand still: growth {gap_s['growth']:.3f} s, shrink {gap_s['shrink']:.3f} s")
    write(arguments.json, ["torch"], cpu=ratio, wall=wall, parent_us=parents, gap_s=gap_s, costs=costs, gaps=gaps)


# -- jobs -------------------------------------------------------------------------------------------------------------


def cost(name: str) -> dict[str, float]:
    """CPU milliseconds a step, of all processes and of the workers' parent; milliseconds of a step."""
    with tempfile.TemporaryDirectory(prefix="kfuse-job-") as folder:
        start(name, "cost", folder)
        looks = [json.loads(path.read_text()) for path in Path(folder).glob("look-*")]
    first, last = ([look[k] for look in looks] for k in range(2))
    workers = sum(b["own"] - a["own"] for a, b in zip(first, last, strict=True))
    parent = max(b["parent"] - a["parent"] for a, b in zip(first, last, strict=True))
    seconds = max(b["time"] - a["time"] for a, b in zip(first, last, strict=True))
    return {"cpu_ms": _each(workers + parent), "parent_ms": _each(parent), "step_ms": _each(seconds)}


def _each(seconds: float) -> float:
    return 1e3 * seconds / (STEPS - WARM)


def changes() -> dict[str, float]:
    """Seconds that the workers that stay stand still at a growth and at a shrink, beyond a median step."""
    with tempfile.TemporaryDirectory(prefix="kfuse-job-") as folder:
        start("kfuse", "changes", folder, "--max-workers", "3")
        logs = [np.loadtxt(path) for path in Path(folder).glob("steps-*")]
    longest = {"growth": 0.0, "shrink": 0.0}
    for log in logs:
        times, sizes = log[:, 0], log[:, 1]
        gaps = np.diff(times)
        for at in np.flatnonzero(np.diff(sizes)):
            kind = "growth" if sizes[at + 1] > sizes[at] else "shrink"
            longest[kind] = max(longest[kind], float(gaps[at] - np.median(gaps)))
    return longest


def start(name: str, task: str, folder: str, *options: str) -> None:
    """Runs a job to its end. Raises RuntimeError, with what it said, where it fails."""
    if name == "kfuse":
        command = ["kfuse.cli.kfuse_run", "--observe-progress=false", "--workers", "2", "--run-dir", f"{folder}/run"]
    else:
        command = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, "-m", *command, *options, __file__, "worker", name, task, folder]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"{name}: exit status {ended.returncode}\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}")


# -- one worker -------------------------------------------------------------------------------------------------------


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    return model, torch.randn(1792, 64), torch.randint(0, 10, (1792,))


class Looks:
    """At the CPU time so far of this process and of its parent, written as the last step is made."""

    def __init__(self, folder: str) -> None:
        self._path, self._looks = Path(folder) / f"look-{os.getpid()}", list[dict[str, float]]()

    def after(self, step: int) -> None:
        if step in (WARM, STEPS):
            fields = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
            parent = sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
            self._looks.append({"time": time.perf_counter(), "own": time.process_time(), "parent": parent})
        if step == STEPS:
            self._path.write_text(json.dumps(self._looks))


def kfuse_worker(task: str, folder: str) -> None:
    import kfuse as kf

    kf.init(comm_timeout_s=60)
    model, x, y = problem()
    opt = kf.FusedAdamW(model.parameters(), lr=LR)
    looks, log = Looks(folder), list[str]()

    class Told(kf.BasePolicy):
        def after_step(self) -> None:
            step = opt.engine.step
            if task == "cost":
                looks.after(step)
                return
            log.append(f"{time.monotonic()} {kf.size()}\n")
            if step in (GROWTH, SHRINK):
                kf.resize(3 if step == GROWTH else 2)
            if step == END or (step > SHRINK and kf.rank() == kf.size() - 1):
                (Path(folder) / f"steps-{os.getpid()}").write_text("".join(log))

    steps = STEPS if task == "cost" else END
    kf.fit(model, (x, y), opt, Told(), epochs=None, steps=steps, batch_size=BATCH, micro_batch=32)


def torchrun_worker(task: str, folder: str) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model, x, y = problem()
    ddp = DistributedDataParallel(model)
    opt = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    looks, step = Looks(folder), 0
    while step < STEPS:
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(step))
        for part in order.split(BATCH)[: STEPS - step]:
            mine = part[rank::size]
            F.cross_entropy(ddp(x[mine]), y[mine]).backward()
            opt.step()
            opt.zero_grad()
            step += 1
            looks.after(step)
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        torch.set_num_threads(1)
        workers: dict[str, Callable[[str, str], Any]] = {"kfuse": kfuse_worker, "torchrun": torchrun_worker}
        workers[sys.argv[2]](*sys.argv[3:5])
    else:
        main()
