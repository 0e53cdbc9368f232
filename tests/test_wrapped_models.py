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


def wrapped() -> dict[str, str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    dist.init_process_group("gloo")
    net, model = nn.Linear(4, 2), nn.Linear(4, 2)
    opt = kf.FusedSGD(net.parameters(), lr=0.1)
    ddp = DistributedDataParallel(net)
    flat = FullyShardedDataParallel(nn.Linear(4, 2), device_id=torch.device("cpu"), use_orig_params=True)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    KEPT.extend((ddp, flat, model))
    data = [(torch.ones(4), torch.tensor(0))]
    return {
        "nested": refused(lambda: refuse_wrapped(nn.Sequential(nn.Linear(2, 2), ddp))),
        "sync_buffers": refused(lambda: opt.sync_buffers(ddp)),
        "fit": refused(lambda: kf.fit(ddp, data, opt, train_steps=1)),
        "DataLoader": refused(lambda: kf.DataLoader(data, ddp, opt)),
        "DTensor": refused(lambda: kf.Optimizer(torch.optim.Adam(model.parameters()))),
        "FSDP": refused(lambda: kf.FusedAdamW(flat.parameters())),
        "FSDP's model": refused(lambda: refuse_wrapped(flat)),
        "FSDP2's model": refused(lambda: refuse_wrapped(model)),
    }


def test_wrapped_models_are_refused_where_they_are_handed_over() -> None:
    for found in run_workers(2, wrapped):
        assert found.pop("nested").startswith(f"model.1 {DDP}")
        assert all(found.pop(name).startswith(f"model {DDP}") for name in ("sync_buffers", "fit", "DataLoader"))
        assert found.pop("DTensor").startswith("parameter 0 is a DTensor: kfuse trains whole parameters")
        for name, message in found.items():
            assert "is sharded by FSDP, which reduces gradients itself" in message, name
