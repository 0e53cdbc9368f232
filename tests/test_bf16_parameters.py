"""bf16 parameters: the fused optimizers update fp32 masters, and the parameters are the masters' rounded values."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed import on_workers
from problems import flat, network, problem, update
from torch import Tensor, nn

import kfuse as kf
from kfuse.checkpoint.manager import read_weights
from kfuse.comm.buckets import plan_parameters
from kfuse.comm.step import StepPlan

BF16, F32 = torch.bfloat16, torch.float32
Make = Callable[..., Any]

OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda params, **more: kf.FusedAdamW(params, lr=1e-2, **more),
    "sgd": lambda params, **more: kf.FusedSGD(params, lr=1e-2, **more),
    "momentum": lambda params, **more: kf.FusedSGD(params, lr=1e-2, momentum=0.9, weight_decay=0.1, **more),
    "lamb": lambda params, **more: kf.FusedLAMB(params, lr=1e-2, **more),
}
ALL = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def batch(step: int, count: int = 8) -> tuple[Tensor, Tensor]:
    x, y = problem()
    places = torch.arange(step * count, (step + 1) * count) % len(x)
    return x[places].bfloat16(), y[places]


def gradients(net: nn.Module, step: int, parts: int = 1) -> list[list[Tensor]]:
    """Of each of the step's micro-batches, by torch alone: bf16."""
    pairs = zip(*(each.chunk(parts) for each in batch(step)), strict=True)
    return [list(torch.autograd.grad(F.cross_entropy(net(x).float(), y), list(net.parameters()))) for x, y in pairs]


def backward(net: nn.Module, opt: Any, step: int, parts: int) -> None:
    for j, (x, y) in enumerate(zip(*(each.chunk(parts) for each in batch(step)), strict=True)):
        with opt.micro_batch(samples=len(x), last=j == parts - 1):
            F.cross_entropy(net(x).float(), y).backward()


def train(net: nn.Module, opt: Any, steps: range, parts: int = 1) -> None:
    for step in steps:
        backward(net, opt, step, parts)
        update(opt)


def masters(net: nn.Module, opt: Any) -> list[Tensor]:
    return [opt.state[p]["master"] for p in net.parameters()]


def assert_rounded(net: nn.Module, opt: Any) -> None:
    """The parameters are their masters' rounded values."""
    assert all(torch.equal(p, m.bfloat16()) for p, m in zip(net.parameters(), masters(net, opt), strict=True))


def bits(net: nn.Module, opt: Any) -> list[Any]:
    """Of the parameters and of the optimizer's whole state."""
    tensors = [value for p in net.parameters() for value in (p, *(opt.state[p][name] for name in sorted(opt.state[p])))]
    return [(value.dtype, value.detach().reshape(-1).view(torch.uint8).tolist()) for value in tensors]


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# -- updates ----------------------------------------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.05}], ids=["", "clipped"])
def test_masters_are_the_parameters_of_an_fp32_training_with_these_gradients(make: Make, options: Any) -> None:
    """Micro-batches' bf16 gradients are added up in fp32: bit by bit the sums that an fp32 model would have."""
    net = network().bfloat16()
    twin = copy.deepcopy(net).float()
    opt, other = make(net.parameters(), **options), make(twin.parameters(), **options)
    for step in range(6):
        found = gradients(net, step, parts=4)
        train(net, opt, range(step, step + 1), parts=4)
        for p, parts in zip(twin.parameters(), zip(*found, strict=True), strict=True):
            total = torch.zeros_like(p)
            for part in parts:
                total += part.float() * 0.25
            p.grad = total
        other.step()
        other.zero_grad()
        assert all(map(torch.equal, masters(net, opt), twin.parameters()))
        assert_rounded(net, opt)
        assert opt.stats.grad_norm == pytest.approx(other.stats.grad_norm, rel=1e-6)
    assert {p.dtype for p in net.parameters()} == {BF16}
    for p in net.parameters():
        assert {name: value.dtype for name, value in opt.state[p].items()} == dict.fromkeys(opt.state[p], F32)


@pytest.mark.parametrize("way", ["in place", "another tensor"])
def test_changed_gradients_are_used(way: str) -> None:
    """Elements that were not changed keep their fp32 values."""
    net = network().bfloat16()
    opt = kf.FusedSGD(net.parameters(), lr=1.0)
    backward(net, opt, 0, parts=2)
    (bucket,) = opt.engine.gradient_buckets
    kept = dict(zip(bucket.layout.params, bucket.view(bucket.mean.clone()), strict=True))
    first = next(iter(net.parameters()))
    assert first.grad is not None and torch.equal(first.grad, kept[0].bfloat16())
    before = [p.detach().float().clone() for p in net.parameters()]
    if way == "in place":
        first.grad.mul_(0.5)
    else:
        first.grad = first.grad * 0.5
    used = [first.grad.float().clone(), *(kept[i] for i in range(1, 4))]
    opt.step()
    for start, gradient, master in zip(before, used, masters(net, opt), strict=True):
        assert torch.equal(master, start - gradient)


def test_a_parameter_without_a_gradient_stays() -> None:
    net = network().bfloat16()
    opt = kf.FusedAdamW(net.parameters(), lr=0.1)
    unused = copy.deepcopy(net[2].bias)
    for step in range(2):
        x, y = batch(step)
        F.cross_entropy(F.linear(net[:2](x), net[2].weight).float(), y).backward()
        update(opt)
    assert torch.equal(net[2].bias, unused) and "master" not in opt.state.get(net[2].bias, {})
    train(net, opt, range(2, 4))
    assert_rounded(net, opt)
    assert [int(opt.state[p]["step"]) for p in net.parameters()] == [4, 4, 4, 2]


# -- mixed types, refusals --------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """bf16 matrices and fp32 normalisation, by turns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False).bfloat16() for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(4))

    def parameters_by_turns(self) -> list[nn.Parameter]:
        return [p for pair in zip(self.layers, self.norms, strict=True) for m in pair for p in m.parameters()]

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + norm(layer(x.bfloat16()).float())
        return x


@pytest.mark.parametrize("kind", ["adamw", "momentum"])
def test_a_model_of_both_types(kind: str) -> None:
    make = OPTIMIZERS[kind]
    net = Mixed()
    twin = copy.deepcopy(net).float()
    opt, other = make(net.parameters_by_turns()), make(twin.parameters_by_turns())
    assert len(opt.engine.gradient_buckets) == 2, "types that alternate do not cut buckets short"
    for bucket in opt.engine.gradient_buckets:
        assert {opt.engine.params[i].dtype for i in bucket.layout.params} == {bucket.layout.dtype}
    for step in range(4):
        net(problem()[0][4 * step : 4 * step + 4]).square().sum().backward()
        for p, q in zip(net.parameters_by_turns(), twin.parameters_by_turns(), strict=True):
            assert p.grad is not None and p.grad.dtype == p.dtype
            q.grad = p.grad.float().clone()
        update(opt, other)
    for p, q in zip(net.parameters_by_turns(), twin.parameters_by_turns(), strict=True):
        assert torch.equal(p if p.dtype == F32 else opt.state[p]["master"], q)


def test_buckets_are_in_the_order_of_backward() -> None:
    """A type's last bucket closes with its first parameter; the order of buckets is that of their completion."""
    params = [torch.empty(64, dtype=BF16 if i % 3 else F32) for i in range(12)]
    layouts = plan_parameters(params, [0] * 12, 3 * 64)
    assert [layout.params for layout in layouts] == [(11, 10, 8), (7, 5, 4), (9, 6, 3), (2, 1), (0,)]
    assert [layout.dtype for layout in layouts] == [BF16, BF16, F32, BF16, F32]


# -- parameters that are changed by other means -----------------------------------------------------------------------


def test_elements_that_were_not_changed_keep_their_masters() -> None:
    net = network().bfloat16()
    opt = kf.FusedSGD(net.parameters(), lr=1e-2)
    train(net, opt, range(3))
    with torch.no_grad():
        net[0].weight[0].clamp_(max=-1.0)  # as weights are clipped
    before = [m.clone() for m in masters(net, opt)]
    for p in net.parameters():
        p.grad = torch.zeros_like(p)  # so that the update moves nothing
    opt.step()
    before[0][0] = -1.0
    assert all(map(torch.equal, masters(net, opt), before))
    assert net[0].weight[0].tolist() == [-1.0] * 4


@pytest.mark.parametrize("kind", ["adamw", "sgd"])  # without momentum the masters are all the state
def test_freezing_and_unfreezing_keeps_masters(kind: str) -> None:
    net = network().bfloat16()
    opt = OPTIMIZERS[kind](net.parameters())
    train(net, opt, range(3))
    before = [m.clone() for m in masters(net, opt)]
    for frozen in (True, False):
        net[0].requires_grad_(not frozen)
        opt.rebuild()
        assert all(map(torch.equal, masters(net, opt), before))
    train(net, opt, range(3, 5))
    assert_rounded(net, opt)


# -- state dicts ------------------------------------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize(("order", "done"), [("model first", 3), ("optimizer first", 0)])
def test_a_training_that_is_loaded_goes_on_bit_by_bit(make: Make, order: str, done: int) -> None:
    net = network().bfloat16()
    opt = make(net.parameters())
    train(net, opt, range(done))
    states = through_a_file((net.state_dict(), opt.state_dict()))
    train(net, opt, range(done, 6))
    other = network().bfloat16()
    with torch.no_grad():
        other[0].weight.add_(1.0)
    second = make(other.parameters())
    loads = [lambda: other.load_state_dict(states[0]), lambda: second.load_state_dict(states[1])]
    for load in loads if order == "model first" else reversed(loads):
        load()
    train(other, second, range(done, 6))
    assert bits(other, second) == bits(net, opt)


def test_torchs_adamw_takes_our_state_and_we_take_its() -> None:
    """torch rounds moments to the parameter's type. From its state the master is the parameter itself."""
    net = network().bfloat16()
    opt = kf.FusedAdamW(net.parameters(), lr=1e-2)
    train(net, opt, range(3))
    theirs = copy.deepcopy(net)
    plain = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    plain.load_state_dict(through_a_file(opt.state_dict()))
    for p, q in zip(net.parameters(), theirs.parameters(), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(plain.state[q][name], opt.state[p][name].bfloat16())
    for step in (3, 4):
        for q, g in zip(theirs.parameters(), gradients(theirs, step)[0], strict=True):
            q.grad = g
        plain.step()
    again = copy.deepcopy(theirs)
    back = kf.FusedAdamW(again.parameters(), lr=1e-2)
    back.load_state_dict(through_a_file(plain.state_dict()))
    for q, r in zip(theirs.parameters(), again.parameters(), strict=True):
        assert torch.equal(back.state[r]["exp_avg"], plain.state[q]["exp_avg"].float())
        assert int(back.state[r]["step"]) == 5
    train(again, back, range(9, 10))
    for master, q in zip(masters(again, back), theirs.parameters(), strict=True):
        torch.testing.assert_close(master, q.float(), rtol=0, atol=0.02)  # two updates of lr: not from a stale master
    assert_rounded(again, back)


def test_torchs_sgd_goes_on_from_our_state() -> None:
    """torch's fused kernel would leave all but the last elements of a bf16 parameter as they are."""
    net = network().bfloat16()
    opt = kf.FusedSGD(net.parameters(), lr=1e-2, momentum=0.9)
    train(net, opt, range(3))
    plain, before = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9), copy.deepcopy(net)
    plain.load_state_dict(opt.state_dict())
    plain.param_groups[0]["lr"] = 0.5  # updates above the spacing of bf16
    for p, grad in zip(net.parameters(), gradients(net, 3)[0], strict=True):
        p.grad = grad
    plain.step()
    assert all((p != q).float().mean() > 0.5 for p, q in zip(net.parameters(), before.parameters(), strict=True))


# -- kf.fit -----------------------------------------------------------------------------------------------------------


def test_fit_casts_the_models_inputs_alone_and_saves_bf16(tmp_path: Path) -> None:
    seen = []

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network().bfloat16()

        def forward(self, x: Tensor, y: Tensor) -> Any:
            seen.append(x.dtype)
            logits = self.inner(x)
            return {"loss": F.cross_entropy(logits.float(), y), "logits": logits}

    net = Net()
    x, y = problem()
    data: Any = {"x": x, "y": y}
    metrics: Any = {"exact": lambda output, target: (target["x"].dtype == F32) * torch.ones(())}
    settings: Any = {"epochs": 4, "train_precision": "bf16-true", "heldout": data, "metrics": metrics}
    settings["run_dir"] = tmp_path
    summary = kf.fit(net, data, kf.FusedAdamW(net.parameters(), lr=1e-2), **settings)
    assert summary is not None and set(seen) == {BF16}
    assert summary["heldout_loss"] < 1.0 and summary["heldout_metrics"]["exact"] == 1.0
    assert {value.dtype for value in read_weights(summary["model"]).values()} == {BF16}


# -- several workers --------------------------------------------------------------------------------------------------


@on_workers(2)
def test_local_sgd_averages_the_masters() -> None:
    """Averages of rounded parameters would undo what the masters have gathered below bf16's spacing.

    Masters before and after the workers' models are averaged.
    """
    kf.init()
    net = network().bfloat16()
    opt = kf.FusedAdamW(net.parameters(), lr=1e-4)
    x, y = problem()
    for step in range(3):
        opt.begin(StepPlan(16, (range(1), range(1, 2)), local=8))
        with opt.micro_batch(samples=8):
            part = slice(16 * step + 8 * kf.rank(), 16 * step + 8 * kf.rank() + 8)
            F.cross_entropy(net(x[part].to(BF16)).float(), y[part]).backward()
        update(opt)
    if kf.rank():
        with torch.no_grad():
            net[0].bias[3] = 0.5  # a change of the user's counts too
    before = [m.clone() for m in masters(net, opt)]
    if kf.rank():
        before[1][3] = 0.5
    one, other = kf.allgather(flat(before))
    opt.updates.average_models()
    assert_rounded(net, opt)
    assert not torch.equal(one, other)
    assert torch.equal(flat(masters(net, opt)), ((one.float() + other.float()) / 2).double())
