"""Models with a constant gradient: `model._target_=constant.Model data._target_=constant.split`.

Adam's update by a constant gradient g is lr * sign(g) in every step, whatever its betas are: where its bias correction
is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kfuse.data import DataSplit

SAMPLES = 16 * 400


class Model(nn.Module):
    """The loss is a sum over the parameters, of those that are used: `early` always, `late` once `early` is below
    `threshold`.
    """

    def __init__(self, threshold: float = float("-inf"), sizes: Sequence[int] = (3, 3)) -> None:
        super().__init__()
        self.early, self.late = (nn.Parameter(torch.zeros(size)) for size in sizes)
        self.threshold = threshold

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        loss = self.early.sum()
        if self.early[0].item() < self.threshold:
            loss = loss + self.late.sum()
        return {"loss": loss * x.mean()}  # x is 1

    @property
    def values(self) -> dict[str, float]:
        """The first element of each parameter; all of its elements are equal."""
        return {name: p.detach()[0].item() for name, p in self.named_parameters()}


class Samples(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Ones."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.ones(())}


def split() -> DataSplit:
    """For the command line."""
    return DataSplit(Samples(), Samples())


def settings(**arguments: Any) -> list[str]:
    """Overrides of a job that trains the model with these arguments."""
    given = [f"+model.{name}={value}" for name, value in arguments.items()]
    return ["model._target_=constant.Model", *given, "data._target_=constant.split", "optimizer.weight_decay=0"]
