"""`kf.fsdp_monitor` measures what gradients computed by hand say, and changes no bit of what FSDP2 trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed import KEPT, on_workers, run_workers
from test_ddp_hook import check_formula, check_running, error, measure, of_size
from test_statistics import Halves, Problem
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

import kfuse as kf
from kfuse.statistics.step_stats import StepStats


class Net(nn.Module):
    """Tied weights, a layer that is used twice, a frozen one, one that only odd calls use, and a checkpoint."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.twice, self.sometimes = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 7)
        self.frozen, self.tied, self.last = nn.Linear(7, 7).requires_grad_(False), nn.Linear(7, 5), nn.Linear(5, 7)
        self.head = nn.Linear(7, 5, bias=False)
        self.head.weight = self.tied.weight
        self.always, self.calls = always, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden: Tensor = self.twice(torch.tanh(self.twice(torch.tanh(self.first(x)))))
        if self.always or self.calls % 2:
            hidden = checkpoint(self.sometimes, torch.tanh(hidden), use_reentrant=False)
        hidden = self.last(torch.tanh(self.tied(self.frozen(hidden))))
        return self.head(hidden)


def sharded(model: nn.Module, units: list[Any], **options: Any) -> nn.Module:
    options.setdefault("mesh", init_device_mesh("cpu", (dist.get_world_size(),)))
    for unit in [*units, model]:
        fully_shard(unit, **options)
    KEPT.append(model)
    return model


PLAIN: dict[str, Any] = {"options": {}, "sums": False, "sync": True, "gathered": False, "scaled": False, "mesh": None}
BF16 = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "without sync": {"sync": False},
    "sums": {"sums": True},
    "bf16, without sync, gathered": {"options": BF16, "sync": False, "gathered": True},
    "reduced in bf16": {"options": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}},
    "offloaded, loss scale": {"options": {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, "scaled": True},
    "hybrid, one shard": {"mesh": (-1, 1)},
    "hybrid without sync": {"mesh": (2, -1), "sync": False},
    "hybrid, copies averaged once": {"mesh": (2, -1), "sync": None},
}


def trained(case: dict[str, Any], accumulate: int, monitored: bool) -> tuple[list[Tensor], StepStats | None, Any]:
    """Parameters after some steps; what the monitor measured in the last one, and what it should have measured."""
    options = dict(case["options"])
    if case["mesh"] is not None:
        shape = [dist.get_world_size() // abs(case["mesh"][0] * case["mesh"][1]) if n < 0 else n for n in case["mesh"]]
        options["mesh"] = init_device_mesh("cpu", tuple(shape), mesh_dim_names=("copies", "shards"))
    # Without HSDP's all-reduce FSDP2 keeps the gradient of a layer that the last micro-batch does not use.
    net = Net(always=case["sync"] is None)
    model = sharded(net, [net.first, net.twice, net.sometimes, [net.tied, net.head]], **options)
    factor = dist.get_world_size() if case["sums"] else 1
    for unit in model.modules() if case["sums"] else ():
        if isinstance(unit, FSDPModule):
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
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
            if case["sync"] is None:
                model.set_requires_all_reduce(last)  # type: ignore[operator]
            else:
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
    assert isinstance(model, Net)
    net = Net(model.always)
    for mine, theirs in zip(net.parameters(), model.parameters(), strict=True):
        assert isinstance(theirs, DTensor)
        mine.data.copy_(theirs.full_tensor())
    net.calls, found = model.calls, []
    wanted = [p for p in net.parameters() if p.requires_grad]
    for x, y in batches:
        grads = torch.autograd.grad(F.mse_loss(net(x), y), wanted, allow_unused=True)
        pairs = zip(wanted, grads, strict=True)
        found.append(torch.cat([torch.zeros_like(p).ravel() if g is None else g.ravel() for p, g in pairs]))
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


HYBRID = [name for name in CASES if name.startswith("hybrid")]
OTHERS = [name for name in CASES if name not in HYBRID]


@pytest.mark.parametrize(
    "workers, accumulate, names",
    [
        (2, 2, ["plain", "without sync", "hybrid, one shard"]),
        pytest.param(2, 3, OTHERS, marks=pytest.mark.full),
        pytest.param(3, 1, OTHERS, marks=pytest.mark.full),
        pytest.param(4, 2, HYBRID, marks=pytest.mark.full),
    ],
)
def test_parameters_have_fsdp2s_bits(workers: int, accumulate: int, names: list[str]) -> None:
    ranks = run_workers(workers, all_cases, accumulate, names)
    for name in names:
        assert len({repr(found[name][1:]) for found in ranks}) == 1, name
        for equal, stats, (variance, norm) in (found[name] for found in ranks):
            assert equal, name
            assert (stats.step, stats.micro_batches, stats.skipped) == (2, workers * accumulate, False), name
            rough = "bf16" in name
            assert stats.grad_norm == pytest.approx(norm, rel=0.02 if rough else 1e-5), name
            assert stats.grad_variance == pytest.approx(variance, rel=0.05 if rough else 1e-4), name


# -- statistics ------------------------------------------------------------------------------------------------------


@contextmanager
def without_sync(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def statistics(cases: list[tuple[Problem, bool, bool]]) -> list[list[StepStats]]:
    """Of micro-batches that are shared out to the workers in equal numbers."""
    dist.init_process_group("gloo")
    found = []
    for problem, sync, divide in cases:
        net = Halves(problem)
        model = sharded(net, [net.left])
        each = len(problem.sizes) // dist.get_world_size()
        monitor = kf.fsdp_monitor(model, accumulate=each if divide else 1)
        mine = range(dist.get_rank() * each, (dist.get_rank() + 1) * each)
        found.append(
            measure(problem, monitor, model, mine, divide, nullcontext if sync else partial(without_sync, model))
        )
        monitor.close()
    return found


@pytest.mark.full
def test_statistics_are_the_formula() -> None:
    """Micro-batches of equal and of unequal sizes, with and without sync; losses that are divided by their number."""
    even, uneven = (of_size("logistic regression", sizes) for sizes in ((8,) * 8, (2, 9, 4, 9) * 2))
    cases = [(even, True, False), (uneven, False, True)]
    ranks = run_workers(2, statistics, cases)
    assert len(set(map(repr, ranks))) == 1
    for (problem, *_), steps in zip(cases, ranks[0], strict=True):
        check_formula(problem, steps)
        check_running(steps)


# -- what loops do ---------------------------------------------------------------------------------------------------


class Loop:
    """A model, its monitor and its optimizer."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
        self.model = sharded(net, [net[0]])
        self.monitor = kf.fsdp_monitor(self.model, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.generator = torch.Generator().manual_seed(dist.get_rank())

    def loss(self) -> Tensor:
        x, y = (torch.randn(4, n, generator=self.generator) for n in (5, 2))
        return F.mse_loss(self.model(x), y)

    def backward(self, sync: bool = True) -> None:
        self.model.set_requires_gradient_sync(sync)  # type: ignore[operator]
        self.loss().backward()

    def closure(self) -> Tensor:
        with torch.enable_grad():
            loss = self.loss()
            loss.backward()
        return loss

    def step(self, *syncs: bool) -> tuple[int, int, bool]:
        """A step with these backwards: see `figures`."""
        for sync in syncs:
            self.backward(sync)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.figures()

    def figures(self) -> tuple[int, int, bool]:
        """The newest step, its micro-batches, and whether its figures are known."""
        stats = self.monitor.stats
        assert stats is not None and (stats.grad_variance is None) == (stats.grad_sq is None)
        return stats.step, stats.micro_batches, stats.grad_variance is not None


class Raises(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise RuntimeError("by the test")


@on_workers(2)
def test_what_is_not_known_is_unknown() -> None:
    dist.init_process_group("gloo")
    n = 2
    # A last backward without sync: its gradient goes into the next step, which is therefore unknown too.
    loop = Loop()
    assert loop.step(True) == (0, n, True) and loop.step(True, False) == (1, 2 * n, False)
    assert "docs/frameworks.md" in str(loop.monitor.why)
    assert loop.step(True) == (2, n, False)
    assert "docs/frameworks.md" in str(loop.monitor.why)
    assert loop.step(False, True) == (3, 2 * n, True)
    # zero_grad without a step: FSDP2 has dropped what was reduced, and nothing else.
    for to_none in (True, False):
        loop = Loop()
        loop.step(True)
        loop.backward()
        loop.backward()
        loop.optimizer.zero_grad(to_none)
        assert loop.step(True, True) == ((1, 2 * n, True) if to_none else (1, 4 * n, False))
        assert loop.step(True) == (2, n, True)
    # Gradients that were changed between two backwards. torch's foreach functions leave a DTensor's version as it is.
    loop = Loop()
    loop.backward()
    torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1e-3, foreach=True)
    assert loop.step(True) == (0, 2 * n, False) and loop.step(True, True) == (1, 2 * n, True)
    # Gradients that were not set to zero, and zeros that were.
    loop = Loop()
    loop.backward()
    loop.optimizer.step()
    assert loop.step(True) == (1, n, False) and loop.step(True) == (2, n, True)
    loop.backward()
    loop.optimizer.step()
    loop.model.zero_grad(set_to_none=False)
    assert loop.step(True, True) == (4, 2 * n, True)
    # A backward that raises. FSDP2 keeps gradients that it had not reduced, until the next backward.
    first, _, last = loop.model.children()
    loop.model.forward = lambda x: Raises.apply(first(x)) @ torch.ones(8, 2) + last(torch.ones(4, 8))
    assert error(lambda: loop.backward(False)) == "RuntimeError: by the test"
    del loop.model.forward
    loop.model.reset_iter_state()  # type: ignore[operator]
    assert loop.step(True) == (5, n, False) and loop.step(True) == (6, n, True)
    # A closure with the step's last backward, as Lightning steps.
    loop.backward()
    loop.optimizer.step(loop.closure)
    assert loop.figures() == (7, 2 * n, True)
    loop.optimizer.zero_grad()
    # Two optimizers, each with some of the parameters; and one of another model.
    other = nn.Linear(2, 2)
    other(torch.ones(2)).sum().backward()
    halves = [torch.optim.SGD(part.parameters(), lr=0.0) for part in (loop.model[0], loop.model[2], other)]  # type: ignore[index]
    loop.backward()
    halves[2].step()
    loop.backward()
    for optimizer in halves:
        optimizer.step()
    assert loop.figures() == (8, 2 * n, True)
    loop.model.zero_grad()
    # The root's parameters are gathered after an evaluation, as the monitor is made again.
    loop.monitor.close()
    with torch.no_grad():
        loop.loss()
    loop.monitor = kf.fsdp_monitor(loop.model)
    assert loop.step(True) == (0, n, True)
    loop.monitor.close()


# -- wrong uses ------------------------------------------------------------------------------------------------------


@on_workers(2)
def test_wrong_uses_end_in_one_line() -> None:
    dist.init_process_group("gloo")
    two = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "tensor"))
    model = nn.Linear(6, 2, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), two["tensor"]))
    assert "weight is placed as" in error(lambda: kf.fsdp_monitor(sharded(model, [], mesh=two["data"])))
    model = sharded(nn.Linear(5, 2), [])
    kf.fsdp_monitor(model)
    for param in model.parameters():
        optimizer = torch.optim.SGD([param], lr=0.1)
        param.register_post_accumulate_grad_hook(lambda param, optimizer=optimizer: optimizer.step())
    assert "inside backward" in error(lambda: model(torch.ones(4, 5)).sum().backward())
