"""len(), .epoch and .step of kf.DataLoader and of its steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.nn.functional as F
from problems import Seen, network, problem, update

import kfuse as kf
from kfuse.data import Source


class Rows(Source):
    shards = 1

    def open(self, shard: int, position: int) -> Iterator[Any]:
        return iter([*zip(*problem(20), strict=True)][position:])


def train(data: Any, **arguments: Any) -> Iterator[tuple[kf.DataLoader, Any]]:
    """Yields the loader and each step, before it is made."""
    net = network()
    opt = kf.FusedSGD(net.parameters())
    loop = kf.DataLoader(net, data, opt, batch_size=8, micro_batch=4, **arguments)
    for step in loop:
        yield loop, step
        sizes = []
        for x, y in step:
            F.cross_entropy(net(x), y).backward()
            sizes.append(len(x))
        assert len(sizes) == len(step)
        update(opt)
    yield loop, None


@pytest.mark.parametrize(
    ("data", "arguments", "epochs"),
    [
        (problem(20), {"epochs": 2, "steps": 4}, [0, 0, 0, 1]),
        (problem(20), {"steps": 7}, [0, 0, 0, 1, 1, 1, 2]),
        (Rows(), {"steps": 4}, [0, 0, 0, 0]),
    ],
)
def test_a_loader_knows_its_steps_and_where_it_is(data: Any, arguments: dict[str, Any], epochs: list[int]) -> None:
    seen = []
    for number, (loop, step) in enumerate(train(data, **arguments)):
        assert len(loop) == len(epochs) and loop.step == number
        if step is not None:
            assert step.number == number and step.epoch == loop.epoch
            seen.append(step.epoch)
    assert seen == epochs


def test_the_length_follows_the_batch_size() -> None:
    policy = Seen({0: kf.Decision(batch_size=16)})
    lengths = [len(loop) for loop, _ in train(problem(64), epochs=2, policy=policy)]
    assert lengths[0] == 16 and lengths[-1] == len(lengths) - 1 < 16
