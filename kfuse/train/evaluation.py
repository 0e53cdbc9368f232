"""The default loss, held-out loss and accuracy over all workers, and the parameters' fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfuse.comm.group import Group
from kfuse.data import Dataset

_CHUNK = 256  # samples; fixed, so that the result does not depend on the number of workers


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


@dataclass(frozen=True)
class Evaluation:
    """What the model does on held-out data."""

    loss: float
    """Mean over the samples."""
    accuracy: float | None
    """Share of the targets hit, in [0, 1]; None where the output does not hold a score for each class, last."""


@torch.no_grad()
def evaluate(
    model: nn.Module,
    data: Dataset,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    group: Group,
    precision: str = "fp32",
) -> Evaluation:
    """Each worker takes every n-th chunk; every worker returns the same numbers.

    A chunk's sums come from one worker, so that adding zeros from the others is exact; chunks are summed in order.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        chunks = -(-len(data) // _CHUNK)
        sums = torch.zeros(chunks, 3, dtype=torch.float64, device=group.device)  # loss * samples, hits, targets
        for c in range(group.rank, chunks, group.size):
            indices = np.arange(c * _CHUNK, min((c + 1) * _CHUNK, len(data)), dtype=np.int64)
            x, y = (t.to(group.device) for t in data.fetch(indices))
            with torch.autocast(group.device.type, torch.bfloat16, enabled=precision == "bf16"):
                output = model(x)
                sums[c, 0] = loss_fn(output, y).double() * len(indices)
            if _are_classes(output, y):
                sums[c, 1] = (output.argmax(-1) == y).sum()
                sums[c, 2] = y.numel()
        group.all_reduce(sums, "evaluation").wait()
    finally:  # also where a worker is lost meanwhile
        for module in training:
            module.training = True
    loss, hits, targets = (sum(column) for column in zip(*sums.tolist(), strict=True))
    return Evaluation(loss / len(data), hits / targets if targets else None)


def _are_classes(output: object, target: Tensor) -> bool:
    """Whether `output` has a score for each of several classes, in its last dimension, for each integer target.

    A binary classifier's single score has not: whether 0 or 0.5 divides its classes is the user's to know.
    """
    return (
        isinstance(output, Tensor)
        and not target.is_floating_point()
        and output.ndim == target.ndim + 1
        and output.shape[:-1] == target.shape
        and output.shape[-1] > 1
    )


def params_sha256(model: nn.Module) -> str:
    """SHA-256 over the parameters' bytes, in the order of their names."""
    digest = hashlib.sha256()
    for _, p in sorted(model.named_parameters()):
        digest.update(p.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
