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

    dist.init_process_group("gloo")
    flat = FullyShardedDataParallel(nn.Linear(4, 2), device_id=torch.device("cpu"), use_orig_params=True)
    model = nn.Linear(4, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    KEPT.extend((flat, model))
    return {
        "FSDP": refused(lambda: kf.FusedAdamW(flat.parameters())),
        "FSDP's model": refused(lambda: refuse_wrapped(flat)),
        "a DTensor": refused(lambda: kf.Optimizer(torch.optim.Adam(model.parameters()))),
        "FSDP2's model": refused(lambda: refuse_wrapped(model)),
    }


def test_sharded_parameters_are_refused() -> None:
    for found in run_workers(2, sharded):
        assert found.pop("a DTensor").startswith("parameter 0 is a DTensor: kfuse trains whole parameters")
        for name, message in found.items():
            assert "is sharded by FSDP, which reduces gradients itself" in message, name
