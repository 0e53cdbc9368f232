"""A bucket's last gradient takes all of them: gradients, updates and errors are those of a hook for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import kfuse as kf
from kfuse.comm.hooks import BucketHooks


class Loop:
    """Steps of three layers, whose gradients are noted as each backward is over."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.params = [*self.layers.parameters()]
        self.opt, self.seen = kf.FusedAdamW(self.params, lr=0.1), list[Any]()

    def loss(self, *order: int, reentrant: bool = False) -> Tensor:
        y = torch.ones(2, 4, requires_grad=True)
        for k in order or range(3):
            y = checkpoint(self.layers[k], y, use_reentrant=True) if reentrant else self.layers[k](y)  # type: ignore[no-untyped-call]
            y = torch.tanh(y)
        return y.square().mean()

    def step(self, *losses: Tensor) -> None:
        for loss in losses:
            loss.backward()  # type: ignore[no-untyped-call]
        self.seen += [None if p.grad is None else p.grad.tolist() for p in self.params]
        self.opt.step()
        self.opt.zero_grad()


def twice(it: Loop, **settings: Any) -> None:
    with it.opt.micro_batch(samples=2, **settings):
        it.loss().backward()  # type: ignore[no-untyped-call]
        it.loss(0, 1).backward()  # type: ignore[no-untyped-call]
    it.step()


def accumulated(it: Loop, *second: int) -> None:
    it.opt.accumulate(2)
    it.step(it.loss() / 2, it.loss(*second) / 2)
    it.opt.accumulate(1)


def retained(it: Loop) -> None:
    (loss := it.loss()).backward(retain_graph=True)  # type: ignore[no-untyped-call]
    it.opt.zero_grad()
    it.step(loss)


def frozen_and_thawed(it: Loop) -> None:
    for trained in (False, True):
        it.layers[0].requires_grad_(trained)
        it.opt.rebuild()
        it.step(it.loss())


def replaced(it: Loop) -> None:
    for p in it.params:
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", 2 * p.grad))  # type: ignore[operator]
    it.step(it.loss())


def failing(it: Loop) -> None:
    with it.layers[1].weight.register_hook(lambda grad: 1 / 0), pytest.raises(ZeroDivisionError):
        twice(it)


UNUSUAL: dict[str, Callable[[Loop], None]] = {
    "another one comes last": lambda it: it.step(it.loss(2, 0, 1)),
    "the last one never comes": lambda it: it.step(it.loss(1, 2)),
    "the first one never comes": lambda it: it.step(it.loss(0, 1)),
    "comes twice": twice,
    "several losses": lambda it: twice(it, several_backwards=True),
    "two backwards": lambda it: accumulated(it, 1, 2),
    "retain_graph": retained,
    "frozen and thawed": frozen_and_thawed,
    "reentrant checkpointing": lambda it: it.step(it.loss(reentrant=True)),
    "a hook that replaces p.grad": replaced,
    "the second backward reaches neither the first nor the last": lambda it: accumulated(it, 1),
    "a backward that fails": failing,
}


@pytest.mark.parametrize("case", UNUSUAL)
def test_what_is_unusual_is_as_with_a_hook_for_each(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kf.init()
    found = []
    for one_hook in (True, False):
        if not one_hook:
            monkeypatch.setattr(BucketHooks, "watch_last", lambda *_: None)
        it = Loop()
        for _ in range(2):
            it.step(it.loss())
        assert (it.opt.engine.hooks[0].last is not None) == one_hook
        try:
            UNUSUAL[case](it)
        except RuntimeError as error:
            it.seen.append(str(error))
            it.opt.zero_grad()
        for _ in range(2):
            it.step(it.loss())
        found.append([*it.seen, *(p.tolist() for p in it.params)])
    assert found[0] == found[1]
