"""One process of a job of hsdp.py: python benchmarks/hsdp_worker.py cost|losses SYSTEM ...

A GPT of 1.7 M parameters in three units of FSDP2, AdamW, clipped gradients. A replica is two processes, a step has two
micro-batches of each replica.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from job_cost import Gate
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from kfuse.models import GPT

REPLICAS, RANKS, MICRO_BATCHES = 2, 2, 2
MICRO = 4  # samples, of a replica
BATCH = REPLICAS * MICRO_BATCHES * MICRO
TOKENS, LENGTH = 256, 64
LR, CLIP = 1e-3, 1.0
RESHARDS = os.environ.get("HSDP_RESHARDS") == "1"


def problem(samples: int) -> tuple[GPT, Tensor, Tensor]:
    torch.manual_seed(0)
    model = GPT(TOKENS, LENGTH, 2, 4, 256, dropout=0.0)
    tokens = (torch.rand(samples, LENGTH + 1) ** 3 * TOKENS).long()
    return model, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def shard(model: GPT, mesh: DeviceMesh) -> torch.optim.Optimizer:
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=mesh, reshard_after_forward=RESHARDS)
    return torch.optim.AdamW(model.parameters(), lr=LR, fused=True)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).reshape(-1, TOKENS), y.reshape(-1))


def native(name: str, path: str, steps: str) -> None:
    """torch's HSDP. `native` reduces a step's gradients once; `native-each` scatters those of each micro-batch."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model, x, y = problem(28 * BATCH)
    opt = shard(model, init_device_mesh("cpu", (REPLICAS, RANKS), mesh_dim_names=("replicate", "shard")))
    assert isinstance(model, FSDPModule)
    gate, epoch = Gate(path, int(steps)), 0
    while True:
        order, epoch = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch)), epoch + 1
        for part in order.split(BATCH):
            gate.step()
            for j, mine in enumerate(part[rank::size].split(MICRO // RANKS)):
                last = j == MICRO_BATCHES - 1
                reduced = model.set_requires_all_reduce if name == "native-each" else model.set_requires_gradient_sync
                reduced(last)
                model.set_is_last_backward(last)
                model.set_reshard_after_backward(last)  # the next one needs no gathering
                (loss_of(model, x[mine], y[mine]) / MICRO_BATCHES).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            opt.step()
            opt.zero_grad()


def kfuse(name: str, path: str, steps: str) -> None:
    import kfuse as kf

    mesh = init_device_mesh("cpu", (RANKS,))
    kf.init(comm_timeout_s=60, comm_reproducible=name == "reproducible")
    model, x, y = problem(28 * BATCH)
    opt = kf.Optimizer(shard(model, mesh), clip_norm=CLIP)
    assert isinstance(model, FSDPModule)
    gate = Gate(path, int(steps))
    loader = kf.DataLoader(model, (x, y), opt, batch_size=BATCH, micro_batch=MICRO, epochs=None, steps=10**9)
    for step in loader:
        gate.step()
        for j, batch in enumerate(step):
            model.set_reshard_after_backward(j == len(step) - 1)
            loss_of(model, *batch).backward()
        opt.step()
        opt.zero_grad()


# -- losses -----------------------------------------------------------------------------------------------------------


class Log:
    """A line for each step that a process begins, with its samples, and one for each that it completes."""

    def __init__(self, directory: str, replica: int) -> None:
        self._file = os.open(Path(directory, "log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._who = [os.getpid(), replica, dist.get_rank()]

    def write(self, step: int, workers: int, samples: list[int]) -> None:
        """workers: how many have contributed; 0 where the step has begun."""
        line = [time.time(), *self._who, step, workers, samples]
        os.write(self._file, f"{json.dumps(line)}\n".encode())  # appended whole, also beside other writers


def kfuse_lossy(name: str, directory: str, steps: str) -> None:
    import kfuse as kf

    mesh = init_device_mesh("cpu", (RANKS,))
    kf.init(comm_timeout_s=30)
    model, x, y = problem(int(steps) * BATCH)
    opt = kf.Optimizer(shard(model, mesh), clip_norm=CLIP)
    log = Log(directory, int(os.environ["KFUSE_WORKER"]))

    class Told(kf.BasePolicy):
        def after_step(self) -> None:
            log.write(opt.engine.step, kf.size(), [])

    for step in kf.DataLoader(model, (x, y), opt, policy=Told(), epochs=1, batch_size=BATCH, micro_batch=MICRO):
        for batch in step:
            loss_of(model, *batch).backward()
        opt.step()
        opt.zero_grad()


def torchft(name: str, directory: str, steps: str) -> None:
    """As torchft's test and torchtitan have HSDP: FSDP2 over the replica's own group, a managed all-reduce in its hook.

    A step that was not committed is followed by the next batch, as in torchft's examples; `torchft-again` draws its
    batch again. A replica that is back goes on in its part of the data where it was, as the example advises.
    """
    from torchft import DistributedSampler, Manager, Optimizer, ProcessGroupGloo
    from torchft.process_group import ManagedProcessGroup

    dist.init_process_group("gloo")
    rank, group = dist.get_rank(), int(os.environ["REPLICA_GROUP_ID"])
    model, x, y = problem(int(steps) * BATCH)
    opt = shard(model, init_device_mesh("cpu", (RANKS,)))
    for p in model.parameters():  # a replica that joins has what the others' state goes into
        p.grad = torch.zeros_like(p)
    opt.param_groups[0]["lr"] = 0.0
    opt.step()
    opt.param_groups[0]["lr"] = LR

    # Read while the next forward runs, in which the model's state_dict() is not of shards.
    shards = {f"{i}": _local(p) for i, p in enumerate(model.parameters())}
    for i, p in enumerate(model.parameters()):
        shards |= {f"{i} {key}": _local(value) for key, value in opt.state[p].items()}

    def load(values: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for key, value in values.items():
                shards[key].copy_(value)

    wait = timedelta(seconds=10)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=wait),
        load_state_dict=load,
        state_dict=lambda: shards,
        min_replica_size=1,
        init_sync=False,  # all begin with the same weights
        timeout=wait,
        quorum_timeout=wait,
        connect_timeout=wait,
        replica_id=f"group_{group}",
        hostname="127.0.0.1",
    )
    managed = ManagedProcessGroup(manager)
    managed.register("replicate")

    def average(output: Tensor) -> None:
        dist.all_reduce(output, op=dist.ReduceOp.AVG, group=managed)

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(average)
    assert isinstance(model, FSDPModule)
    optimizer, log, place = Optimizer(manager, opt), Log(directory, group), Path(directory, f"place-{group}")
    Path(directory, f"up-{group}-{rank}").touch()
    while len(list(Path(directory).glob("up-*"))) < REPLICAS * RANKS:  # none goes ahead alone at the job's start
        time.sleep(0.01)
    drawn = int(place.read_text()) if place.exists() else 0
    sampler = DistributedSampler(x, group, REPLICAS, seed=0)
    samples = torch.tensor(list(sampler)).split(MICRO_BATCHES * MICRO // RANKS)
    while manager.current_step() < int(steps):
        part, step = samples[drawn % len(samples)], manager.current_step() + 1
        log.write(step, 0, part.tolist())
        optimizer.zero_grad()
        for j, mine in enumerate(part.split(MICRO // RANKS)):
            last = j == MICRO_BATCHES - 1
            model.set_requires_gradient_sync(last)
            model.set_reshard_after_backward(last)
            (loss_of(model, x[mine], y[mine]) / MICRO_BATCHES).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        committed = manager.is_participating() and manager.current_step() >= step
        if committed:
            log.write(manager.current_step(), manager.num_participants(), [])
        if committed or name == "torchft":
            drawn += 1
            if rank == 0:
                place.with_suffix(".part").write_text(str(drawn))
                os.replace(place.with_suffix(".part"), place)
    dist.destroy_process_group()
    os._exit(0)


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, system = sys.argv[1:3]
    works: dict[str, Callable[..., None]] = {"native": native, "kfuse": kfuse, "torchft": torchft}
    if what == "losses":
        works["kfuse"] = kfuse_lossy
    works["kfuse" if system == "reproducible" else system.split("-")[0]](system, *sys.argv[3:])
