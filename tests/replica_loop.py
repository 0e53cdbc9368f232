"""A script for `kfuse-run --ranks`, and the same training with FSDP2 alone."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import kfuse as kf
from kfuse.data.fetching import micro_batch_sizes, permutation, random_key

BATCH, MICRO, SAMPLES, SEED = 24, 6, 241, 3  # the epoch's last step has one sample, which all ranks run


class Average(nn.Module):
    """Keeps the mean of what it has seen, which forward changes, in a buffer."""

    mean: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean += 0.1 * (x.float().mean(0) - self.mean)
        return torch.zeros((), dtype=x.dtype)


class Network(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.average = Average(33)
        self.first, self.middle, self.last = nn.Linear(13, 33), nn.Linear(33, 16), nn.Linear(16, 1)
        self.dropout, self.norm = nn.Dropout(dropout), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.norm(self.middle(self.dropout(x + self.average(x))))
        return self.last(F.gelu(x))


def make(given: dict[str, Any]) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """The sharded model, and its optimizers: of Muon's matrices and of the rest."""
    torch.manual_seed(0)
    model, mesh = Network(given.get("dropout", 0.1)), init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if given.get("bf16") else MixedPrecisionPolicy()
    for module in (model.first, model.middle, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    kind = getattr(torch.optim, given.get("optimizer", "AdamW"))
    # torch's Muon takes no sharded matrix of one row.
    matrices = [p for p in model.parameters() if kind is torch.optim.Muon and p.ndim == 2 and len(p) > 1]
    rest = [p for p in model.parameters() if all(p is not q for q in matrices)]
    others = torch.optim.AdamW if matrices else kind
    rate = given.get("lr", 1e-2)
    return model, [*([kind(matrices, lr=rate)] if matrices else []), others(rest, lr=rate)]


def data() -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, 13, generator=numbers), torch.randn(SAMPLES, 1, generator=numbers)


def own(model: nn.Module) -> dict[str, Tensor]:
    """What this rank has of the model."""
    found: dict[str, Any] = model.state_dict()
    return {name: value.to_local() if hasattr(value, "to_local") else value for name, value in found.items()}


def alone(given: dict[str, Any]) -> tuple[dict[str, Tensor], list[list[float]]]:
    """The first epoch in one process that shards nothing. Returns the model, and what each step measured."""
    torch.manual_seed(0)
    model, found = Network(), list[list[float]]()
    opt = kf.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in kf.DataLoader(model, data(), opt, batch_size=BATCH, micro_batch=MICRO, epochs=1, seed=SEED):
        for inputs, targets in step:
            step.loss = F.mse_loss(model(inputs), targets)
            step.loss.backward()
        opt.step()
        opt.zero_grad()
        assert opt.stats is not None
        found.append([opt.stats.loss, opt.stats.grad_norm, opt.stats.grad_variance or 0.0])
    return {name: value.detach().clone() for name, value in model.state_dict().items()}, found


def plain(given: dict[str, Any], steps: int) -> dict[str, Tensor]:
    """By FSDP2 alone, on one replica: so many steps. Returns what this rank has of the model."""
    model, inners = make(given)
    rank, ranks, (x, y) = dist.get_rank(), dist.get_world_size(), data()
    orders = (torch.from_numpy(permutation(SAMPLES, SEED, epoch)).split(BATCH) for epoch in range(steps))
    for number, indices in enumerate(islice(chain.from_iterable(orders), steps)):
        sizes, start = micro_batch_sizes(len(indices), MICRO, ranks), 0
        for j, size in enumerate(sizes):
            mine = indices[start : start + size]
            mine, start = mine[rank::ranks] if size % ranks == 0 else mine, start + size
            torch.manual_seed(random_key(SEED, number, j * ranks + rank))
            (F.mse_loss(model(x[mine]).float(), y[mine]) * (size / len(indices))).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for inner in inners:
            inner.step()
            inner.zero_grad()
    return own(model)


def whole(checkpoints: str) -> dict[str, Tensor]:
    """The last 14 steps of the training, from a checkpoint, in one process that shards nothing. Returns the model."""
    torch.manual_seed(0)
    model = Network()
    opt = kf.Optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), clip_norm=0.5)
    given: dict[str, Any] = {"checkpoint_resume": checkpoints, "batch_size": BATCH, "micro_batch": MICRO, "seed": SEED}
    for step in kf.DataLoader(model, data(), opt, epochs=4, **given):
        for inputs, targets in step:
            F.mse_loss(model(inputs), targets).backward()
        opt.step()
        opt.zero_grad()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def main(folder: Path, given: dict[str, Any]) -> None:
    """Trains as `given` says, and keeps what this rank has of the model in the end."""
    worker = int(os.environ["KFUSE_WORKER"])
    model, inners = make(given)
    rank = dist.get_rank()
    kf.init(comm_reproducible=True, comm_bucket_mb=0.002, comm_timeout_s=60)
    events = {(w, r, at): how for w, r, at, how in given.get("events", ())}

    def raises(*_: Any) -> None:
        raise ValueError("for a test")

    def strike(at: float) -> None:
        if (how := events.get((worker, rank, at))) is not None:
            os.kill(os.getpid(), getattr(signal, how))

    signal.signal(signal.SIGUSR2, raises)
    opt = kf.Optimizer(*inners, clip_norm=given.get("clip_norm", 0.5))
    more = {"epochs": 4, "observe_ledger": True, **given.get("loader", {})}
    loader = kf.DataLoader(model, data(), opt, batch_size=BATCH, micro_batch=MICRO, seed=SEED, **more)
    session = kf.init()
    for step in loader:
        while step.number in given.get("waits", ()) and session.group.size < 2 and not session.proposed_generation():
            time.sleep(0.01)
        strike(step.number)
        for inputs, targets in step:
            step.loss = F.mse_loss(model(inputs).float(), targets)
            step.loss.backward()
            strike(step.number + 0.5)
        opt.step()
        opt.zero_grad()
        if (workers := given.get("resizes", {}).get(str(step.number))) is not None:
            kf.resize(workers)
        time.sleep(given.get("sleep", 0.0))
    torch.save(own(model), folder / f"of-{worker}-{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
