"""A list of tensors as one sequence of bytes, cut into chunks of bounded size, for messages and for copies to the host;
and nested structures of tensors that one worker sends to others so.

A large tensor's chunks are parts of its own memory, so nothing is copied on the way. Small tensors share a chunk.
"""

from __future__ import annotations

import io
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kfuse.comm.buckets import dense_order
from kfuse.comm.group import Group

CHUNK_BYTES = 32 * 2**20  # of the largest chunk: a message's or a copy's fixed cost is below 1 %
_ALIGN = 64  # bytes: any type of element may start there
_TRANSFER = "state of the most advanced worker"
_PLAIN = frozenset((type(None), bool, int, float, str))


class Part(NamedTuple):
    """Bytes `start` to `end` of tensor number `tensor` in the list. They begin at byte `at` of their chunk."""

    tensor: int
    start: int
    end: int
    at: int


class Chunk(NamedTuple):
    """One part of a large tensor, or several small tensors, whole. It begins at byte `start` of the sequence."""

    start: int
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        """Bytes, those between its parts included."""
        return self.parts[-1].at + self.parts[-1].end - self.parts[-1].start


def cut(sizes: Sequence[int], limit: int | None = None) -> list[Chunk]:
    """The chunks of tensors of these sizes (bytes), first of the large tensors, then of the small ones.

    limit: the largest chunk; None: `CHUNK_BYTES`. A tensor of less than a 32nd of it is small.
    """
    limit = CHUNK_BYTES if limit is None else limit
    chunks: list[Chunk] = []
    start = 0

    def add(parts: Sequence[Part]) -> None:
        nonlocal start
        chunks.append(Chunk(start, tuple(parts)))
        start += _aligned(chunks[-1].size)

    for tensor, size in enumerate(sizes):
        if size >= limit // 32:
            for first in range(0, size, limit):
                add([Part(tensor, first, min(first + limit, size), 0)])
    gathered: list[Part] = []
    at = 0
    for tensor, size in enumerate(sizes):
        if 0 < size < limit // 32:
            if at + size > limit:
                add(gathered)
                gathered, at = [], 0
            gathered.append(Part(tensor, 0, size, at))
            at = _aligned(at + size)
    if gathered:
        add(gathered)
    return chunks


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def memory(tensor: Tensor) -> Tensor | None:
    """A view of the tensor's memory, uint8 [bytes]; None where its elements do not lie side by side, each once."""
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        return None
    tensor = tensor.detach()
    order = dense_order(tensor)
    return None if order is None else tensor.permute(order).reshape(-1).view(torch.uint8)


def dense(tensor: Tensor) -> Tensor:
    """The tensor, detached, where it has a `memory`; else a copy that has one."""
    tensor = tensor.detach()
    return tensor if memory(tensor) is not None else tensor.resolve_conj().resolve_neg().contiguous()


def gather(memories: Sequence[Tensor], chunk: Chunk, buffer: Tensor) -> None:
    """Copies the chunk's bytes from the tensors' memories to `buffer`, uint8 [at least chunk.size]."""
    torch._foreach_copy_(_places(chunk, buffer), _sources(memories, chunk))


def scatter(buffer: Tensor, chunk: Chunk, memories: Sequence[Tensor]) -> None:
    """Copies the chunk's bytes from `buffer` to the tensors' memories."""
    torch._foreach_copy_(_sources(memories, chunk), _places(chunk, buffer))


def _places(chunk: Chunk, buffer: Tensor) -> list[Tensor]:
    return [buffer[part.at : part.at + part.end - part.start] for part in chunk.parts]


def _sources(memories: Sequence[Tensor], chunk: Chunk) -> list[Tensor]:
    return [memories[part.tensor][part.start : part.end] for part in chunk.parts]


# -- from one worker to others ----------------------------------------------------------------------------------------


def share(group: Group, source: int, make: Callable[[], Any], room: Callable[[Any], Any] | None) -> Any:
    """Sends what `make` returns on rank `source` to the ranks that want it. Every rank calls it.

    1) The structure travels pickled: plain values, and each tensor's shape, strides and dtype.
    2) The tensors follow in chunks, each a broadcast: from the source's own memory to the receiver's
       own, large ones without a copy. No rank needs more than one chunk of memory besides.

    room: None on a rank that does not receive, whose own tensors are not touched. On one that does: room(structure)
    returns the tensors to be overwritten, in a structure like the one given; where one is missing there or does not
    fit, a new one is made. It is called before the first byte arrives; from then on these tensors hold parts of both
    states, until all has arrived. Where it returns None all tensors are new, and in the host's memory.

    Returns on a receiver what `make` returned there, with this rank's tensors: in room's, those of the host on the
    host, all others on the group's device. None on the others. Raises CommError.
    """
    payload, sizes, tensors, received = b"", list[int](), list[Tensor](), None
    if group.rank == source:
        structure, descriptions, tensors = _take_apart(make())
        host = [tensor.device.type == "cpu" != group.device.type for tensor in tensors]
        buffer = io.BytesIO()
        torch.save([structure, descriptions, host], buffer)
        payload, sizes = buffer.getvalue(), [description.nbytes for description in descriptions]
    payload, sizes = _share_bytes(group, source, payload, sizes)
    if group.rank != source and room is not None:
        structure, descriptions, host = decode(payload, group.device)
        own = room(structure)
        where = [torch.device("cpu") if own is None or on_host else group.device for on_host in host]
        received, tensors = _put_in_place(structure, own, descriptions, where)
    _share_tensors(group, source, sizes, tensors)
    return received


def _share_bytes(group: Group, source: int, payload: bytes, sizes: list[int]) -> tuple[bytes, list[int]]:
    """The source's payload and the sizes of its tensors, which a rank that decodes nothing needs too."""
    lengths = torch.tensor([len(payload), len(sizes)], device=group.device)
    group.broadcast(lengths, _TRANSFER, source).wait()
    length, count = lengths.tolist()
    message = torch.empty(8 * count + length, dtype=torch.uint8, device=group.device)
    if group.rank == source:
        message.copy_(torch.frombuffer(bytearray(array("q", sizes).tobytes() + payload), dtype=torch.uint8))
    group.broadcast(message, _TRANSFER, source).wait()
    both = message.cpu().numpy().tobytes()
    return both[8 * count :], array("q", both[: 8 * count]).tolist()


def _take_apart(value: Any) -> tuple[Any, list[Tensor], list[Tensor]]:
    """`value` with a description (a tensor on the meta device) in each tensor's place; descriptions; the tensors.

    Two tensors that are the same memory, as of tied weights, are one in the lists.
    """
    tensors: list[Tensor] = []
    descriptions: list[Tensor] = []
    described: dict[object, Tensor] = {}

    def describe(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return tensor
        if type(tensor) is not Tensor:
            tensor = tensor.as_subclass(Tensor)  # its elements: each worker's own tensor has the class
        key = (tensor.device, tensor.dtype, tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and key in described:
            return described[key]
        tensor = dense(tensor)
        description = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        tensors.append(tensor)
        descriptions.append(description)
        described[key] = description
        return description

    return plain_copy(value, "the training state", describe, any_tensor=True), descriptions, tensors


def plain_copy(
    value: Any,
    where: str,
    of_tensor: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    any_tensor: bool = False,
) -> Any:
    """A copy of `value` with of_tensor(tensor) for each tensor: what torch.load(weights_only=True) reads back.

    numpy's scalars and subclasses of plain values become those: reading accepts nothing else. where: what `value` is,
    for messages. any_tensor: of_tensor takes sparse, quantized and subclassed tensors too.
    Raises TypeError, naming the place, for anything but tensors, None, bool, int, float, str, and lists, tuples and
    dicts of those.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Tensor):
        kind = type(value.detach())
        if hasattr(kind, "__tensor_flatten__") or not (
            any_tensor or (kind is Tensor and value.layout is torch.strided)
        ):
            kinds = "a tensor" if any_tensor else "a plain dense tensor"
            raise TypeError(f"{where} is a {kind.__qualname__} of layout {value.layout}: must be {kinds}")
        return of_tensor(value)
    for plain in (int, float, str):
        if isinstance(value, plain):
            return plain(value)
    if type(value) in (list, tuple):
        if _PLAIN.issuperset(map(type, value)):  # a list of numbers may be long
            return type(value)(value)
        copies = (plain_copy(item, f"{where}[{index}]", of_tensor, any_tensor) for index, item in enumerate(value))
        return type(value)(copies)
    if type(value) in (dict, OrderedDict, Counter):  # MultiStepLR has a Counter
        copy = type(value)()
        for key, item in value.items():
            copy[plain_copy(key, where)] = plain_copy(item, f"{where}[{key!r}]", of_tensor, any_tensor)
        if isinstance(copy, OrderedDict):  # a module's state dict has its version numbers in an attribute
            vars(copy).update(plain_copy(vars(value), f"vars({where})", of_tensor, any_tensor))
        return copy
    allowed = "tensors, None, bool, int, float, str, and lists, tuples and dicts of those"
    raise TypeError(f"{where} is a {type(value).__qualname__}; what a state can hold: {allowed}")


def _put_in_place(
    structure: Any, own: Any, descriptions: list[Tensor], devices: list[torch.device]
) -> tuple[Any, list[Tensor]]:
    """The structure with this rank's tensors, `own` where they fit and else new ones on `devices`; the list of them."""
    numbers = {id(description): number for number, description in enumerate(descriptions)}
    tensors: dict[int, Tensor] = {}

    def placed(value: Any, mine: Any) -> Any:
        """A copy of `value`. mine: what `own` has in that place; None where it has nothing."""
        if isinstance(value, Tensor):
            if (number := numbers.get(id(value))) is None:
                return value  # of a kind that does not travel in chunks
            if number not in tensors:
                tensors[number] = _room(value, mine, devices[number])
            return tensors[number]
        if type(value) in (list, tuple):
            if _PLAIN.issuperset(map(type, value)):  # a list of numbers may be long
                return value
            others = mine if type(mine) is type(value) and len(mine) == len(value) else [None] * len(value)
            return type(value)(map(placed, value, others))
        if type(value) in (dict, OrderedDict):
            others = mine if isinstance(mine, dict) else {}
            copy = type(value)((key, placed(item, others.get(key))) for key, item in value.items())
            if isinstance(copy, OrderedDict):  # a module's state dict has its version numbers in an attribute
                vars(copy).update(vars(value))
            return copy
        return value

    structure = placed(structure, own)
    return structure, [tensors[number] for number in range(len(numbers))]


def _room(description: Tensor, mine: Any, device: torch.device) -> Tensor:
    """`mine`, where its memory is on the device and can take the described tensor's bytes; else a new tensor."""
    shape, strides, dtype = description.shape, description.stride(), description.dtype
    if (
        isinstance(mine, Tensor)
        and (mine.device, mine.shape, mine.dtype) == (device, shape, dtype)
        and mine.stride() == strides
        and memory(mine) is not None
    ):
        return mine.detach()
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def _share_tensors(group: Group, source: int, sizes: list[int], tensors: list[Tensor]) -> None:
    """Broadcasts the source's tensors, chunk by chunk. sizes: their bytes. tensors: empty on a rank that takes none."""
    memories = [view for tensor in tensors if (view := memory(tensor)) is not None]
    chunks = cut(sizes)
    staging: Tensor | None = None
    for chunk in chunks:
        first = chunk.parts[0]
        message = memories[first.tensor][first.start : first.end] if memories else None
        staged = message is None or len(chunk.parts) > 1 or message.device != group.device
        if staged:
            if staging is None:
                most = max(each.size for each in chunks)
                staging = torch.empty(most, dtype=torch.uint8, device=group.device)
            message = staging[: chunk.size]
            if group.rank == source:
                gather(memories, chunk, message)
        assert message is not None
        group.broadcast(message, _TRANSFER, source).wait()
        if staged and memories and group.rank != source:
            scatter(message, chunk, memories)


def decode(payload: bytes, device: torch.device) -> Any:
    """Decodes a pickled structure. Tensors in it, of kinds that do not travel in chunks (sparse ones), that were on a
    GPU are put on `device`; those of the host stay there. Raises pickle.UnpicklingError for what could run code.
    """
    move: Any = torch.serialization.default_restore_location

    def place(storage: Any, location: str) -> Any:
        return storage if location == "cpu" else move(storage, str(device))

    return torch.load(io.BytesIO(payload), map_location=place, weights_only=True)
