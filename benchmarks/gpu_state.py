"""A large state: how long training stands still as a worker joins, and as a checkpoint is taken.

    python benchmarks/gpu_state.py --device cuda --json state.json
    python benchmarks/gpu_state.py --device cpu --parameters 2e6

The model is `--parameters` fp32 numbers (10^9, on one GPU 2.5 * 10^8, or as many as fit) whose gradient costs little,
trained with AdamW: 12 bytes of state a parameter. A job of one worker grows to two: the supervisor's events have the
seconds for forming the group and for sending the state. Then one worker alone writes two checkpoints: what a step with
one takes longer than the median step is the stall. The file is written in the background.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu_workers import PlacedLauncher, last_line, scratch, start
from report import parser_of, write
from torch import nn
from workers import leave, messages_of, set_torchrun_variables

import kfuse as kf

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from elastic_job import run_script
from limits import limits

WANTED, ON_ONE_GPU, ON_CPU = 1e9, 2.5e8, 5e6
"""Parameters. Where two workers share a GPU their messages go through sockets, at about 1 GB/s."""
TENSOR = 2**24
"""Elements of a parameter tensor, at most."""
TRAINING_BYTES, TRANSFER_BYTES, STATE_BYTES = 20, 12, 12
"""A parameter: parameters, gradients, moments and what backward needs meanwhile; what a transfer may copy; a state."""
GROW_AT, STEPS, MOST_STEPS = 3, 4, 400
CHECKPOINT_EVERY, CHECKPOINT_STEPS, MOST_CHECKPOINTED = 4, 12, 1e8
LIMIT_S = 100.0
"""What the checkpointing process may take: gpu.sh ends the whole part on a GPU before that."""
WRITE_S = 5.0
"""How long the first checkpoint is waited for before the second is due: there is one write at a time."""


def main() -> int:
    """Runs both measurements. Exit status 1 where one failed."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--parameters", type=float, help="instead of 1e9, or what fits")
    parser.add_argument("--work", nargs=2, metavar=("PARAMETERS", "LOG"), help="what the job's workers start with")
    options = parser.parse_args()
    if options.work:
        work(options.device, int(options.work[0]), Path(options.work[1]))
        return 0
    count = int(options.parameters or _fitting(options.device))
    record: dict[str, Any] = {}
    for name, measure in (("growth", _growth), ("checkpoint", _checkpoint)):
        try:
            record[name] = measure(options.device, count)
        except Exception as error:  # of a worker, or a time that is over
            print(error)
            record[name] = {"failed": last_line(error)}
        write(options.json, ("torch",), device=options.device, **record)  # kept if the next measurement is cut off
    print("; ".join(_in_words(name, found) for name, found in record.items()))
    return int(any("failed" in found for found in record.values()))


def _fitting(device: str) -> float:
    """Parameters that two workers can train here."""
    if device == "cpu":
        return ON_CPU
    workers = 1 if torch.cuda.device_count() > 1 else 2  # on one GPU
    free = torch.cuda.mem_get_info(0)[0]
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    most = min(free / (TRAINING_BYTES + TRANSFER_BYTES) / workers, host / (4 * STATE_BYTES))
    return min(WANTED if workers == 1 else ON_ONE_GPU, 0.8 * most)


def _in_words(name: str, found: dict[str, Any]) -> str:
    if "failed" in found:
        return f"{name}: failed"
    size = f"{found['parameters'] / 1e6:.0f} M parameters"
    if name == "growth":
        return f"{size}: regroup {found['regroup_s']:.2f} s, transfer {found['transfer_s']:.2f} s"
    stalls = ", ".join("-" if stall is None else f"{stall:.3f}" for stall in found["stalls_s"])
    return f"checkpoint of {size}: stalls of {stalls} s"


class Numbers(nn.Module):
    """`count` parameters, of which every one has a gradient."""

    def __init__(self, count: int, device: torch.device) -> None:
        super().__init__()
        sizes = [TENSOR] * (count // TENSOR) + [count % TENSOR] * (count % TENSOR > 0)
        self.all = nn.ParameterList(torch.full((size,), 0.5, device=device) for size in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, 1] to a number. Half the sum of squares times 1e-3: the gradient is the parameter times 1e-3."""
        return x.mean() * 5e-4 * torch.stack([p.square().sum() for p in self.all]).sum()


def _steps(model: Numbers, device: torch.device, micro_batches: int, **more: Any) -> Iterator[float]:
    """Trains; yields the time at the end of each step, boundary included, once the device has done it."""
    opt = kf.FusedAdamW(model.parameters(), lr=1e-4)
    ones = torch.ones(MOST_STEPS * micro_batches, 1)
    for step in kf.DataLoader(model, (ones, ones), opt, batch_size=micro_batches, micro_batch=1, epochs=1, **more):
        for x, _ in step:
            model(x.to(device)).backward()  # type: ignore[no-untyped-call]
        opt.step()
        opt.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        yield time.perf_counter()


# -- a worker joins --------------------------------------------------------------------------------------------------


def _growth(device: str, count: int) -> dict[str, Any]:
    with scratch() as folder:
        log = Path(folder, "log")
        worker = [sys.executable, __file__, "--device", device, "--work", str(count), str(log)]
        with contextlib.redirect_stdout(io.StringIO()) as said:  # it tells all that it has seen
            job = run_script(Path(folder, "run"), limits(1, 1, 2, script=True), launcher=PlacedLauncher(device, worker))
        if job.error is not None:
            raise RuntimeError(f"{said.getvalue()}\n{job.error}")
        workers = [json.loads(line) for line in log.read_text().splitlines()]
        grown = [view for view in job.views if len(view["workers"]) == 2]
    if not grown:
        raise RuntimeError(f"no second worker came within {MOST_STEPS} steps")
    event = grown[0]
    parts = {name: round(event[name], 4) for name in ("pause_s", "regroup_s", "transfer_s")}
    return {"parameters": count, "state_gb": STATE_BYTES * count / 1e9, **parts, "workers": workers}


def work(name: str, count: int, log: Path) -> None:
    """A worker's training script. It appends to `log` a line with its median step and its peak memory."""
    number = int(os.environ["KFUSE_WORKER"])
    device = start(name, number, comm_schedule="allreduce", comm_timeout_s=30).group.device
    model = Numbers(count, device)
    ends: list[float] = []
    together = 0
    for end in _steps(model, device, 2):
        ends.append(end)
        together += kf.size() == 2
        if together >= STEPS:
            break
        if len(ends) == GROW_AT:
            kf.resize(2)
        if len(ends) >= GROW_AT and kf.size() == 1:
            time.sleep(0.05)  # leaves the new worker time to start before the run is over
    gaps = [after - before for before, after in itertools.pairwise(ends)]
    line = {"worker": number, "step_s": round(median(gaps), 4) if gaps else None}
    line["peak_gib"] = round(torch.cuda.max_memory_allocated(device) / 2**30, 2) if device.type == "cuda" else None
    with log.open("a") as file:
        file.write(json.dumps(line) + "\n")


# -- a checkpoint ----------------------------------------------------------------------------------------------------


def _checkpoint(device: str, count: int) -> dict[str, Any]:
    """A process of its own, which is ended once the steps are over: the last write is not waited for."""
    with scratch() as folder:
        count = int(min(count, MOST_CHECKPOINTED, 0.3 * shutil.disk_usage(folder).free / STATE_BYTES))
        messages = messages_of(1, checkpointed, device, count, folder, limit_s=LIMIT_S)
        found = dict(messages)["found"]
    return {"parameters": count, "state_gb": STATE_BYTES * count / 1e9, **found}


def checkpointed(rank: int, name: str, count: int, folder: str, port: int, messages: Any) -> None:
    """Trains CHECKPOINT_STEPS steps with a checkpoint every CHECKPOINT_EVERY."""
    set_torchrun_variables(rank, 1, port)
    device = start(name, rank, comm_schedule="allreduce", comm_timeout_s=30).group.device
    model = Numbers(count, device)
    more = {"checkpoint_dir": folder, "checkpoint_every_steps": CHECKPOINT_EVERY, "steps": CHECKPOINT_STEPS}
    ends: list[float] = []
    free = False
    for end in _steps(model, device, 1, **more):
        ends.append(end)
        deadline = time.monotonic() + WRITE_S
        while len(ends) == 2 * CHECKPOINT_EVERY - 1 and _writing(Path(folder)) and time.monotonic() < deadline:
            time.sleep(0.01)
        if len(ends) == 2 * CHECKPOINT_EVERY - 1:
            free = not _writing(Path(folder))
        if len(ends) == CHECKPOINT_STEPS - 1:
            break
    gaps = [after - before for before, after in itertools.pairwise(ends)]
    due = range(CHECKPOINT_EVERY - 1, len(gaps), CHECKPOINT_EVERY)  # the boundary before the next step
    usual = median([gap for index, gap in enumerate(gaps) if index not in due])
    found = {
        "step_s": round(usual, 4),
        # None: the first one was still being written, so the second one was put off.
        "stalls_s": [round(gaps[index] - usual, 4) if index < CHECKPOINT_EVERY or free else None for index in due],
        "steps_s": [round(gap, 4) for gap in gaps],
        "written": sorted(path.name for path in Path(folder).glob("step-*")),
    }
    messages.put(("found", found))
    leave(messages)


def _writing(folder: Path) -> bool:
    return not any(folder.glob("step-*"))


if __name__ == "__main__":
    sys.exit(main())
