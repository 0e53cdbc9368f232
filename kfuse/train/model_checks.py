"""Finds what would make workers differ in a model: refuses it, or logs a warning that names it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from kfuse.session import current

_LOG = logging.getLogger("kfuse")


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
