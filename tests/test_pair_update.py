"""Pair averaging follows its published update exactly, under a seeded order of events, and at the predicted rate.

Real workers (model, fused optimizer, server, pulling thread), all in one process, so that the test sets the order.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import kfuse as kf
from kfuse.comm.sync.pair import Pair

OPTIMIZERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "sgd": (lambda p: kf.FusedSGD(p, lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "momentum": (
        lambda p: kf.FusedSGD(p, lr=0.05, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    ),
    "adamw": (lambda p: kf.FusedAdamW(p, lr=0.01), lambda p: torch.optim.AdamW(p, lr=0.01)),
    "wrapped": (
        lambda p: kf.Optimizer(torch.optim.RMSprop(p, lr=0.01)),
        lambda p: torch.optim.RMSprop(p, lr=0.01),
    ),
}


class Quadratic(nn.Module):
    """1/2 sum h x^2 - b x, in two parameters."""

    def __init__(self, h: Tensor, b: Tensor, start: Tensor) -> None:
        super().__init__()
        self.h, self.b = h, b
        self.first, self.rest = nn.Parameter(start[:3].clone()), nn.Parameter(start[3:].clone())

    def forward(self) -> Tensor:
        x = torch.cat([self.first, self.rest])
        return (0.5 * self.h * x * x - self.b * x).sum()

    def values(self) -> Tensor:
        return torch.cat([self.first, self.rest]).detach().clone()


class Real:
    """Worker `rank` as it is in training."""

    def __init__(self, rank: int, model: Quadratic, make: Callable[[Any], Any]) -> None:
        self.model, self.opt, self.next = model, make(model.parameters()), 0
        self.pair = Pair(self.opt.updates.weights(), rank, "127.0.0.1", lambda step, ranks: self.next)
        self.opt.average_with(self.pair)

    def pull(self, rank: int) -> None:
        """The snapshot that `rank` has published last arrives now."""
        self.next = rank
        self.pair.begin_step(0)
        assert self.pair.puller.await_end(10.0)

    def step(self) -> None:
        self.model().backward()
        self.opt.step()
        self.opt.zero_grad()


class Published:
    """The published recursion, in float64: x <- (x + y) / 2, then the optimizer's update by the old x's gradient."""

    def __init__(self, model: Quadratic, make: Callable[[Any], Any]) -> None:
        self.model, self.opt = model, make(model.parameters())
        self.snapshot, self.arrived = model.values(), None

    def step(self) -> None:
        self.opt.zero_grad()
        self.model().backward()
        if self.arrived is not None:
            with torch.no_grad():
                self.model.first.copy_((self.model.first + self.arrived[:3]) / 2)
                self.model.rest.copy_((self.model.rest + self.arrived[3:]) / 2)
            self.arrived = None
        self.opt.step()
        self.snapshot = self.model.values()


def workers(count: int, name: str, h: Tensor, b: Tensor, starts: Tensor) -> tuple[list[Real], list[Published]]:
    ours, theirs = OPTIMIZERS[name]
    real = [Real(rank, Quadratic(h, b, starts[rank]), ours) for rank in range(count)]
    for one in real:
        one.pair.peers = {rank: other.pair.address for rank, other in enumerate(real) if other is not one}
    published = [Published(Quadratic(h.double(), b.double(), starts[rank].double()), theirs) for rank in range(count)]
    return real, published


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_order_of_events_gives_the_published_update(name: str) -> None:
    """A pull may come long before the step that uses it, so snapshots are old; a step may come without any pull."""
    count, generator, order = 4, torch.Generator().manual_seed(1), random.Random(7)
    h, b = torch.linspace(0.3, 2.0, 7), torch.randn(7, generator=generator)
    real, published = workers(count, name, h, b, torch.randn(count, 7, generator=generator))
    pulls = old = 0
    for _ in range(300):
        i = order.randrange(count)
        if order.random() < 0.5 and published[i].arrived is None:
            j = order.choice([rank for rank in range(count) if rank != i])
            real[i].pull(j)
            published[i].arrived = published[j].snapshot
            pulls += 1
        else:
            snapshots = [each.snapshot for each in published]
            old += published[i].arrived is not None and not any(published[i].arrived is each for each in snapshots)
            real[i].step()
            published[i].step()
            torch.testing.assert_close(
                real[i].model.values().double(), published[i].model.values(), rtol=2e-5, atol=2e-6
            )
    assert pulls > 80 and old > 20
    for one in real:
        one.pair.close()


def test_masters_of_16_bit_parameters_are_averaged() -> None:
    """In fp32, and the parameters are their rounded values. (A learning rate of 0 leaves them alone otherwise.)"""
    real = []
    for rank in range(2):
        net = nn.Linear(5, 3).to(torch.bfloat16)
        opt = kf.FusedSGD(net.parameters(), lr=0.0)
        for weight in opt.updates.weights():
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(rank)))
        opt.updates.weights_changed()
        pair = Pair(opt.updates.weights(), rank, "127.0.0.1", lambda step, ranks: ranks[0])
        opt.average_with(pair)
        real.append((net, opt, pair, [weight.clone() for weight in opt.updates.weights()]))
    (net, opt, pair, mine), (_, _, other, theirs) = real
    pair.peers = {1: other.address}
    pair.begin_step(0)
    assert pair.puller.await_end(10.0)
    net(torch.ones(4, 5, dtype=torch.bfloat16)).sum().backward()
    opt.step()
    for weight, p, one, two in zip(opt.updates.weights(), net.parameters(), mine, theirs, strict=True):
        assert weight.dtype == torch.float32
        torch.testing.assert_close(weight, (one + two) / 2)
        assert torch.equal(p, weight.to(torch.bfloat16))
    pair.close()
    other.close()


def moments(n: int, h: float, lr: float) -> np.ndarray:
    """What an event, the step of a random worker of n with a random other one's snapshot, makes of u and v: [2, 2].

    u is the expected mean of x_k^2 over the workers, v that of x_k x_l over k != l. With a = 1/2 - lr h worker i's step
    is x_i <- a x_i + x_j / 2 (and - lr times the noise of its gradient), so both are linear in u and v.
    """
    a = 0.5 - lr * h
    return np.eye(2) + np.array(
        [
            [(a * a + 0.25 - 1) / n, a / n],
            [1 / (n * (n - 1)), 2 * ((a - 1) * (n - 1) + (n - 2) / 2) / (n * (n - 1))],
        ]
    )


def pulls_and_steps(order: random.Random, real: list[Real]) -> Real:
    """A random worker pulls from a random other one, and makes a step. Returns it."""
    i = order.randrange(len(real))
    real[i].pull(order.choice([rank for rank in range(len(real)) if rank != i]))
    real[i].step()
    return real[i]


@pytest.mark.parametrize("n", [2, 4])
def test_a_quadratic_falls_at_the_predicted_rate(n: int) -> None:
    """The rate is the matrix's largest eigenvalue."""
    h, events, runs, lr = torch.tensor([0.2, 0.3, 0.5, 0.8]), 100 * n, 2, 0.1
    rates = []
    for run in range(runs):
        order, start = random.Random(run), torch.ones(4).expand(n, 4)
        real, _ = workers(n, "sgd", h, torch.zeros(4), start)
        for _ in range(events):
            pulls_and_steps(order, real)
        squares = torch.stack([one.model.values().double() for one in real]).square().mean(0)
        rates.append(squares.log().numpy() / events)
        for one in real:
            one.pair.close()
    found = np.mean(rates, axis=0)
    expected = np.log([np.abs(np.linalg.eigvals(moments(n, float(each), lr))).max() for each in h])
    np.testing.assert_allclose(found, expected, rtol=0.1)


def test_noisy_gradients_leave_the_predicted_error() -> None:
    """With noise of variance 1 in each gradient u goes to a limit, which averaging makes smaller."""
    n, h, lr, width, order = 3, 2.0, 0.1, 400, random.Random(2)
    generator = torch.Generator().manual_seed(3)
    real, _ = workers(n, "sgd", torch.full((width,), h), torch.zeros(width), torch.zeros(n, width))
    squares = []
    for event in range(900):
        for one in real:
            one.model.b = torch.randn(width, generator=generator)
        pulls_and_steps(order, real)
        if event >= 100:
            squares.append(float(torch.stack([one.model.values() for one in real]).square().mean()))
    for one in real:
        one.pair.close()
    expected = np.linalg.solve(np.eye(2) - moments(n, h, lr), [lr**2 / n, 0.0])[0]
    alone = lr**2 / (1 - (1 - lr * h) ** 2)
    assert expected < 0.75 * alone
    assert np.mean(squares) == pytest.approx(expected, rel=0.1)
