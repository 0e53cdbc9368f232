"""Ranks that a script started itself, as torch's tutorial on DDP does: torch's process group is kfuse's group too."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from distributed import on_workers
from torch import nn

import kfuse as kf
from kfuse.comm.settings import CommOptions
from kfuse.optim.refuse import refuse_own_loop, refuse_unplanned

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def train(rank, how):
    torch.set_num_threads(1)
    import kfuse as kf
    if "variables" in how:
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), "2"
    if "kfuse first" in how:
        kf.init()
    url = f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}" if how == "tcp" else None
    place = {} if "variables" in how else {"rank": rank, "world_size": 2}
    dist.init_process_group("gloo", init_method=url, **place)
    torch.manual_seed(rank)  # each rank has other parameters and other data
    model = torch.nn.Linear(3, 1)
    opt = kf.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        model(torch.randn(4, 3)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    both = [torch.empty(1, 3) for _ in range(2)]
    dist.all_gather(both, model.weight.detach())
    line = f"{kf.rank() == rank} {kf.size()} {kf.local_rank() == rank} {torch.equal(*both)}\\n"
    os.write(1, line.encode())
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(train, args=tuple(sys.argv[1:]), nprocs=2)
"""


def run(how: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = folder / "train.py"
    path.write_text(SCRIPT)
    known = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    with socket.create_server(("127.0.0.1", 0)) as probe:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    command = [sys.executable, str(path), how]
    return subprocess.run(command, env=known | place, capture_output=True, text=True, timeout=120)


@pytest.mark.full
@pytest.mark.parametrize("how", ["tcp", "variables", "variables, kfuse first"])
def test_ranks_that_a_script_starts_itself_train_one_model(how: str, tmp_path: Path) -> None:
    """As torch's tutorials do: by a URL, or by all four variables."""
    done = run(how, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True 2 True True"] * 2, done.stdout + done.stderr


@pytest.mark.full
def test_a_process_group_that_kfuse_could_not_know_of_is_refused(tmp_path: Path) -> None:
    done = run("arguments, kfuse first", tmp_path)
    assert done.returncode != 0 and "init_process_group before kf.init" in done.stderr


@on_workers(2)
def test_synchronised_batch_normalisation_is_refused_for_several_workers() -> None:
    """Without torch's process group it would be BatchNorm, without a word."""
    kf.init()
    model = nn.Sequential(nn.Linear(4, 3), nn.SyncBatchNorm(3))
    opt = kf.FusedSGD(model.parameters(), lr=0.1)
    data = torch.randn(32, 4), torch.randint(3, (32,))
    for act in (lambda: opt.sync_buffers(model), lambda: kf.fit(model, data, opt)):
        with pytest.raises(TypeError, match=r"(?s)module 1: SyncBatchNorm.*GroupNorm"):
            act()


def test_a_loop_of_ones_own_in_an_elastic_job_is_told_what_must_drive_it() -> None:
    session: Any = SimpleNamespace(elastic=True, in_training=False, comm=CommOptions())
    with pytest.raises(RuntimeError, match=r"kf\.fit or kf\.DataLoader must drive"):
        refuse_own_loop(session, uses_scaler=False)
    with pytest.raises(RuntimeError, match=r"one pass over the step's micro-batches.* of several optimizers give"):
        refuse_unplanned(session, planned=False)
