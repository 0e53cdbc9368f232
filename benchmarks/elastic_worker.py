"""One worker of each system that elastic.py compares: the same model, data, batch and step, and a log line a step.

    python benchmarks/elastic_worker.py kfuse|kfuse-reproducible|torchrun|torchft DIRECTORY

DIRECTORY/log gets `time step pid workers rank samples` for each completed step: the time in nanoseconds since the
epoch, the samples of all workers.
DIRECTORY/workers, if there is one, holds how many workers kfuse is to grow or shrink to.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, LR, SNAPSHOT_EVERY = 64, 1e-3, 20


class Log:
    """Lines are appended whole, also beside other writers."""

    def __init__(self, directory: Path) -> None:
        self._file = os.open(directory / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def step(self, step: int, workers: int, rank: int, samples: int = BATCH) -> None:
        os.write(self._file, f"{time.time_ns()} {step} {os.getpid()} {workers} {rank} {samples}\n".encode())


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    """An MLP for scikit-learn's digits."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    return model, torch.from_numpy(x).float() / 16, torch.from_numpy(y)


def draw(step: int, rank: int, count: int) -> Tensor:
    """The step's samples for this rank."""
    return torch.randint(0, 1797, (count,), generator=torch.Generator().manual_seed(1000 * step + rank))


def kfuse(directory: Path, reproducible: bool) -> None:
    import kfuse as kf

    kf.init(comm_reproducible=reproducible, comm_timeout_s=30)
    model, x, y = problem()
    opt = kf.FusedAdamW(model.parameters(), lr=LR)
    log, wish = Log(directory), directory / "workers"

    class Told(kf.BasePolicy):
        def after_step(self) -> None:
            log.step(opt.engine.step, kf.size(), kf.rank())
            if kf.rank() == 0 and wish.exists():
                kf.resize(int(wish.read_text()))

    hook = kf.Hook(Told())
    kf.fit(
        model, (x, y), opt, hook, train_epochs=10**6, batch_size=BATCH, batch_micro=BATCH // 2
    )  # one each, as in DDP


def torchrun(directory: Path) -> None:
    """DistributedDataParallel, and what its users write against restarts: a snapshot every few steps."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model, x, y = problem()
    ddp = DistributedDataParallel(model)
    opt = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    log, snapshot, step = Log(directory), directory / "snapshot.pt", 0
    if snapshot.exists():
        state = torch.load(snapshot)
        model.load_state_dict(state["model"])
        opt.load_state_dict(state["opt"])
        step = state["step"]
    while True:
        part = draw(step, rank, BATCH // size)
        opt.zero_grad()
        F.cross_entropy(ddp(x[part]), y[part]).backward()
        opt.step()
        step += 1
        log.step(step, size, rank)
        if rank == 0 and step % SNAPSHOT_EVERY == 0:
            torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "step": step}, directory / "new.pt")
            os.replace(directory / "new.pt", snapshot)


def torchft(directory: Path) -> None:
    """A replica group of one process; per-step fault tolerance as in torchft's own DDP example."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    model, x, y = problem()
    opt = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "opt": opt.state_dict()}

    def load(values: dict[str, Any]) -> None:
        model.load_state_dict(values["model"])
        opt.load_state_dict(values["opt"])

    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    wait = timedelta(seconds=10)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=wait),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        timeout=wait,
        quorum_timeout=wait,
        connect_timeout=wait,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=os.environ["TORCHFT_LIGHTHOUSE"],
        replica_id=f"worker_{os.getpid()}",
        hostname="127.0.0.1",
    )
    ddp, managed, log = DistributedDataParallel(manager, model), Optimizer(manager, opt), Log(directory)
    while True:
        step = manager.current_step()
        part = draw(step, os.getpid(), BATCH // 2)
        managed.zero_grad()
        F.cross_entropy(ddp(x[part]), y[part]).backward()
        managed.step()
        if manager.current_step() > step:
            workers = manager.num_participants()
            log.step(manager.current_step(), workers, manager.participating_rank() or 0, len(part) * workers)


def main() -> None:
    system, directory = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    match system:
        case "kfuse" | "kfuse-reproducible":
            kfuse(directory, system == "kfuse-reproducible")
        case "torchrun":
            torchrun(directory)
        case "torchft":
            torchft(directory)
        case _:
            sys.exit(f"{system}: allowed are kfuse, kfuse-reproducible, torchrun, torchft")


if __name__ == "__main__":
    main()
