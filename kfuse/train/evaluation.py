"""Held-out loss, accuracy and the user's metrics over all workers, and the parameters' fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kfuse.comm.group import Group
from kfuse.data import Dataset
from kfuse.data.batch import describe, to_device
from kfuse.data.fetching import random_key, seed_host
from kfuse.train.loss import Objective, Outcome
from kfuse.train.precision import forward
from kfuse.train.step import generators_restored, seed_forward

_CHUNK = 256  # samples; fixed, so that the result does not depend on the number of workers

Metric = Callable[[Any, Any], Any]
"""metric(output, target): a value for each sample, [B], or their mean, a scalar."""


@dataclass(frozen=True)
class Evaluation:
    """What the model does on held-out data."""

    loss: float
    """Mean over the samples."""
    accuracy: float | None
    """Share of the targets hit, in [0, 1]; None where the output does not hold a score for each class, last."""
    metrics: dict[str, float] = field(default_factory=dict)
    """By name: the user's metrics, or the figures of the step function. Means over the samples."""


def check_metrics(metrics: Mapping[str, Metric] | None, objective: Objective, heldout: object) -> dict[str, Metric]:
    """The metrics as a dictionary. Raises TypeError or ValueError for what can give no values."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
        raise TypeError(f"metrics={metrics!r}: must be a dictionary {{name: function(output, target)}}")
    for name, metric in metrics.items():
        if not callable(metric):
            raise TypeError(f"metrics[{name!r}]={metric!r}: must be a function(output, target)")
    if metrics and objective.step_fn is not None:
        raise ValueError(
            f"metrics[{next(iter(metrics))!r}] with step_fn=: a metric needs (output, target), which a step function "
            "keeps to itself; let it return (loss, {name: value}), or pass loss_fn="
        )
    if metrics and heldout is None:
        raise ValueError(f"metrics[{next(iter(metrics))!r}]: pass heldout=, the data that it is computed on")
    return dict(metrics)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    data: Dataset,
    objective: Objective,
    group: Group,
    precision: str = "fp32",
    metrics: Mapping[str, Metric] | None = None,
) -> Evaluation:
    """Evaluates the model, in eval mode. Each worker takes every n-th chunk; every worker returns the same numbers.

    A chunk's sums come from one worker, so that adding zeros from the others is exact; chunks are summed in order. The
    random numbers of a chunk are seeded by its place, and the user's generators are restored. Raises RuntimeError,
    which names it, for a metric that raises, ValueError for one that is neither [B] nor a scalar.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        chunks = -(-len(data) // _CHUNK)
        mine = range(group.rank, chunks, group.size)
        rows: dict[int, tuple[list[str], Tensor]] = {}
        with generators_restored(group.device):
            for c in mine or range(1):  # a worker with no chunk learns the names of the sums from the first one
                indices = np.arange(c * _CHUNK, min((c + 1) * _CHUNK, len(data)), dtype=np.int64)
                seed_host(random_key(0, 0, c))
                fetched = data.fetch(indices)
                weight, batch = objective.weight(fetched, len(indices)), to_device(fetched, group.device)
                seed_forward(group.device, random_key(0, 0, c))
                done = forward(objective, model, batch, precision, group.device)
                rows[c] = _sums(done, len(indices), weight, metrics or {})
        names = next(iter(rows.values()))[0]
        if objective.step_fn is not None:
            _refuse_other_names([(c, rows[c][0]) for c in mine], names, chunks, group)
        sums = torch.zeros(chunks, 2 + len(names), 2, dtype=torch.float64, device=group.device)
        for c in mine:
            sums[c] = rows[c][1]
        group.all_reduce(sums, "evaluation").wait()
    finally:  # also where a worker is lost meanwhile
        for module in training:
            module.training = True
    totals = [(sum(values), sum(weights)) for values, weights in sums.permute(1, 2, 0).tolist()]
    (loss, weight), (hits, targets), *others = totals
    means = {name: total / of for name, (total, of) in zip(names, others, strict=True)}
    return Evaluation(loss / weight, hits / targets if targets else None, means)


def _refuse_other_names(found: list[tuple[int, list[str]]], names: list[str], chunks: int, group: Group) -> None:
    """Raises ValueError, on every worker, unless all chunks have these figures: their sums are added by place."""
    digests = torch.zeros(chunks, dtype=torch.float64, device=group.device)
    for c, figures in found:
        digests[c] = int.from_bytes(hashlib.sha256(repr(figures).encode()).digest()[:6], "big")  # exact in float64
    group.all_reduce(digests, "evaluation").wait()
    if len(set(digests.tolist())) > 1:
        others = next((figures for _, figures in found if figures != names), "others")
        raise ValueError(
            f"step_fn returned the figures {names} for one batch of heldout, and {others} for another: must be the same"
        )


def _sums(done: Outcome, samples: int, weight: float, metrics: Mapping[str, Metric]) -> tuple[list[str], Tensor]:
    """The names of a chunk's metrics or figures, and its sums: float64 [2 + names, 2], of values and their weights.

    The first two rows are of the loss and the accuracy.
    """
    rows = [_row("the loss", done.loss.reshape(()), samples, weight), torch.zeros(2, dtype=torch.float64)]
    if _are_classes(done.output, done.target):
        hits = (done.output.argmax(-1) == done.target).sum().double()
        rows[1] = torch.stack([hits, torch.full_like(hits, done.target.numel())])
    for name, metric in metrics.items():
        try:
            value = metric(done.output, done.target)
        except Exception as error:
            raise RuntimeError(f"metrics[{name!r}] raised {type(error).__name__}: {error}") from error
        rows.append(_row(f"metrics[{name!r}]", value, samples, weight))
    figures = sorted(done.figures)
    rows += [_row(f"step_fn's figure {name!r}", done.figures[name], samples, weight) for name in figures]
    return [*metrics, *figures], torch.stack([row.to(done.loss.device) for row in rows])


def _row(source: str, value: Any, samples: int, weight: float) -> Tensor:
    """float64 [2]: the sum of a value for each sample, or `weight` times their mean; and the weight of that.

    Raises TypeError or ValueError, naming `source`.
    """
    try:
        values = torch.as_tensor(value).double()
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"{source} is a {describe(value)}: must be a tensor [B], a value for each sample, or their mean, a scalar"
        ) from None
    if values.ndim and values.shape != (samples,):
        raise ValueError(
            f"{source} is of shape {list(values.shape)} for {samples} samples: must be [B], a value for each sample, "
            "or their mean, a scalar"
        )
    total, of = (values.sum(), float(samples)) if values.ndim else (values * weight, weight)
    return torch.stack([total, torch.full_like(total, of)])


def _are_classes(output: object, target: object) -> bool:
    """Whether `output` has a score for each of several classes, in its last dimension, for each integer target.

    A binary classifier's single score has not: whether 0 or 0.5 divides its classes is the user's to know.
    """
    return (
        isinstance(output, Tensor)
        and isinstance(target, Tensor)
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
