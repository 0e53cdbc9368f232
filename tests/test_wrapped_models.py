"""Models wrapped in DistributedDataParallel or sharded by FSDP are refused by name before anything is trained."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from distributed import KEPT, run_workers
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import kfuse as kf
from kfuse.optim import refuse_wrapped

DDP = "is wrapped in DistributedDataParallel, which reduces gradients itself: give kfuse the inner model (model.module)"


def refused(act: Any) -> str:
    try:
        act()
    except TypeError as error:
        return str(error)
    return ""


def wrapped_in_ddp() -> list[str]:
    dist.init_process_group("gloo")
    net = nn.Linear(4, 2)
    opt = kf.FusedSGD(net.parameters(), lr=0.1)
    model = DistributedDataParallel(net)
    KEPT.append(model)
    data = [(torch.ones(4), torch.tensor(0))]
    return [
        refused(lambda: refuse_wrapped(nn.Sequential(nn.Linear(2, 2), model))),
        refused(lambda: opt.sync_buffers(model)),
        refused(lambda: kf.fit(model, data, opt, train_steps=1)),
        refused(lambda: kf.DataLoader(data, model, opt)),
    ]


def test_ddp_is_refused_where_it_is_handed_over() -> None:
    for nested, *direct in run_workers(2, wrapped_in_ddp):
        assert nested.startswith(f"model.1 {DDP}") and all(said.startswith(f"model {DDP}") for said in direct)


def sharded() -> dict[str, str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import distribute_tensor

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    found = {}
    for kind, make in (
        ("fused", lambda params: kf.FusedAdamW(params, lr=0.1)),
        ("wrapped", lambda params: kf.Optimizer(torch.optim.Adam(params, lr=0.1))),
    ):
        model = FullyShardedDataParallel(nn.Linear(4, 2), device_id=torch.device("cpu"), use_orig_params=True)
        found[f"fsdp, {kind}"] = refused(lambda make=make, model=model: make(model.parameters()))
        found["fsdp, helper"] = refused(lambda model=model: refuse_wrapped(model))
        model = nn.Linear(4, 2)
        fully_shard(model, mesh=mesh)
        found[f"fully_shard, {kind}"] = refused(lambda make=make, model=model: make(model.parameters()))
        found["fully_shard, helper"] = refused(lambda model=model: refuse_wrapped(model))
        p = nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh))
        found[f"dtensor, {kind}"] = refused(lambda make=make, p=p: make([("w", p)]))
    KEPT.append(model)
    return found


def test_sharded_parameters_are_refused() -> None:
    for found in run_workers(2, sharded):
        assert len(found) == 8
        for name, message in found.items():
            if name.startswith("dtensor"):
                assert message.startswith("parameter 0 (w) is a DTensor: kfuse trains whole parameters"), name
            elif name == "fully_shard, fused" or name == "fully_shard, wrapped":
                assert message.startswith("parameter 0 is a DTensor"), name
            else:
                assert "is sharded by FSDP, which reduces gradients itself" in message, name
