"""Gradients that no backward of the loss produced are reduced too: set by hand, or of a second point as in SAM."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed import run_workers
from torch import Tensor, nn

import kfuse as kf

PAIRS: dict[str, tuple[Any, Any]] = {
    "adamw": (lambda p: kf.FusedAdamW(p, lr=0.01), lambda p: torch.optim.AdamW(p, lr=0.01)),
    "sgd": (lambda p: kf.FusedSGD(p, lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "wrapped": (lambda p: kf.Optimizer(torch.optim.Adam(p, lr=0.01)), lambda p: torch.optim.Adam(p, lr=0.01)),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.last, self.unused = nn.Linear(5, 20), nn.Linear(20, 2), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.first(x)))
        return out

    def used(self) -> list[nn.Parameter]:
        return [*self.first.parameters(), *self.last.parameters()]


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(100 * step + rank))
    return x, torch.stack([x.sum(1).sin(), x[:, 0] * x[:, 1]], 1)


def full(step: int, size: int) -> tuple[Tensor, Tensor]:
    parts = [batch(step, rank) for rank in range(size)]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def by_hand(net: Net, opt: Any, x: Tensor, y: Tensor) -> None:
    grads = torch.autograd.grad(F.mse_loss(net(x), y), net.used())
    for p, grad in zip(net.used(), grads, strict=True):
        p.grad = grad
    opt.step()
    opt.zero_grad()


def in_a_context(net: Net, opt: Any, x: Tensor, y: Tensor) -> None:
    """Two micro-batches a worker, of unequal sizes."""
    for part, last in ((slice(0, 3), False), (slice(3, 8), True)):
        with opt.micro_batch(samples=part.stop - part.start, last=last):
            grads = torch.autograd.grad(F.mse_loss(net(x[part]), y[part]), net.used())
            for p, grad in zip(net.used(), grads, strict=True):
                p.grad = grad
    opt.step()
    opt.zero_grad()


def half_and_half(net: Net, opt: Any, x: Tensor, y: Tensor) -> None:
    """One layer's gradient set by hand, then a backward through the rest."""
    for p, grad in zip(
        net.first.parameters(), torch.autograd.grad(F.mse_loss(net(x), y), [*net.first.parameters()]), strict=True
    ):
        p.grad = grad
    hidden = torch.tanh(net.first(x)).detach()
    F.mse_loss(net.last(hidden), y).backward()
    opt.step()
    opt.zero_grad()


def sharpness_aware(net: Net, opt: Any, x: Tensor, y: Tensor) -> None:
    F.mse_loss(net(x), y).backward()
    norm = torch.stack([p.grad.norm() for p in net.used() if p.grad is not None]).norm()
    olds = [p.detach().clone() for p in net.used()]
    with torch.no_grad():
        for p in net.used():
            assert p.grad is not None
            p.add_(p.grad * (0.05 / norm))
    opt.zero_grad()
    F.mse_loss(net(x), y).backward()
    for p, old in zip(net.used(), olds, strict=True):
        p.data = old
    opt.step()
    opt.zero_grad()


def zeroed(net: Net, opt: Any, x: Tensor, y: Tensor) -> None:
    """A layer that was used once stays in use with zero gradients: its momentum and weight decay go on."""
    opt.zero_grad(set_to_none=False)
    loss = F.mse_loss(net(x), y)
    if torch.equal(net.unused.weight, Net().unused.weight):
        loss = loss + net.unused(torch.ones(3)).square().mean()
    loss.backward()
    opt.step()


LOOPS = {
    "zeroed": zeroed,
    "by hand": by_hand,
    "in a context": in_a_context,
    "half": half_and_half,
    "sam": sharpness_aware,
}


def beside_a_twin(steps: int) -> dict[str, float]:
    """The largest relative difference to one torch optimizer over all workers' samples."""
    session = kf.init()
    rank, size = session.group.rank, session.group.size
    found = {}
    for optimizer, (fused, plain) in PAIRS.items():
        for name, loop in LOOPS.items():
            ours, theirs = Net(), Net()
            opt, reference = fused(ours.parameters()), plain(theirs.parameters())
            for step in range(steps):
                loop(ours, opt, *batch(step, rank))
                {"sam": sharpness_aware, "zeroed": zeroed}.get(name, by_hand)(theirs, reference, *full(step, size))
            pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
            found[f"{optimizer}, {name}"] = max(float((a - b).detach().norm() / b.detach().norm()) for a, b in pairs)
            assert float((theirs.first.weight - Net().first.weight).detach().norm()) > 1e-3
            assert opt.stats is not None and opt.stats.micro_batches == size * (2 if name == "in a context" else 1)
    return found


def test_gradients_set_by_hand_are_reduced_and_applied() -> None:
    for found in run_workers(2, beside_a_twin, 5):
        for name, error in found.items():
            assert error <= 1e-5, name


def test_gradients_that_share_their_memory_are_each_packed_as_they_are() -> None:
    """Autograd gives both views the sum's own gradient; each parameter group has a bucket of its own."""
    first, second = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(3, 2))
    opt = kf.FusedSGD([{"params": [first]}, {"params": [second]}], lr=1.0)
    slope, kept = torch.arange(6.0), torch.ones(2, 3)
    for j in range(2):
        with opt.micro_batch(samples=4, last=j == 1):
            ((first.view(-1) + second.view(-1)) * slope).sum().backward()
    opt.step()
    opt.zero_grad()
    assert torch.equal(first.view(-1), -slope)
    assert torch.equal(second.view(-1), -slope)
    with opt.micro_batch(samples=4):
        first.grad = kept
    opt.step()
    assert torch.equal(kept, torch.ones(2, 3))
    assert torch.equal(first.view(-1), -slope - 1)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("adamw", torch.float32), ("sgd", torch.bfloat16), ("wrapped", torch.bfloat16)], ids=str
)
def test_data_of_a_gradient_that_was_replaced(kind: str, dtype: torch.dtype) -> None:
    """`p.grad.data = tensor`: in other memory, of another dtype, or the same memory with other strides."""
    ours, theirs = PAIRS[kind]
    weights = [nn.Parameter(torch.arange(9, dtype=dtype).view(3, 3)), nn.Parameter(torch.ones(4, dtype=dtype))]
    twins = [nn.Parameter(p.detach().clone()) for p in weights]
    opt, plain = ours(weights), theirs(twins)
    new = [
        lambda grad: torch.full((3, 3), 7.0, dtype=dtype),
        lambda grad: grad.t(),
        lambda grad: grad,
        lambda grad: torch.full((3, 3), -2.0, dtype=torch.float64) if kind != "wrapped" else grad,
        lambda grad: torch.zeros(3, 3, dtype=dtype),
        lambda grad: grad,
    ]
    slope = torch.linspace(-1, 1, 9).view(3, 3)
    for step, replaced in enumerate(new):
        for params, each in ((weights, opt), (twins, plain)):
            each.zero_grad()
            ((params[0] * slope).sum() + params[1].square().sum()).backward()
            grad = params[0].grad
            assert grad is not None and torch.equal(grad, slope.to(dtype))
            value = replaced(grad.data)
            grad.data = value if each is opt else value.to(dtype)
            if step == 4:  # dropped, by other means than opt.zero_grad()
                for p in params:
                    p.grad = None
                continue
            each.step()
    for p, q in zip(weights, twins, strict=True):
        tolerance = 1e-5 if dtype == torch.float32 else 0.05
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)


def test_data_of_a_gradient_of_another_shape_is_refused() -> None:
    p = nn.Parameter(torch.ones(2, 3))
    opt = kf.FusedSGD([p], lr=0.1)
    p.square().sum().backward()
    assert p.grad is not None
    p.grad.data = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"^parameter 0 of shape \(2, 3\): its p.grad.data has shape \(3,\)$"):
        opt.step()
    assert torch.equal(p, torch.ones(2, 3))


def test_an_optimizer_whose_parameters_never_get_a_gradient_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    net = nn.Linear(3, 1)
    opt = kf.FusedAdamW(net.parameters())
    trained = copy.deepcopy(net)
    with caplog.at_level(logging.WARNING, "kfuse"):
        for _ in range(3):
            trained(torch.ones(2, 3)).sum().backward()
            opt.step()
            opt.zero_grad()
    [record] = caplog.records
    assert record.message.startswith("FusedAdamW.step(): none of its 2 parameters has ever had a gradient")


def scaled_by_hand() -> str:
    kf.init()
    net = Net()
    opt = kf.FusedSGD(net.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for p in net.used():
        p.grad = torch.ones_like(p)
    scaler.scale(torch.zeros(()))
    try:
        scaler.step(opt)
    except RuntimeError as error:
        return str(error)
    return ""


def test_gradients_set_by_hand_under_a_grad_scaler_are_refused_on_several_workers() -> None:
    for message in run_workers(2, scaled_by_hand):
        assert "must come from backward" in message
    assert scaled_by_hand() == "", "one worker has nobody to disagree with"
