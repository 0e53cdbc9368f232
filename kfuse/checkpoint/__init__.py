"""Copies of a state on the host, which share nothing with it: what checkpoints and kf.state_dict consist of.

From a GPU all tensors are copied to a few blocks of pinned memory, on a stream of their own. The host waits for that
only before it uses the copy. The current stream's later work begins after the copies, so that it cannot change what is
being copied (a forward changes BatchNorm's statistics, an update the rest).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kfuse.comm import devices
from kfuse.comm.chunks import Chunk, cut, dense, gather, memory, plain_copy
from kfuse.comm.devices import Device, Event, Stream


@dataclass(frozen=True)
class HostCopy:
    """A copy of a nested value on the host."""

    value: Any
    # For each GPU that tensors come from, the event after which they are here. Until then they hold anything.
    on_the_way: tuple[tuple[Device, Event], ...]


class Snapshots:
    """Takes copies of states, one after the other. From a GPU each takes the memory of the one before."""

    def __init__(self) -> None:
        # For each GPU the copies' stream, and blocks of pinned memory (uint8), as the last state needed them.
        self._landings: dict[torch.device, tuple[Stream, list[Tensor]]] = {}

    def take(self, value: Any, where: str) -> HostCopy:
        """Returns a copy of `value` that shares nothing with it, tensors dense and on the host.

        What torch.load(weights_only=True) reads back, and nothing else: tensors, None, bool, int, float, str, and
        lists, tuples and dicts of those. One tensor at several places is one in the copy. where: what `value` is, for
        messages. Raises TypeError, naming the place.
        """
        found: dict[int, Tensor] = {}
        plain = plain_copy(value, where, lambda tensor: found.setdefault(id(tensor), tensor))
        here: dict[int, Tensor] = {}
        far: dict[torch.device, list[Tensor]] = {}
        for tensor in found.values():
            if devices.of(tensor.device).asynchronous:
                far.setdefault(tensor.device, []).append(tensor)
            else:
                here[id(tensor)] = tensor.detach().to("cpu", copy=True)
        on_the_way = []
        for name, tensors in far.items():
            copies, arrived = self._copy_from(devices.of(name), tensors)
            here.update(zip(map(id, tensors), copies, strict=True))
            on_the_way.append((devices.of(name), arrived))
        return HostCopy(plain_copy(plain, where, lambda tensor: here[id(tensor)]), tuple(on_the_way))

    def _copy_from(self, device: Device, tensors: list[Tensor]) -> tuple[list[Tensor], Event]:
        """Enqueues the copies of one GPU's tensors. Returns them, and the event after which they are there."""
        tensors = [dense(tensor) for tensor in tensors]
        memories = [view for tensor in tensors if (view := memory(tensor)) is not None]
        sizes, places = blocks(cut([tensor.nbytes for tensor in tensors]))
        if device.name not in self._landings:
            self._landings[device.name] = device.new_stream(), []
        stream, memory_of = self._landings[device.name]
        if [block.numel() for block in memory_of] != sizes:
            memory_of.clear()  # before as much again is taken
            memory_of.extend(device.pinned((size,), torch.uint8) for size in sizes)
        stream.wait_stream(device.current_stream())
        arrays = [block.numpy() for block in memory_of]
        here: dict[int, tuple[np.ndarray, int]] = {}  # by tensor: its block, and its first byte there
        with device.on(stream):
            for chunk, (number, at) in places:
                first = chunk.parts[0]
                source = memories[first.tensor][first.start : first.end]
                if len(chunk.parts) > 1:  # small tensors: one copy to the host for all of them
                    source = torch.empty(chunk.size, dtype=torch.uint8, device=source.device)
                    gather(memories, chunk, source)
                memory_of[number][at : at + chunk.size].copy_(source, non_blocking=True)
                here |= {part.tensor: (arrays[number], at + part.at - part.start) for part in chunk.parts}
            arrived = device.event()
            arrived.record()
        arrived.wait()  # the present stream: what it does next may change the tensors
        nowhere = np.empty(0, np.uint8), 0
        return [_at(*here.get(number, nowhere), tensor) for number, tensor in enumerate(tensors)], arrived


def blocks(chunks: Sequence[Chunk]) -> tuple[list[int], list[tuple[Chunk, tuple[int, int]]]]:
    """Lays chunks into blocks whose sizes are powers of two: to those torch rounds pinned memory up, so that one block
    of 84 GiB would take 128 (CachingHostAllocator.h, `allocate`). A tensor lies in one block.

    Returns the blocks' sizes (bytes), and with each chunk its block and its first byte there.
    """
    pieces: list[list[Chunk]] = []
    for chunk in chunks:
        if pieces and pieces[-1][0].parts[0].tensor == chunk.parts[0].tensor:
            pieces[-1].append(chunk)
        else:
            pieces.append([chunk])
    starts = [piece[0].start for piece in pieces] + [chunks[-1].start + chunks[-1].size for _ in chunks[:1]]
    sizes, places, free = list[int](), list[tuple[Chunk, tuple[int, int]]](), 0
    for piece, start, end in zip(pieces, starts, starts[1:], strict=False):
        if end - start > free:
            free = max(1 << (end - start - 1).bit_length(), 1 << ((starts[-1] - start).bit_length() - 1))
            sizes.append(free)
        places += [(chunk, (len(sizes) - 1, sizes[-1] - free + chunk.start - start)) for chunk in piece]
        free -= end - start
    one = 1 << (starts[-1] - 1).bit_length() if chunks else 0
    if one < sum(sizes):  # a few tensors of about a size
        return [one], [(chunk, (0, chunk.start)) for chunk in chunks]
    return sizes, places


def snapshot(value: Any, where: str) -> Any:
    """As `Snapshots.take`, complete: waits for what comes from a GPU."""
    copy = Snapshots().take(value, where)
    for _, arrived in copy.on_the_way:
        arrived.synchronize()
    return copy.value


def _at(place: np.ndarray, start: int, like: Tensor) -> Tensor:
    """The tensor at byte `start` of memory on the host, with the shape, strides and type of `like`.

    Its storage begins and ends with it, since what writes a tensor writes its storage.
    """
    if not like.numel():
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    own = torch.from_numpy(place[start : start + like.nbytes])
    return own.view(like.dtype).as_strided(like.shape, like.stride())
