"""Losses: the mean over a micro-batch's samples, as the gradient statistics expect."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def default_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return cross entropy for integer targets and mean squared error for floating ones, a mean, fp32 scalar.

    Classes are the last dimension of `output`: `[B, C]` with targets `[B]`, or `[B, T, V]` with `[B, T]`,
    where the mean is over all tokens. Raises ValueError for shapes that do not match (nothing is broadcast).
    """
    if target.is_floating_point():
        if output.shape != target.shape:
            raise ValueError(
                f"output of shape {tuple(output.shape)} for floating targets of shape {tuple(target.shape)}: "
                "mean squared error needs equal shapes"
            )
        return F.mse_loss(output.float(), target.float())
    if target.dtype == torch.bool or target.is_complex():
        raise ValueError(f"targets of {target.dtype}: they must be integers (classes) or floating")
    if output.shape[:-1] != target.shape:
        raise ValueError(
            f"output of shape {tuple(output.shape)} for integer targets of shape {tuple(target.shape)}: "
            "cross entropy needs the targets' shape and one dimension of classes after it"
        )
    return F.cross_entropy(output.flatten(0, -2).float(), target.flatten().long())


def loss_and_correct(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean cross entropy (fp32 scalar) and how many targets the largest logit hits (int64 scalar).

    `[B, C]` with targets `[B]`, or `[B, T, V]` with `[B, T]`; the count is out of `target.numel()`, so of
    tokens for a sequence. Raises ValueError for targets that are not integers, or shapes that do not match.
    """
    if target.is_floating_point():
        raise ValueError(f"targets of {target.dtype}: accuracy needs integer classes")
    return default_loss(logits, target), (logits.argmax(-1) == target).sum()
