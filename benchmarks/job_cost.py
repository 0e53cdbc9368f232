"""What a whole elastic job costs beside DDP under torchrun.

    python benchmarks/job_cost.py --json benchmarks/results/job_cost.json

Two workers (gloo, one thread each) train as a job of `kfuse-run` with its supervisor and run directory, also with
reproducible sums, and by a loop with DDP and fused AdamW under torchrun: an MLP, elastic.py's network, and that one
with a batch of 768. The jobs run side by side, and in turns: each makes a block of steps while the others
wait. CPU time is that of all of a job's processes. What memory a process happened to get decides about page faults, so
each case starts several times, and the figures are those of the starts' medians.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
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
from elastic_systems import problem as convolutional
from report import median_interval, parser_of, told, warn_if_busy, write
from rich.progress import track
from torch import Tensor, nn

CASES = {"mlp": (64, 150), "conv": (64, 80), "conv, large batch": (768, 12)}  # samples a step, steps of a block
NAMES = ("torchrun", "kfuse", "reproducible")
LR, WARM = 1e-3, 2  # blocks before those that count
RECORDS_S = 0.5  # after a block: workers send the last records, and the supervisor writes them


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=6, help="blocks of each job (default 6)")
    parser.add_argument("--starts", type=int, default=6, help="of each case (default 6)")
    arguments = parser.parse_args()
    warn_if_busy()
    ratios: dict[str, dict[str, Any]] = {}
    for case in CASES:
        starts = [cost(case, arguments.rounds) for _ in track(range(arguments.starts), case)]
        found = {name: np.array([np.median(start[name], axis=0) for start in starts]) for name in NAMES}
        print(f"{case}: a step takes {1e3 * float(np.median(found['torchrun'][:, 0])):.1f} ms by DDP")
        for name in NAMES[1:]:
            pairs = found[name][:, :2] / found["torchrun"][:, :2]
            row = {"wall": median_interval(pairs[:, 0]), "cpu": median_interval(pairs[:, 1])}
            parent_us = 1e6 * float(np.median(found[name][:, 2]))
            ratios.setdefault(case, {})[name] = {**row, "parent_us": parent_us}
            print(f"  {name} / DDP under torchrun: wall time {told(row['wall'])}, CPU time {told(row['cpu'])}", end="")
            print(f"; supervisor {parent_us:.0f} us a step")
    write(arguments.json, ["torch"], ratios=ratios)


# -- jobs -------------------------------------------------------------------------------------------------------------


class Blocks:
    """A job that makes a block of steps whenever it is told to."""

    def __init__(self, name: str, case: str, folder: str) -> None:
        path = str(Path(folder, name))
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
            server.listen()
            server.settimeout(120)
            self._process = start(name, case, path)
            self._workers = [server.accept()[0].makefile("rwb") for _ in range(2)]
        self._parents = {json.loads(worker.readline()) for worker in self._workers}
        self._steps = CASES[case][1]

    def block(self) -> tuple[float, float, float]:
        """Seconds of a step, of CPU time of all processes, and of that of the workers' parent."""
        before = sum(map(cpu_s, self._parents))
        for worker in self._workers:
            worker.write(b"\n")
            worker.flush()
        found = [json.loads(worker.readline()) for worker in self._workers]
        time.sleep(RECORDS_S)
        parent = sum(map(cpu_s, self._parents)) - before
        wall = max(each["end"] for each in found) - min(each["began"] for each in found)
        return wall / self._steps, (sum(each["cpu"] for each in found) + parent) / self._steps, parent / self._steps

    def end(self) -> None:
        os.killpg(self._process.pid, signal.SIGTERM)  # a worker of kfuse waits: its parent's end is its own
        self._process.kill()
        for worker in self._workers:
            worker.close()
        self._process.wait()


def cost(case: str, rounds: int) -> dict[str, np.ndarray]:
    """Of each job, by block: what `Blocks.block` returns."""
    order, rows = random.Random(0), {name: list[tuple[float, float, float]]() for name in NAMES}
    with tempfile.TemporaryDirectory(prefix="kfuse-job-") as folder:
        jobs = {name: Blocks(name, case, folder) for name in NAMES}
        for _ in range(WARM + rounds):
            for name in order.sample(NAMES, len(NAMES)):
                rows[name].append(jobs[name].block())
        for job in jobs.values():
            job.end()
    return {name: np.array(each[WARM:]) for name, each in rows.items()}


def cpu_s(pid: int) -> float:
    """CPU time of a process's threads so far, in seconds, to the nanosecond. Linux."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def start(name: str, case: str, path: str) -> subprocess.Popen[bytes]:
    if name == "torchrun":
        command = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    else:
        command = ["kfuse.cli.kfuse_run", "--observe-progress=false", "--workers", "2", "--run-dir", f"{path}.run"]
    return subprocess.Popen(
        [sys.executable, "-m", *command, __file__, "worker", name, case, path],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
        stdout=open(f"{path}.out", "wb"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


# -- one worker -------------------------------------------------------------------------------------------------------


def problem(case: str) -> tuple[nn.Module, Tensor, Tensor]:
    batch, _ = CASES[case]
    if case != "mlp":
        model, x, y = convolutional()
        return model, x.repeat(batch // 64, 1, 1, 1), y.repeat(batch // 64)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    return model, torch.randn(28 * batch, 64), torch.randint(0, 10, (28 * batch,))


class Gate:
    """Before each block of steps the worker says how the one before was, and waits until it may go on."""

    def __init__(self, path: str, steps: int) -> None:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        self._lines, self._steps, self._made = connection.makefile("rwb"), steps, 0

    def step(self) -> None:
        if self._made % self._steps == 0:
            said: Any = os.getppid()
            if self._made:
                end, cpu = time.monotonic(), time.process_time()
                said = {"began": self._began, "end": end, "cpu": cpu - self._cpu}
            self._lines.write(f"{json.dumps(said)}\n".encode())
            self._lines.flush()
            if not self._lines.readline():
                os._exit(0)
            self._began, self._cpu = time.monotonic(), time.process_time()
        self._made += 1


def kfuse_worker(name: str, case: str, path: str) -> None:
    import kfuse as kf

    kf.init(comm_timeout_s=60, comm_reproducible=name == "reproducible")
    model, x, y = problem(case)
    opt, (batch, steps) = kf.FusedAdamW(model.parameters(), lr=LR), CASES[case]
    gate, endless = Gate(path, steps), {"epochs": None, "steps": 10**9}
    for step in kf.DataLoader(model, (x, y), opt, batch_size=batch, micro_batch=batch // 2, **endless):
        gate.step()
        for inputs, targets in step:
            F.cross_entropy(model(inputs), targets).backward()
        opt.step()
        opt.zero_grad()


def torchrun_worker(name: str, case: str, path: str) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model, x, y = problem(case)
    ddp, (batch, steps) = DistributedDataParallel(model), CASES[case]
    opt, gate, epoch = torch.optim.AdamW(model.parameters(), lr=LR, fused=True), Gate(path, steps), 0
    while True:
        order, epoch = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch)), epoch + 1
        for part in order.split(batch):
            gate.step()
            mine = part[rank::size]
            opt.zero_grad()
            F.cross_entropy(ddp(x[mine]), y[mine]).backward()
            opt.step()


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        torch.set_num_threads(1)
        worker: Callable[..., None] = torchrun_worker if sys.argv[2] == "torchrun" else kfuse_worker
        worker(*sys.argv[2:5])
    else:
        main()
