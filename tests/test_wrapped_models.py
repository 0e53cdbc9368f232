"""Models wrapped in DistributedDataParallel or sharded by FSDP are refused by name before anything is trained."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from distributed import KEPT, on_workers
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import kfuse as kf
from kfuse.optim import refuse_wrapped

DDP = r"is wrapped in DistributedDataParallel, which reduces gradients itself: give kfuse the inner model \(model.mod"


@on_workers(2)
def test_wrapped_models_are_refused_where_they_are_handed_over() -> None:
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
    whole, sharded = "parameter 0 is a DTensor: kfuse trains whole parameters", "is sharded by FSDP, which reduces grad"
    for act, message in (
        (lambda: refuse_wrapped(nn.Sequential(nn.Linear(2, 2), ddp)), f"^model.1 {DDP}"),
        (lambda: opt.sync_buffers(ddp), f"^model {DDP}"),
        (lambda: kf.fit(ddp, data, opt, steps=1), f"^model {DDP}"),
        (lambda: kf.DataLoader(ddp, data, opt), f"^model {DDP}"),
        (lambda: kf.Optimizer(torch.optim.Adam(model.parameters())), f"^{whole}"),
        (lambda: kf.FusedAdamW(flat.parameters()), sharded),
        (lambda: refuse_wrapped(flat), sharded),
        (lambda: refuse_wrapped(model), sharded),
    ):
        with pytest.raises(TypeError, match=message):
            act()
