"""len(), .epoch and .step of kf.DataLoader and of its steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F
from problems import network, problem

import kfuse as kf


class Grows(kf.BasePolicy):
    """Twice the batch from the first step on, as soon as it can be."""

    def decide(self, signals: kf.Signals) -> kf.Decision | None:
        return kf.Decision(batch_size=16)


def loader(count: int, **arguments: Any) -> tuple[kf.DataLoader, kf.FusedSGD, Any]:
    net = network()
    opt = kf.FusedSGD(net.parameters())
    return kf.DataLoader(problem(count), net, opt, batch_size=8, batch_micro=4, **arguments), opt, net


@pytest.mark.parametrize(
    ("count", "arguments", "steps"),
    [
        (20, {"train_epochs": 2}, 6),
        (20, {"train_epochs": 2, "train_steps": 4}, 4),
        (20, {"train_steps": 7}, 7),
        (16, {}, 2),
    ],
)
def test_a_loader_knows_its_steps_and_where_it_is(count: int, arguments: dict[str, Any], steps: int) -> None:
    loop, opt, net = loader(count, **arguments)
    assert len(loop) == steps and (loop.epoch, loop.step) == (0, 0)
    seen = []
    for number, step in enumerate(loop):
        assert step.number == loop.step == number and step.epoch == loop.epoch
        assert len(loop) == steps
        sizes = []
        for x, y in step:
            F.cross_entropy(net(x), y).backward()
            sizes.append(len(x))
        assert len(sizes) == len(step)
        opt.step()
        opt.zero_grad()
        seen.append(step.epoch)
    a_epoch = -(-count // 8)
    assert seen == [number // a_epoch for number in range(steps)]
    assert (loop.step, len(loop)) == (steps, steps)


def test_the_length_follows_the_batch_size() -> None:
    loop, opt, net = loader(64, train_epochs=2, policy=Grows())
    assert len(loop) == 16
    steps = 0
    for step in loop:
        for x, y in step:
            F.cross_entropy(net(x), y).backward()
        opt.step()
        opt.zero_grad()
        steps += 1
    assert len(loop) == steps < 16
