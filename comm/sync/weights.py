"""A model's weights as one flat fp32 tensor, and back: what the workers of a mode other than ssgd send and keep."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def flatten(weights: Sequence[Tensor]) -> Tensor:
    """A copy of all elements: fp32 [elements], on the weights' device."""
    return torch.cat([weight.detach().reshape(-1).to(torch.float32) for weight in weights])


def views(flat: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """For each weight, its part of `flat`, in its shape."""
    parts = torch.split(flat, [weight.numel() for weight in weights])
    return [part.view(weight.shape) for part, weight in zip(parts, weights, strict=True)]


def write(flat: Tensor, weights: Sequence[Tensor]) -> None:
    """The weights have these values now, rounded to their dtype."""
    for weight, part in zip(weights, views(flat, weights), strict=True):
        weight.copy_(part)
