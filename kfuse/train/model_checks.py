"""Finds what would make workers differ in a model or a data set: refuses it, or logs a warning that names it."""

from __future__ import annotations

import logging
import pickle
import random
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kfuse.session import current

_LOG = logging.getLogger("kfuse")

# Where a data set's generators are looked for: a list of samples need not be looked through.
_MOST_ITEMS = 100
_MOST_OBJECTS = 10_000


def refuse_uneven_embeddings(model: nn.Module) -> None:
    """Raises ValueError for an embedding that renormalises its weights in forward: each worker would change others."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ValueError(
                f"module {name or type(model).__name__}: {type(module).__name__}(max_norm={module.max_norm}) changes "
                "its weights in forward, each worker differently; use max_norm=None and clip weights after opt.step()"
            )


def log_remarks(remarks: Iterable[str]) -> None:
    """Logs what the user must know of the data, as warnings, on one worker."""
    session = current()
    client = session.control_client
    if (session.group.rank if client is None else client.worker) == 0:
        for remark in remarks:
            _LOG.warning("%s", remark)


class GeneratorWatch:
    """Finds, in the first step, the random generators of its own that a data set draws from, and warns of them once.

    So too those of its collate_fn. What is drawn from one depends on the worker and on the loader process: each has a
    copy, and draws only for the samples that it fetches; several draw the same numbers. One that only made the data
    set, and is not drawn from any more, does no harm.
    """

    def __init__(self, data: Any) -> None:
        self._dataset = getattr(data, "dataset", data)
        collate_fn = getattr(data, "collate_fn", None)
        self._parts = {"": self._dataset, "collate_fn": getattr(collate_fn, "__self__", collate_fn)}
        self._before: list[tuple[str, Any, bytes]] | None = None

    def before_step(self) -> None:
        """A step begins; the first one is looked at."""
        if self._before is None:
            self._before = [(path, generator, _state(generator)) for path, generator in _generators(self._parts)]

    def after_step(self, warns: bool) -> None:
        """The step is complete. warns: whether this worker logs the warning (rank 0 does)."""
        for path, generator, before in self._before or ():
            if warns and _state(generator) != before:
                _LOG.warning(
                    "data set %s draws from a generator of its own (%s): its samples depend on which worker fetched "
                    "what before. Draw from torch, numpy.random or random instead, which are seeded for each sample",
                    type(self._dataset).__name__,
                    path,
                )
        self._before = []


def _generators(parts: dict[str, Any]) -> list[tuple[str, Any]]:
    """The generators in these objects' attributes, in those of the objects in them, and so on, each with its path.

    parts: each object's own path, and the object.
    """
    kinds = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
    seeded = (np.random.mtrand._rand, random._inst, torch.default_generator)
    found: list[tuple[str, Any]] = []
    seen = {id(generator) for generator in seeded}
    waiting: deque[tuple[str, Any]] = deque(parts.items())
    while waiting and len(seen) < _MOST_OBJECTS:
        path, value = waiting.popleft()
        if id(value) in seen or isinstance(value, type | ModuleType | FunctionType | Tensor | np.ndarray):
            continue
        seen.add(id(value))
        if isinstance(value, kinds) and not isinstance(value, random.SystemRandom):  # which has no state
            found.append((path, value))
        elif isinstance(value, list | tuple):
            waiting.extend((f"{path}[{i}]", item) for i, item in enumerate(value[:_MOST_ITEMS]))
        elif isinstance(value, dict):
            waiting.extend((f"{path}[{key!r}]", item) for key, item in islice(value.items(), _MOST_ITEMS))
        else:
            attributes = getattr(value, "__dict__", {})
            waiting.extend((f"{path}.{name}" if path else name, item) for name, item in list(attributes.items()))
    return found


def _state(generator: Any) -> bytes:
    """A generator's state, to be compared with a later one."""
    if isinstance(generator, torch.Generator):
        return pickle.dumps(generator.get_state().tolist())
    if isinstance(generator, random.Random):
        return pickle.dumps(generator.getstate())
    if isinstance(generator, np.random.Generator):
        return pickle.dumps(generator.bit_generator.state)
    return pickle.dumps(generator.get_state())


_AVERAGED = (
    "buffer %s changes in forward: each step's changes are averaged over the micro-batches, as for BatchNorm. Where a "
    "mean has no meaning, register it with persistent=False"
)
_APART = (
    "buffer %s changes in forward and is not kept the same on all workers (only floating-point, persistent buffers "
    "are): results may depend on the number of workers"
)
_REPLACED = (
    "buffer %s is replaced in forward and is not kept the same on all workers: change it in place instead, with "
    "copy_(...), mul_(...), add_(...)"
)


class BufferWatch:
    """Finds, in the first step, the buffers that forward changes and that are not BatchNorm's, and warns of them once.

    Those that are averaged may have another meaning than a mean; those that are not averaged become different on
    each worker, and so do those that forward replaces by another tensor (`self.mean = ...`).
    """

    def __init__(self, model: nn.Module, averaged: Sequence[Tensor], several: bool) -> None:
        """several: whether there are, or can be, several workers, so that it matters what is not averaged."""
        self._several = several
        self._watched: list[tuple[nn.Module, str, str, Tensor]] = []  # module, its path, the buffer's name, the buffer
        self._averaged = {id(buffer) for buffer in averaged}
        for path, module in model.named_modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                continue
            for name, buffer in module.named_buffers(recurse=False):
                if several or id(buffer) in self._averaged:
                    self._watched.append((module, path, name, buffer))
        self._before: list[Tensor] | None = None

    def before_step(self) -> None:
        """A step begins; the first one is looked at."""
        if self._before is None and self._watched:
            self._before = [buffer.clone() for *_, buffer in self._watched]

    def after_step(self, warns: bool) -> None:
        """The step is complete. warns: whether this worker logs the warning (rank 0 does)."""
        if self._before is None or not self._watched:
            return
        for (module, path, name, buffer), before in zip(self._watched, self._before, strict=True):
            now = getattr(module, name, None)
            if not warns or (isinstance(now, Tensor) and now.device == before.device and torch.equal(now, before)):
                continue
            if now is buffer:
                _LOG.warning(_AVERAGED if id(buffer) in self._averaged else _APART, f"{path}.{name}".lstrip("."))
            elif self._several:
                _LOG.warning(_REPLACED, f"{path}.{name}".lstrip("."))
        self._watched, self._before = [], []
