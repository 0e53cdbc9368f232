"""Activation checkpointing changes no number: with bare backwards, in micro-batches, and in a training loop.

Reentrant checkpointing runs each segment's backward inside the outer one, and autograd calls back at the end of that
inner backward. A step that ends there is cut in the middle.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import kfuse as kf

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(3))
Y = X @ torch.randn(4, 2, generator=torch.Generator().manual_seed(4))


class Net(nn.Module):
    """Two segments. reentrant: None: without checkpointing."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.reentrant = nn.Linear(4, 6), nn.Linear(6, 2), reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            out: Tensor = self.last(torch.tanh(self.first(x)))
            return out
        x = x.detach().requires_grad_()  # without it reentrant checkpointing computes no gradients
        hidden = checkpoint(lambda v: torch.tanh(self.first(v)), x, use_reentrant=self.reentrant)
        out = checkpoint(self.last, hidden, use_reentrant=self.reentrant)
        return out


def loss(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).square().mean()


def by_hand(reentrant: bool | None, how: str, steps: int = 3) -> list[float]:
    """A loop of one's own on this worker's samples; returns the parameters."""
    kf.init()
    net = Net(reentrant)
    opt = kf.FusedSGD(net.parameters(), lr=0.1)
    x, y = X[kf.rank() :: kf.size()], Y[kf.rank() :: kf.size()]
    if how == "accumulate":
        opt.accumulate(2)
    if how == "fit":
        kf.fit(net, (X, Y), opt, loss_fn=loss, batch_size=12, batch_micro=3, train_epochs=2)
    for _ in range(steps if how != "fit" else 0):
        if how == "bare":
            loss(net(x), y).backward()
        elif how == "accumulate":
            for part in (slice(0, 6), slice(6, 12)):
                (loss(net(x[part]), y[part]) / 2).backward()
        else:
            for part in (slice(0, 6), slice(6, 12)):
                with opt.micro_batch(samples=6, last=part.stop == 12):
                    loss(net(x[part]), y[part]).backward()
        opt.step()
        opt.zero_grad()
    return torch.cat([p.detach().view(-1) for p in net.parameters()]).tolist()


@pytest.mark.parametrize("how", ["bare", "accumulate", "micro_batch", "fit"])
def test_checkpointing_changes_nothing(how: str) -> None:
    expected = by_hand(None, how)
    assert by_hand(False, how) == expected
    assert by_hand(True, how) == expected


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch's, of the inner segment
def test_nested_segments_and_a_retained_graph() -> None:
    """The outermost backward's end counts, and a second backward through the same graph is a micro-batch of its own."""
    net, twin = Net(None), Net(None)
    opt, plain = kf.FusedSGD(net.parameters(), lr=0.1), torch.optim.SGD(twin.parameters(), lr=0.1)
    opt.accumulate(2)

    def inner(v: Tensor) -> Any:
        return checkpoint(lambda u: torch.tanh(net.first(u)), v, use_reentrant=True)

    def outer(v: Tensor) -> Any:
        return checkpoint(net.last, checkpoint(inner, v, use_reentrant=True), use_reentrant=True)

    for _ in range(2):
        half = loss(checkpoint(outer, X.clone().requires_grad_(), use_reentrant=True), Y) / 2
        half.backward(retain_graph=True)
        half.backward()
        (loss(twin(X), Y)).backward()
        opt.step(), plain.step()
        opt.zero_grad(), plain.zero_grad()
    assert all(torch.allclose(p, q) for p, q in zip(net.parameters(), twin.parameters(), strict=True))
