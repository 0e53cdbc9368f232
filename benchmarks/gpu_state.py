"""A large state: how long training stands still as checkpoints are taken, and as a worker joins.

    python benchmarks/gpu_state.py --device cuda --json state.json
    python benchmarks/gpu_state.py --device cpu --parameters 2e6

The model has `--parameters` fp32 numbers (10^9, on one GPU 2.5 * 10^8, or as many as fit) in square layers, trained by
AdamW on single samples: 12 bytes of state a parameter. A job of one worker takes two checkpoints: what a step with one
takes longer than the median step is the stall. The file is written in the background. Then the job grows to two: the
supervisor's events have the seconds for forming the group and for sending the state.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import os
import shutil
import sys
import time
from pathlib import Path
from statistics import median

import torch
from gpu_workers import PlacedLauncher, scratch, start
from report import parser_of, write
from torch import nn

import kfuse as kf

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from elastic_job import run_script
from limits import limits

WANTED, ON_ONE_GPU, ON_CPU = 1e9, 2.5e8, 5e6
"""Parameters. Where two workers share a GPU their messages go through sockets, at about 1 GB/s."""
WIDTH = 2**12
"""Of the layers, at most."""
TRAINING_BYTES, TRANSFER_BYTES, STATE_BYTES = 20, 12, 12
"""A parameter: parameters, gradients, moments and what backward needs meanwhile; what a transfer may copy; a state."""
EVERY, ALONE, TOGETHER, MOST_STEPS = 30, 62, 4, 400
"""Steps: between checkpoints, before the job grows, after it has."""
WRITE_S, STEP_S = 10.0, 0.4
"""How long the first checkpoint is waited for before the second is due, since there is one write at a time. What a step
takes while a worker comes: a third checkpoint would be taken meanwhile."""


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--parameters", type=float, help="instead of 1e9, or what fits")
    parser.add_argument("--work", nargs=2, metavar=("PARAMETERS", "FOLDER"), help="what the job's workers start with")
    options = parser.parse_args()
    if options.work:
        work(options.device, int(options.work[0]), Path(options.work[1]))
        return 0
    with scratch() as folder:
        count = int(options.parameters or _fitting(options.device, folder))
        worker = [sys.executable, __file__, "--device", options.device, "--work", str(count), folder]
        launcher = PlacedLauncher(options.device, worker)
        with contextlib.redirect_stdout(io.StringIO()) as said:  # it tells all that it has seen
            job = run_script(Path(folder, "run"), limits(1, 1, 2, script=True), launcher=launcher)
        if job.error is not None:
            print(said.getvalue(), job.error, sep="\n")
            return 1
        workers = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("worker-*"))]
        grown = next(view for view in job.views if len(view["workers"]) == 2)
    parts = {name: round(grown[name], 4) for name in ("pause_s", "regroup_s", "transfer_s")}
    about = {"parameters": count, "state_gb": STATE_BYTES * count / 1e9, **parts, "workers": workers}
    write(options.json, ("torch",), device=options.device, **about)
    stalls = ", ".join("-" if stall is None else f"{stall:.3f}" for stall in workers[0]["stalls_s"])
    grew = f"regroup {parts['regroup_s']:.2f} s, transfer {parts['transfer_s']:.2f} s"
    print(f"{count / 1e6:.0f} M parameters: {grew}; checkpoints' stalls of {stalls} s")
    return 0


def _fitting(device: str, folder: str) -> float:
    """Parameters that two workers can train here, and whose checkpoints fit on the disk."""
    if device == "cpu":
        return ON_CPU
    workers = 1 if torch.cuda.device_count() > 1 else 2  # on one GPU
    free = torch.cuda.mem_get_info(0)[0] / (TRAINING_BYTES + TRANSFER_BYTES) / workers
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") / (4 * STATE_BYTES)
    most = min(free, host, 0.3 * shutil.disk_usage(folder).free / STATE_BYTES)
    return min(WANTED if workers == 1 else ON_ONE_GPU, 0.8 * most)


def work(name: str, count: int, folder: Path) -> None:
    """A worker's training script. It leaves a file with its median step and the stalls."""
    number = int(os.environ["KFUSE_WORKER"])
    device = start(name, number, comm_schedule="allreduce", comm_timeout_s=30).group.device
    width = min(WIDTH, math.isqrt(count))
    layers = (nn.Linear(width, width, bias=False, device=device) for _ in range(count // width**2))
    model = nn.Sequential(*layers)
    opt = kf.FusedAdamW(model.parameters(), lr=1e-4)
    ones, ends, together, free = torch.ones(2 * MOST_STEPS, width), list[float](), 0, False
    saved = {"checkpoint_dir": str(folder / "saved"), "checkpoint_every_steps": EVERY, "checkpoint_keep": 2}
    for step in kf.DataLoader(model, (ones, ones), opt, batch_size=2, micro_batch=1, epochs=1, **saved):
        for x, _ in step:
            model(x.to(device)).square().mean().backward()  # type: ignore[no-untyped-call]
        opt.step()
        opt.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        ends.append(time.perf_counter())
        together += kf.size() == 2
        if together >= TOGETHER:
            break
        deadline = time.monotonic() + WRITE_S
        while len(ends) == 2 * EVERY - 1 and not (free := any(folder.glob("saved/step-*"))):
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        if len(ends) == ALONE and kf.size() == 1:
            kf.resize(2)
        if len(ends) >= ALONE and kf.size() == 1:
            time.sleep(STEP_S)
    gaps = [after - before for before, after in itertools.pairwise(ends[:ALONE])]
    usual = median(gaps)
    # The boundary before the next step. None: the first one was still being written, so the second one was put off.
    stalls = [round(gaps[at] - usual, 4) if at < EVERY or free else None for at in range(EVERY - 1, len(gaps), EVERY)]
    (folder / f"worker-{number}").write_text(json.dumps({"step_s": round(usual, 4), "stalls_s": stalls}))


if __name__ == "__main__":
    sys.exit(main())
