"""What of a model or a data set several workers cannot train alike: refused, or warned of by name."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_LOG = logging.getLogger("kfuse")


def refuse_uneven_embeddings(model: nn.Module) -> None:
    """Raises ValueError for an embedding that renormalises its weights in forward: each worker would do others."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ValueError(
                f"module {name or type(model).__name__}: {type(module).__name__}(max_norm={module.max_norm}) changes "
                "its weights in forward, each worker differently; use max_norm=None and clip weights after opt.step()"
            )


def warn_of_own_generators(data: Any) -> None:
    """Logs a warning for a data set that draws from a generator of its own: what it draws depends on the worker."""
    generators = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
    dataset = getattr(data, "dataset", data)
    for name, value in getattr(dataset, "__dict__", {}).items():
        if isinstance(value, generators):
            _LOG.warning(
                "data set %s draws from a generator of its own (%s): its samples depend on which worker fetched what "
                "before. Draw from torch, numpy.random or random instead, which are seeded for each micro-batch",
                type(dataset).__name__,
                name,
            )


class BufferWatch:
    """Finds, in the first step, the buffers that forward changes and that are not BatchNorm's, and warns of them once.

    Those that are averaged may have another meaning than a mean; those that are not averaged become different on
    each worker.
    """

    def __init__(self, model: nn.Module, averaged: Sequence[Tensor], several: bool) -> None:
        """several: whether there are, or can be, several workers, so that it matters what is not averaged."""
        self._watched: list[tuple[str, Tensor, bool]] = []
        known = {id(buffer) for buffer in averaged}
        for path, module in model.named_modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                continue
            for name, buffer in module.named_buffers(recurse=False):
                is_averaged = id(buffer) in known
                if is_averaged or several:
                    self._watched.append((f"{path}.{name}" if path else name, buffer, is_averaged))
        self._before: list[Tensor] | None = None

    def before_step(self) -> None:
        """A step begins; the first one is looked at."""
        if self._before is None and self._watched:
            self._before = [buffer.clone() for _, buffer, _ in self._watched]

    def after_step(self, says: bool) -> None:
        """The step is complete. says: whether this worker is the one that warns."""
        if self._before is None or not self._watched:
            return
        for (name, buffer, is_averaged), before in zip(self._watched, self._before, strict=True):
            if not says or torch.equal(buffer, before):
                continue
            if is_averaged:
                _LOG.warning(
                    "buffer %s changes in forward: each step's changes are averaged over the micro-batches, as for "
                    "BatchNorm. Where a mean has no meaning, register it with persistent=False",
                    name,
                )
            else:
                _LOG.warning(
                    "buffer %s changes in forward and is not kept the same on all workers (only floating-point, "
                    "persistent buffers are): results may depend on the number of workers",
                    name,
                )
        self._watched, self._before = [], []
