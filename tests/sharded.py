"""What the tests of sharded state train: small models whose buckets are cut within parameters, and their twins."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from problems import update
from torch import Tensor, nn

import kfuse as kf
from kfuse.comm.settings import CommOptions
from kfuse.session import reset

BUCKET_MB = 40_000 * 4 / 2**20
"""Buckets of about ten blocks: shards of one to ten, cut within parameters."""

ADAMW = ("AdamW", {"lr": 1e-2, "weight_decay": 0.1})
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ADAMW,
    "momentum": ("SGD", {"lr": 0.05, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    "lamb": ("LAMB", {"lr": 1e-2}),
    "muon": ("Muon", {"lr": 1e-2, "arithmetic": "fp32"}),
}


class Net(nn.Module):
    """Three layers of odd sizes, and one that is used in some steps, on some ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(30, 333), nn.Linear(333, 111)
        self.sometimes = nn.Linear(111, 111, bias=False)
        self.last = nn.Linear(111, 5)

    def forward(self, x: Tensor, extra: bool = False) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.last(self.sometimes(x) if extra else x)


def net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(3)
    return Net().to(dtype)


def batch(step: int, part: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """The `part`-th micro-batch of a step."""
    generator = torch.Generator().manual_seed(1000 * step + part)
    x = torch.randn(4, 30, generator=generator)
    return x.to(dtype), torch.sin(x[:, :5]).to(dtype)


def extra(step: int, part: int) -> bool:
    """Whether `sometimes` is used: in no micro-batch, in some, in all."""
    return step % 4 == 2 or (step % 4 == 3 and part % 2 == 1)


def groups(model: Net) -> list[dict[str, Any]]:
    """Weights, and biases without decay."""
    weights = [p for p in model.parameters() if p.dim() > 1]
    return [{"params": weights}, {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]


def optimizer(kind: str, model: Net, **more: Any) -> Any:
    name, options = KINDS[kind]
    weights, biases = groups(model)
    of_muon = {"use_muon": False} if name == "Muon" else {}
    return getattr(kf, f"Fused{name}")([weights, biases | of_muon], **{**options, **more})


def init(state: str = "sharded", **options: Any) -> Any:
    reset()
    return kf.init(**CommOptions(**{"state": state, "bucket_mb": BUCKET_MB, **options}).named(), comm_timeout_s=20.0)


def loss_of(model: Net, step: int, part: int) -> Tensor:
    x, y = batch(step, part, model.last.weight.dtype)
    return F.mse_loss(model(x, extra(step, part)), y)


def planned_step(
    opt: Any, model: Net, step: int, parts: int, loss: Callable[[Tensor], Tensor] = lambda x: x, aligned: bool = True
) -> None:
    """A step of `parts` micro-batches, shared out over the workers, as kf.fit plans it.

    aligned: few workers have several subtrees of the canonical tree.
    """
    from kfuse.comm.step import StepPlan
    from kfuse.data import worker_range
    from kfuse.session import current

    group = current().group
    ranges = tuple(worker_range(parts, group.size, rank, aligned=aligned) for rank in range(group.size))
    opt.begin(StepPlan(4 * parts, ranges))
    for j in ranges[group.rank]:
        with opt.micro_batch(samples=4, last=j == ranges[group.rank][-1]):
            loss(loss_of(model, step, j)).backward()
    update(opt)


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def tensors(state: dict[str, Any]) -> dict[tuple[int, str], Tensor]:
    """The optimizer's state tensors, by parameter and name."""
    return {
        (key, name): copy.deepcopy(torch.as_tensor(value))
        for key, of in state["state"].items()
        for name, value in of.items()
    }


def same(a: list[Tensor] | dict[Any, Tensor], b: list[Tensor] | dict[Any, Tensor]) -> bool:
    """Bit for bit."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
    return len(a) == len(b) and all(torch.equal(p, q) for p, q in zip(a, b, strict=True))
