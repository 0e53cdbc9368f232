"""What a data set is here, and how tensors, arrays and torch's data sets become one."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Subset, TensorDataset, default_collate

from kfuse.comm import devices
from kfuse.comm.buckets import dense_order
from kfuse.comm.devices import Device


def map_leaves(act: Callable[[Any], Any], batch: Any, movable: bool = False) -> Any:
    """Returns a structure like `batch`, with `act(leaf)` in each leaf's place.

    A dataclass without a method `to` is a part of the structure; a copy is made without calling its class. movable:
    every object with a method `to` is a leaf, also one that torch would take apart, as a PackedSequence.
    """

    def mapped(leaf: Any) -> Any:
        parts = _fields_of(leaf)
        if not parts:
            return act(leaf)
        copied = copy.copy(leaf)
        for name, value in parts.items():
            object.__setattr__(copied, name, map_leaves(act, value, movable))
        return copied

    def is_leaf(node: Any) -> bool:
        return type(node) is torch.Size or (movable and moves_itself(node))

    return torch.utils._pytree.tree_map(mapped, batch, is_leaf=is_leaf)


def leaves_of(batch: Any) -> list[Any]:
    leaves = [(leaf, _fields_of(leaf)) for leaf in torch.utils._pytree.tree_leaves(batch)]
    return [each for leaf, parts in leaves for each in (leaves_of([*parts.values()]) if parts else [leaf])]


def _fields_of(leaf: Any) -> dict[str, Any]:
    if not is_dataclass(leaf) or isinstance(leaf, type) or moves_itself(leaf):
        return {}
    return {each.name: getattr(leaf, each.name) for each in fields(leaf) if hasattr(leaf, each.name)}


def moves_itself(thing: Any) -> bool:
    """Whether its class has a method `to`. Another attribute of this name says nothing."""
    return callable(getattr(type(thing), "to", None))


def is_flat(batch: Any) -> bool:
    """Whether it is a tuple of tensors, as most batches are: there torch's tree is not needed, which takes 4 us."""
    return type(batch) is tuple and set(map(type, batch)) == {Tensor}


def tensors(batch: Any) -> list[Tensor]:
    if is_flat(batch):
        return list(batch)
    return [leaf for leaf in leaves_of(batch) if isinstance(leaf, Tensor)]


def to_device(batch: Any, device: torch.device) -> Any:
    """Returns `batch` with its tensors on `device`; what is there already is not copied.

    A leaf that has a method `to` (a PackedSequence, a tokenizer's BatchEncoding) is moved by it. Other leaves stay.
    """
    there = devices.of(device)
    if is_flat(batch) and there.holds(*batch):
        return batch

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return copy_to(there, leaf)
        return leaf.to(device) if moves_itself(leaf) else leaf

    return map_leaves(move, batch, movable=True)


def copy_to(device: Device, tensor: Tensor) -> Tensor:
    """Returns the tensor on `device`; the tensor itself where it is there already. A copy to a GPU is enqueued.

    It goes by pinned memory. From other memory CUDA copies once the GPU has come to that point, and the host waits
    until then (CUDA Runtime API, "API synchronization behavior"). Pinned memory costs one copy on the host, which is
    faster than the bus. torch keeps it until it is read.
    """
    from_host = device.asynchronous and tensor.device.type == "cpu" and not device.holds(tensor)
    if from_host and is_plain(tensor) and not tensor.is_pinned():
        tensor = pinned_copy(device, tensor)
    return tensor.to(device.name, non_blocking=True)


def is_plain(leaf: Any) -> bool:
    """Whether it is a tensor whose elements lie in one memory as they are: of no subclass, not sparse, not nested."""
    return type(leaf) is Tensor and leaf.layout is torch.strided and not (leaf.is_nested or leaf.is_quantized)


def pinned_copy(device: Device, tensor: Tensor) -> Tensor:
    """Returns a copy in pinned memory with the same strides, on which a model's bits may depend (channels_last).

    Where the memory of the tensor, a plain one, is not dense, returns itself: it is copied without pinned memory.
    """
    if tensor.is_contiguous():
        return device.pinned(tensor.shape, tensor.dtype).copy_(tensor)
    if dense_order(tensor) is None:
        return tensor
    return device.pinned((tensor.numel(),), tensor.dtype).as_strided(tensor.shape, tensor.stride()).copy_(tensor)


class DataError(ValueError):
    """The data cannot be used. The message is one line: what was wrong, and what it must be."""


class Dataset(ABC):
    """A finite, indexable set of samples, fetched in batches. Training uses each sample once an epoch."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of samples."""

    @abstractmethod
    def fetch(self, indices: np.ndarray, generator: torch.Generator | None = None) -> Any:
        """Returns the batch of the samples `indices` (int64 `[B]`): any nested structure of tensors and plain values.

        A pair (inputs, targets), both with B as first dimension, is what loss functions take.
        generator: on the CPU. Random augmentation draws from it and from nothing else, so that the batch is a pure
        function of the indices and the generator's state. None: no augmentation.
        """

    def order(self, epoch: int) -> np.ndarray | None:
        """Returns the order of the samples, int64 `[len]`, a function of the epoch alone; None: kfuse draws one."""
        return None


@dataclass(frozen=True)
class DataSplit:
    """Samples to train on, samples held out for evaluation, and what a model's constructor may need of them."""

    train: Any  # a stream or a data set: what `as_stream` and `as_dataset` take
    heldout: Any  # what `as_dataset` takes
    spec: dict[str, Any] = field(default_factory=dict)
    """By name: `input_shape` (tuple, without the batch dimension) and `num_classes` for images; `vocab_size` and
    `block_size` for text. Classes' names: `classes`."""
    input: dict[str, Any] = field(default_factory=dict)
    """How a model's input is made of a file, in plain values: `model.json` has it, and `kfuse predict` follows it."""
    remark: str | None = None  # what the user is told of the data as training begins


class TensorData(Dataset):
    """Samples held in a nested structure of tensors, all with the same first dimension. No augmentation.

    A batch is the same structure, with the batch's rows of each tensor. Raises ValueError where the lengths differ or
    are zero, TypeError for a leaf that is not a tensor.
    """

    def __init__(self, structure: Any, chosen: Sequence[int] | None = None) -> None:
        """chosen: the rows that are samples, in this order; None: all. Raises IndexError for one that is not there."""
        self._leaves = leaves_of(structure)
        if not self._leaves or not all(isinstance(leaf, Tensor) for leaf in self._leaves):
            raise TypeError(f"{type(structure).__name__}: must hold tensors, and nothing else")
        lengths = {len(leaf) if leaf.ndim else 0 for leaf in self._leaves}
        if len(lengths) > 1 or 0 in lengths:
            shapes = ", ".join(str(tuple(leaf.shape)) for leaf in self._leaves)
            raise ValueError(f"tensors of shapes {shapes}: must have the same first dimension, at least 1")
        outer, form = torch.utils._pytree.tree_flatten(structure)
        known = all(isinstance(leaf, Tensor) for leaf in outer)  # no dataclass
        self._like: Callable[[Sequence[Tensor]], Any] = form.unflatten if known else partial(_replaced, structure)
        self._is_flat, self._length = is_flat(structure), lengths.pop()
        self._chosen = None if chosen is None else np.arange(self._length)[np.asarray(chosen, dtype=np.int64)]

    def __len__(self) -> int:
        return self._length if self._chosen is None else len(self._chosen)

    def fetch(self, indices: np.ndarray, generator: torch.Generator | None = None) -> Any:
        """Returns the structure, with the rows `indices` of each tensor."""
        rows = torch.from_numpy(indices if self._chosen is None else self._chosen[indices])
        taken = [leaf.index_select(0, rows if leaf.is_cpu else rows.to(leaf.device)) for leaf in self._leaves]
        return tuple(taken) if self._is_flat else self._like(taken)


def _replaced(structure: Any, leaves: Sequence[Any]) -> Any:
    values = iter(leaves)
    return map_leaves(lambda leaf: next(values), structure)


Collate = Callable[[list[Any]], Any]  # collate_fn(samples): the batch, any nested structure


def collate(samples: list[Any], collate_fn: Collate | None) -> Any:
    """Makes a batch of samples, by default with torch's `default_collate`; a pair of inputs and targets is a tuple."""
    if collate_fn is not None:
        return collate_fn(samples)
    batch = default_collate(samples)
    return tuple(batch) if isinstance(batch, list) and len(batch) == 2 else batch


class MapData(Dataset):
    """A map-style data set (`len(d)`, `d[i]`) whose samples are collated as a DataLoader would.

    Random transforms inside the data set may draw from the global generators of torch, numpy and random, which are
    seeded for each sample.
    """

    def __init__(self, dataset: Any, collate_fn: Collate | None = None) -> None:
        self.dataset, self.collate_fn = dataset, collate_fn

    def __len__(self) -> int:
        return len(self.dataset)

    def fetch(
        self,
        indices: np.ndarray,
        generator: torch.Generator | None = None,
        before_sample: Callable[[int], None] = lambda index: None,
    ) -> Any:
        """Returns the collated samples: see `collate`. before_sample: called with each index before its sample."""
        samples = []
        for i in indices.tolist():
            before_sample(i)
            samples.append(self.dataset[i])
        return collate(samples, self.collate_fn)


def as_dataset(obj: Any, collate_fn: Collate | None = None) -> Dataset:
    """Returns `obj` as a `Dataset`: our own, tensors or NumPy arrays that hold all samples, or a map-style data set.

    Tensors and arrays: a pair (x, y), as a tuple or a list; a dictionary or a dataclass of them, nested as it may be; a
    pair with such an input or target; a TensorDataset, or a Subset of one. Their first dimension counts the samples.
    Of arrays, floats become torch's default dtype (float32, as models' parameters are) and integer targets of a pair
    int64, as losses take them; both are copied. Tensors are taken as they are.
    collate_fn(samples): makes the batches of a map-style data set; None: `torch.utils.data.default_collate`.
    Raises TypeError, which names what is accepted, for anything else, and ValueError for parts of different lengths.
    """
    if collate_fn is None:
        if isinstance(obj, Dataset):
            return obj
        whole, chosen = (obj.dataset, obj.indices) if type(obj) is Subset else (obj, None)  # as random_split makes them
        if type(whole) is TensorDataset and all(map(is_plain, whole.tensors)):
            return TensorData(whole.tensors, chosen)
        if _is_of_tensors(obj):
            if len(obj) != 2:
                raise TypeError(
                    f"{type(obj).__name__} of {len(obj)} tensors or arrays: a pair (x, y) has two; pass more of them "
                    "as a dictionary or a TensorDataset"
                )
            return TensorData((_as_tensor(obj[0]), _as_tensor(obj[1], target=True)))
        if _holds_all_samples(obj):
            return TensorData(map_leaves(_as_tensor, obj))
    if is_map_style(obj):
        return MapData(obj, collate_fn)
    raise TypeError(
        f"{type(obj).__name__}{' with collate_fn=' if collate_fn else ''} is not a data set: pass a pair of tensors "
        "(x, y), a TensorDataset, a dictionary of tensors, a map-style data set (len(d), d[i]; it alone takes "
        "collate_fn=), or an object of a subclass of kfuse.data.Dataset or kfuse.data.Source (docs/data.md)"
    )


def is_map_style(obj: Any) -> bool:
    """Returns whether `obj` has single samples, `obj[i]`, that are to be collated into batches."""
    if isinstance(obj, (Dataset, str, bytes, Mapping, Tensor, np.ndarray, IterableDataset)):
        return False
    return hasattr(obj, "__getitem__") and hasattr(obj, "__len__") and not (_is_of_tensors(obj) and len(obj) == 2)


def _is_of_tensors(obj: Any) -> bool:
    return isinstance(obj, (tuple, list)) and bool(obj) and all(isinstance(part, (Tensor, np.ndarray)) for part in obj)


def _holds_all_samples(obj: Any) -> bool:
    """Whether `obj` is a dictionary, a dataclass or a nested pair of tensors and arrays only.

    A list is a list of samples, and so is a tuple, except a pair with tensors of one length throughout.
    """
    pair = isinstance(obj, tuple) and len(obj) == 2
    if not pair and not isinstance(obj, dict) and not (is_dataclass(obj) and not hasattr(obj, "__getitem__")):
        return False
    leaves = leaves_of(obj)
    if not leaves or not all(isinstance(leaf, (Tensor, np.ndarray)) for leaf in leaves):
        return False
    return not pair or len({leaf.shape[:1] for leaf in leaves}) == 1


def _as_tensor(part: Tensor | np.ndarray, target: bool = False) -> Tensor:
    if isinstance(part, Tensor):
        return part
    part = np.ascontiguousarray(part)  # torch has no negative strides
    if np.issubdtype(part.dtype, np.floating):
        return torch.tensor(part, dtype=torch.get_default_dtype())
    if target and np.issubdtype(part.dtype, np.integer):
        return torch.tensor(part.astype(np.int64))
    return torch.tensor(part)
