"""`kf.fsdp_monitor` measures what gradients computed by hand say, and changes no bit of what FSDP2 trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed import KEPT, run_workers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import kfuse as kf
from kfuse.statistics.step_stats import StepStats


class Net(nn.Module):
    """Tied weights, a layer that is used twice, a frozen one, one that only odd calls use, and a checkpoint."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.twice, self.sometimes = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 7)
        self.frozen, self.tied, self.last = nn.Linear(7, 7).requires_grad_(False), nn.Linear(7, 5), nn.Linear(5, 7)
        self.head = nn.Linear(7, 5, bias=False)
        self.head.weight = self.tied.weight
        self.reentrant, self.calls = reentrant, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden: Tensor = self.twice(torch.tanh(self.twice(torch.tanh(self.first(x)))))
        if self.calls % 2:
            hidden = checkpoint(self.sometimes, torch.tanh(hidden), use_reentrant=self.reentrant)
        hidden = self.last(torch.tanh(self.tied(self.frozen(hidden))))
        return self.head(hidden)


def sharded(model: nn.Module, units: list[Any], **options: Any) -> nn.Module:
    options.setdefault("mesh", init_device_mesh("cpu", (dist.get_world_size(),)))
    for unit in [*units, model]:
        fully_shard(unit, **options)
    KEPT.append(model)
    return model


def units_of(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def sum_instead_of_mean(model: nn.Module) -> None:
    for unit in units_of(model):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def nothing(model: nn.Module) -> None: ...


PLAIN: dict[str, Any] = {
    "options": {},
    "prepare": nothing,
    "sync": True,
    "gathered": False,
    "scaled": False,
    "mesh": None,
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "without sync": {"sync": False},
    "gathered": {"gathered": True},
    "gathered, without sync": {"gathered": True, "sync": False},
    "sums": {"prepare": sum_instead_of_mean},
    "bf16, reduced in fp32": {"options": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}},
    "bf16, without sync": {
        "options": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        "sync": False,
    },
    "reduced in bf16": {"options": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}},
    "offloaded": {"options": {"offload_policy": CPUOffloadPolicy(pin_memory=False)}},
    "loss scale": {"scaled": True},
    "two meshes": {"mesh": (-1, 1)},
    "hybrid without sync": {"mesh": (2, -1), "sync": False},
}


def trained(case: dict[str, Any], accumulate: int, monitored: bool) -> tuple[list[Tensor], StepStats | None, Any]:
    """Parameters after some steps; what the monitor measured in the last one, and what it should have measured."""
    options = dict(case["options"])
    if case["mesh"] is not None:
        shape = [dist.get_world_size() // abs(case["mesh"][0] * case["mesh"][1]) if n < 0 else n for n in case["mesh"]]
        options["mesh"] = init_device_mesh("cpu", tuple(shape), mesh_dim_names=("copies", "shards"))
    net = Net()
    model = sharded(net, [net.first, net.twice, net.sometimes, [net.tied, net.head]], **options)
    case["prepare"](model)
    factor = dist.get_world_size() if case["prepare"] is sum_instead_of_mean else 1
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2, enabled=case["scaled"])
    monitor = kf.fsdp_monitor(model, accumulate=accumulate, scaler=scaler) if monitored else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / factor, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    expected = None
    for step in range(3):
        batches = [tuple(torch.randn(6, 5, generator=generator) for _ in range(2)) for _ in range(accumulate)]
        if monitored and step == 2:
            expected = by_hand(model, batches)
        for j, (x, y) in enumerate(batches):
            last = j == accumulate - 1
            model.set_requires_gradient_sync(case["sync"] or last)  # type: ignore[operator]
            model.set_reshard_after_backward(last or not case["gathered"])  # type: ignore[operator]
            scaler.scale(F.mse_loss(model(x).float(), y) / accumulate).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5 * factor)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    parameters = [p.full_tensor() for p in model.parameters() if isinstance(p, DTensor)]
    return parameters, monitor.stats if monitor else None, expected


def by_hand(model: nn.Module, batches: list[Any]) -> tuple[float, float]:
    """S and |gbar| of all workers' micro-batches, from gradients of a model that is not sharded."""
    net, calls = Net(), model.calls
    for mine, theirs in zip(net.parameters(), model.parameters(), strict=True):
        assert isinstance(theirs, DTensor)
        mine.data.copy_(theirs.full_tensor())
    net.calls, found = int(calls), []  # type: ignore[arg-type]
    wanted = [p for p in net.parameters() if p.requires_grad]
    for x, y in batches:
        grads = torch.autograd.grad(F.mse_loss(net(x), y), wanted, allow_unused=True)
        found.append(
            torch.cat([torch.zeros_like(p).ravel() if g is None else g.ravel() for p, g in zip(wanted, grads)])
        )
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, found)
    means = torch.stack([g for of_rank in everyones for g in of_rank]).double()
    gbar = means.mean(0)
    return float((means - gbar).square().sum() / (len(means) - 1)), float(gbar.norm())


def all_cases(accumulate: int, names: list[str]) -> dict[str, Any]:
    dist.init_process_group("gloo")
    found = {}
    for name in names:
        case = PLAIN | CASES[name]
        expected, _, _ = trained(case, accumulate, False)
        parameters, stats, figures = trained(case, accumulate, True)
        found[name] = all(map(torch.equal, parameters, expected)), stats, figures
    return found


def check_cases(workers: int, accumulate: int, names: list[str]) -> None:
    ranks = run_workers(workers, all_cases, accumulate, names)
    for name in names:
        assert len({repr(found[name][1:]) for found in ranks}) == 1, name
        for equal, stats, (variance, norm) in (found[name] for found in ranks):
            assert equal, name
            assert (stats.step, stats.micro_batches, stats.skipped) == (2, workers * accumulate, False), name
            rough = "bf16" in name
            assert stats.grad_norm == pytest.approx(norm, rel=0.02 if rough else 1e-5), name
            assert stats.grad_variance == pytest.approx(variance, rel=0.05 if rough else 1e-4), name


def test_parameters_have_fsdp2s_bits() -> None:
    check_cases(2, 4, list(CASES))


@pytest.mark.full
@pytest.mark.parametrize("workers, accumulate", [(2, 1), (3, 1), (3, 4)])
def test_parameters_have_fsdp2s_bits_too(workers: int, accumulate: int) -> None:
    check_cases(workers, accumulate, [name for name in CASES if name != "hybrid without sync" or workers == 2])


@pytest.mark.full
def test_parameters_of_a_hybrid_mesh_have_fsdp2s_bits() -> None:
    check_cases(4, 2, ["two meshes", "hybrid without sync"])
