"""A small classification problem, and a network that learns it, for tests of training loops."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def problem(count: int = 64) -> tuple[Tensor, Tensor]:
    """Inputs (count, 4) and labels in 0..2, which a linear map of the inputs gives; always the same ones."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, 4, generator=generator)
    return x, (x @ torch.randn(4, 3, generator=generator)).argmax(1)


def network() -> nn.Sequential:
    """From inputs (n, 4) to logits (n, 3); always with the same initial values."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
