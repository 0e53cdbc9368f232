"""What a further run of a micro-batch must leave as it was: buffers, gradients, random generators."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from kfuse.comm.devices import generators_restored

# A module, a buffer's name in it, the buffer, and a copy of its value; None for one that is None.
Buffer = tuple[nn.Module, str, Tensor | None, Tensor | None]


def buffers_of(model: nn.Module) -> list[Buffer]:
    """All buffers of the model, with copies of their values. One that `expand` repeats is not copied: as several of its
    elements are one in memory, nothing can write it in place.
    """
    found: list[Buffer] = []
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            repeats = any(stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True))
            found.append((module, name, buffer, None if repeats else buffer.clone()))
    return found


@torch.no_grad()
def put_back(buffers: Sequence[Buffer]) -> None:
    for module, name, buffer, value in buffers:
        setattr(module, name, buffer)
        if buffer is not None and value is not None:
            buffer.copy_(value)


@contextlib.contextmanager
def undisturbed(model: nn.Module, params: Sequence[nn.Parameter], device: torch.device) -> Iterator[Callable[[], None]]:
    """On exit buffers, `p.grad` and random generators are as before. Within, each `p.grad` is None.

    Gives a function that puts the buffers back, for between two runs.
    """
    grads, buffers = [p.grad for p in params], buffers_of(model)
    with generators_restored(device):
        try:
            for p in params:
                p.grad = None
            yield partial(put_back, buffers)
        finally:
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad
            put_back(buffers)
