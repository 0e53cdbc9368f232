"""Batches: any nested structure of tensors and plain values, as `torch.utils._pytree` knows them.

Dictionaries, lists, tuples and named tuples are containers, and so are dataclasses, which are registered with torch
when they are first met. Everything else is a leaf.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from kfuse.comm import devices
from kfuse.comm.chunks import memory
from kfuse.comm.devices import Device


def flatten(batch: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Returns the leaves of `batch` and its structure, as `tree_flatten` does.

    A dataclass that has a method `to` is a leaf: that method moves it. Any other becomes known to torch here.
    """
    leaves, structure = pytree.tree_flatten(batch)
    unknown = {type(leaf) for leaf in leaves if is_dataclass(leaf) and not hasattr(leaf, "to")} - {type}
    for kind in unknown:
        pytree.register_dataclass(kind)
    return flatten(batch) if unknown else (leaves, structure)


def map_leaves(act: Callable[[Any], Any], batch: Any) -> Any:
    """Returns a structure like `batch`, with `act(leaf)` in each leaf's place."""
    leaves, structure = flatten(batch)
    return pytree.tree_unflatten(map(act, leaves), structure)


def tensors(batch: Any) -> list[Tensor]:
    if type(batch) is tuple and all(isinstance(leaf, Tensor) for leaf in batch):
        return list(batch)  # most batches; torch's tree takes 4 us more
    return [leaf for leaf in flatten(batch)[0] if isinstance(leaf, Tensor)]


def to_device(batch: Any, device: torch.device) -> Any:
    """Returns `batch` with its tensors on `device`; what is there already is not copied.

    A leaf that has a method `to` (a PackedSequence, a tokenizer's BatchEncoding) is moved by it. Other leaves stay.
    """
    there = devices.of(device)
    if type(batch) is tuple and all(isinstance(leaf, Tensor) for leaf in batch):
        return tuple(copy_to(there, leaf) for leaf in batch)  # most batches; torch's tree takes 4 us more

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return copy_to(there, leaf)
        return leaf.to(device) if hasattr(leaf, "to") and not isinstance(leaf, type) else leaf

    return map_leaves(move, batch)


def copy_to(device: Device, tensor: Tensor) -> Tensor:
    """Returns the tensor on `device`; the tensor itself where it is there already. A copy to a GPU is enqueued.

    It goes by pinned memory. From other memory CUDA copies once the GPU has come to that point, and the host waits
    until then (CUDA Runtime API, "API synchronization behavior"). Pinned memory costs one copy on the host, which is
    faster than the bus. torch keeps it until it is read.
    """
    from_host = device.asynchronous and tensor.device.type == "cpu" and not device.holds(tensor)
    if from_host and tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.is_pinned():
        tensor = pinned_copy(device, tensor)
    return tensor.to(device.name, non_blocking=True)


def pinned_copy(device: Device, tensor: Tensor) -> Tensor:
    """Returns a copy in pinned memory with the same strides, on which a model's bits may depend (channels_last).

    Where the tensor's memory is not dense, returns the tensor itself: it is copied without pinned memory.
    """
    if tensor.is_contiguous():
        return device.pinned(tensor.shape, tensor.dtype).copy_(tensor)
    if memory(tensor) is None:
        return tensor
    return device.pinned((tensor.numel(),), tensor.dtype).as_strided(tensor.shape, tensor.stride()).copy_(tensor)


def names(batch: Any) -> set[str]:
    """Returns the leaves' places, such as `['tokens']`; in a list or tuple it is `[*]`, since lengths may differ."""
    flatten(batch)  # makes its dataclasses known
    paths = [path for path, _ in pytree.tree_flatten_with_path(batch)[0]]
    return {"".join("[*]" if isinstance(key, pytree.SequenceKey) else str(key) for key in path) for path in paths}


def describe(batch: Any) -> str:
    """Returns the batch in a few words: `dict of input_ids, labels`, `tuple of 3`, `Tensor [16, 64]`."""
    kind = type(batch).__name__
    if isinstance(batch, Tensor):
        return f"{kind} {list(batch.shape)}"
    if hasattr(batch, "keys"):
        return f"{kind} of {', '.join(map(str, batch.keys())) or 'nothing'}"
    if isinstance(batch, (tuple, list)):
        return f"{kind} of {len(batch)}"
    return kind
