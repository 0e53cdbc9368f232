"""kfuse-run --ranks: a worker of several processes, over which FSDP2 has sharded the model, is one elastic worker."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_job import Job, assert_exact, assert_none_left, run_script
from limits import limits

from kfuse.elastic.protocol import ENV_WORKER
from kfuse.elastic.supervisor import Supervisor

SCRIPT = """
import os, signal, sys, time, json, pathlib
import torch, torch.distributed as dist, torch.nn.functional as F, kfuse as kf
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy

folder, given = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
ranks, worker = int(os.environ["WORLD_SIZE"]), int(os.environ["KFUSE_WORKER"])
mesh = init_device_mesh("cpu", (ranks,))
rank = dist.get_rank()
kf.init(comm_reproducible=True, comm_bucket_mb=0.002, **given.get("comm", {}))
events = {(w, r, s): how for w, r, s, how in given.get("events", [])}

def strike(number):
    how = events.get((worker, rank, number))
    if how == "raise":
        raise ValueError("for a test")
    if how is not None:
        os.kill(os.getpid(), getattr(signal, how))

def raises(*_):
    raise ValueError("for a test")

signal.signal(signal.SIGUSR2, raises)

class Average(nn.Module):  # a buffer that forward changes
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(33))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean += 0.1 * (x.mean(0) - self.mean)
        return x

def make():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(13, 33), Average(), nn.Dropout(0.1), nn.Linear(33, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 1)
    )
    for layer in (model[0], model[3], model):
        fully_shard(layer, mesh=mesh)
    return model

numbers = torch.Generator().manual_seed(1)
x, y = torch.randn(241, 13, generator=numbers), torch.randn(241, 1, generator=numbers)
model = make()
kind = getattr(torch.optim, given.get("optimizer", "AdamW"))
params = [p for p in model.parameters() if kind is not torch.optim.Muon or p.ndim == 2]
rest = [p for p in model.parameters() if all(p is not q for q in params)]
inners = [kind(params, lr=1e-2), *([torch.optim.AdamW(rest, lr=1e-2)] if rest else [])]
opt = kf.Optimizer(*inners, clip_norm=0.5)
more = {"epochs": 6, "seed": 3, **given.get("loader", {})}
for step in kf.DataLoader(model, (x, y), opt, batch_size=24, micro_batch=6, observe_ledger=True, **more):
    strike(step.number)
    for inputs, targets in step:
        step.loss = F.mse_loss(model(inputs), targets)
        step.loss.backward()
        strike(step.number + 0.5)
    opt.step()
    opt.zero_grad()
    if step.number in given.get("resizes", {}):
        kf.resize(given["resizes"][step.number])
    time.sleep(given.get("sleep", 0))
own = {name: value.to_local() if hasattr(value, "to_local") else value for name, value in model.state_dict().items()}
torch.save(own, folder / f"of-{worker}-{rank}.pt")
"""


def run(
    folder: Path, workers: int, ranks: int = 2, most: int | None = None, replace: bool = True, **given: Any
) -> Job:
    """A job of the script. given: what it reads; `during`: see `run_job`; `elastic`: settings of that section."""
    during, elastic = given.pop("during", None), given.pop("elastic", {})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "script.py").write_text(SCRIPT)
    import json

    words = str(folder / "script.py"), str(folder), json.dumps(given)
    bounds = limits(workers, 1, most or workers, script=True, replace=replace, **elastic)
    job = run_script(folder / "run", bounds, *words, ranks=ranks, during=during)
    assert_none_left([process.pid for process in job.processes if process.pid is not None])
    return job
