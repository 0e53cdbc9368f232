"""Small problems, networks that learn them, and optimizers with their twins of torch, for tests of training loops."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfuse as kf
from kfuse.train.reporter import Reporter


def problem(count: int = 64) -> tuple[Tensor, Tensor]:
    """Inputs (count, 4) and labels in 0..2, which a linear map of the inputs gives; always the same ones."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, 4, generator=generator)
    return x, (x @ torch.randn(4, 3, generator=generator)).argmax(1)


def network() -> nn.Sequential:
    """From inputs (n, 4) to logits (n, 3); always with the same initial values."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))


def samples(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs (count, 5) and targets (count, 2) for `Net`."""
    x = torch.randn(count, 5, generator=torch.Generator().manual_seed(seed))
    return x, torch.stack([x.sum(1).sin(), x[:, 0] * x[:, 1]], 1)


class Net(nn.Module):
    """A regression with a layer that may be left out, and one that is never used; always the same initial values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.middle, self.last = nn.Linear(5, 40), nn.Linear(40, 30), nn.Linear(30, 2)
        self.sometimes = nn.Linear(5, 2, bias=False)
        self.never = nn.Linear(3, 3)

    def forward(self, x: Tensor, sometimes: bool = True) -> Tensor:
        out = self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))
        return out + self.sometimes(x) if sometimes else out


class Bag(nn.Module):
    """Parameters of given shapes, zeros; the gradient of each is whatever one asks for."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.tensors = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])

    def backward(self, gradients: Sequence[Tensor]) -> None:
        torch.stack([(p * g).sum() for p, g in zip(self.tensors, gradients, strict=True)]).sum().backward()


def gradients(net: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in net.parameters()]


def relative(ours: Iterable[Tensor | None], theirs: Iterable[Tensor | None]) -> float:
    """The largest relative difference; infinite where only one of the two has a tensor."""
    errors = [0.0]
    for a, b in zip(ours, theirs, strict=True):
        if a is None or b is None:
            errors.append(0.0 if a is b else math.inf)
        elif not torch.equal(a, b):
            errors.append(float(((a - b).norm() / b.norm()).detach()))
    return float(torch.tensor(errors).max())  # a NaN if there is one


def assert_close(ours: Any, theirs: Any) -> None:
    """Tensors, or networks, are the same but for the order of additions."""
    a, b = ([*each.parameters()] if isinstance(each, nn.Module) else [*each] for each in (ours, theirs))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def flat(values: Iterable[Tensor]) -> Tensor:
    return torch.cat([value.detach().double().reshape(-1) for value in values])


def all_equal(values: Iterable[Tensor]) -> bool:
    """Whether all workers have the same bits of these tensors."""
    mine = flat(values)
    return all(torch.equal(each, mine) for each in kf.allgather(mine))


# -- the parts of a loop ----------------------------------------------------------------------------------------------


def backward(net: nn.Module, step: Iterable[Any], loss: Callable[..., Tensor] = F.cross_entropy) -> None:
    """The backwards of a loader's step, or of a list of micro-batches."""
    for x, y in step:
        loss(net(x), y).backward()


def update(*opts: Any) -> None:
    for opt in opts:
        opt.step()
    for opt in opts:
        opt.zero_grad()


def bodies(loader: Iterable[Any], net: nn.Module, opt: Any, loss: Any = F.cross_entropy) -> Iterator[Any]:
    """The plain body of a training loop: yields each step after its update."""
    for step in loader:
        for x, y in step:
            step.loss = loss(net(x), y)
            step.loss.backward()
        update(opt)
        yield step


OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "adamw": (lambda p: kf.FusedAdamW(p, lr=0.01), lambda p: torch.optim.AdamW(p, lr=0.01)),
    "sgd": (lambda p: kf.FusedSGD(p, lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "wrapped": (
        lambda p: kf.Optimizer(torch.optim.SGD(p, lr=0.1, nesterov=True, momentum=0.5)),
        lambda p: torch.optim.SGD(p, lr=0.1, nesterov=True, momentum=0.5),
    ),
}
"""Each of kfuse's, and the same of torch."""


class Seen(kf.BasePolicy):
    """Keeps the signals of each step. decisions: by the step that is measured."""

    def __init__(self, decisions: dict[int, kf.Decision] | None = None) -> None:
        self.decisions, self.signals = decisions or {}, list[kf.Signals]()

    def decide(self, signals: kf.Signals) -> kf.Decision | None:
        self.signals.append(signals)
        return self.decisions.get(signals.step)


def recorded_events() -> list[dict[str, Any]]:
    """What this process's trainings tell from now on, as rank 0 writes it to events.jsonl."""
    events: list[dict[str, Any]] = []
    plain = Reporter.event

    def event(self: Reporter, step: int, kind: str, **fields: Any) -> None:
        events.append({"step": step, "kind": kind, **fields})
        plain(self, step, kind, **fields)

    Reporter.event = event  # type: ignore[method-assign]
    return events
