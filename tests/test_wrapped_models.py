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

DDP = (
    "is wrapped in DistributedDataParallel, which reduces gradients itself: give kfuse the inner model (model.module) "
    "and do not wrap it"
)


def refused(act: Any) -> str:
    try:
        act()
    except TypeError as error:
        return str(error)
    return ""


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()


def wrapped_in_ddp() -> dict[str, str]:
    dist.init_process_group("gloo")
    found = {}
    for name, make in (
        ("fused", lambda params: kf.FusedSGD(params, lr=0.1)),
        ("wrapped", lambda params: kf.Optimizer(torch.optim.SGD(params, lr=0.1))),
    ):
        net = nn.Linear(4, 2)
        opt = make(net.parameters())
        model = DistributedDataParallel(net)
        found[f"{name}, optimizer first"] = refused(lambda model=model: backward(model))
        model = DistributedDataParallel(nn.Linear(4, 2))
        opt = make(model.parameters())
        found[f"{name}, model first"] = refused(lambda model=model: backward(model))
        model = DistributedDataParallel(nn.Linear(4, 2))
        opt = make(model.parameters())

        def in_a_context(opt: Any = opt, model: nn.Module = model) -> None:
            with opt.micro_batch(samples=2):
                backward(model)

        found[f"{name}, in a context"] = refused(in_a_context)
    found["helper"] = refused(lambda: refuse_wrapped(nn.Sequential(nn.Linear(2, 2), model)))
    KEPT.append(model)
    return found


def test_ddp_is_refused_whenever_it_was_wrapped() -> None:
    for found in run_workers(2, wrapped_in_ddp):
        for name, message in found.items():
            assert message == (f"model.1 {DDP}" if name == "helper" else f"the model {DDP}"), name


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
        for original in (False, True):
            model = FullyShardedDataParallel(nn.Linear(4, 2), device_id=torch.device("cpu"), use_orig_params=original)
            found[f"fsdp, {kind}, {original}"] = refused(lambda make=make, model=model: make(model.parameters()))
            found["fsdp, helper"] = refused(lambda model=model: refuse_wrapped(model))
        model = nn.Linear(4, 2)
        fully_shard(model, mesh=mesh)
        found[f"fully_shard, {kind}"] = refused(lambda make=make, model=model: make(model.parameters()))
        found["fully_shard, helper"] = refused(lambda model=model: refuse_wrapped(model))
        p = nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh))
        found[f"dtensor, {kind}"] = refused(lambda make=make, p=p: make([("w", p)]))
        model = nn.Linear(4, 2)
        opt = make(model.parameters())
        fully_shard(model, mesh=mesh)
        backward(model)
        found[f"fully_shard later, {kind}"] = refused(opt.step)
        for original in (False, True):
            net = nn.Linear(4, 2)
            opt = make(net.parameters())
            model = FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=original)

            def train(model: nn.Module = model, opt: Any = opt) -> None:
                backward(model)
                opt.step()

            found[f"fsdp later, {kind}, {original}"] = refused(train)
    KEPT.append(model)
    return found


def test_sharded_parameters_are_refused() -> None:
    for found in run_workers(2, sharded):
        assert len(found) == 16
        for name, message in found.items():
            if name.startswith("dtensor"):
                assert message.startswith("parameter 0 (w) is a DTensor: kfuse trains whole parameters"), name
            elif name == "fully_shard, fused" or name == "fully_shard, wrapped":
                assert message.startswith("parameter 0 is a DTensor"), name
            else:
                assert "is sharded by FSDP, which reduces gradients itself" in message, name


def beside_another_model() -> bool:
    """A DistributedDataParallel model that has its own optimizer is nobody's business."""
    dist.init_process_group("gloo")
    other = DistributedDataParallel(nn.Linear(4, 2))
    net = nn.Linear(4, 2)
    opt = kf.FusedSGD(net.parameters(), lr=0.1)
    before = net.weight.detach().clone()
    backward(other)
    backward(net)
    opt.step()
    refuse_wrapped(net)
    KEPT.append(other)
    return not torch.equal(before, net.weight)


def test_a_ddp_model_beside_ours_is_left_alone() -> None:
    assert all(run_workers(2, beside_another_model))
