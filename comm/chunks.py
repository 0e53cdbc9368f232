"""A list of tensors as one sequence of bytes, cut into chunks of bounded size, for messages and for copies to the host.

A large tensor's chunks are parts of its own memory, so nothing is copied on the way. Small tensors share a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kfuse.comm.buckets import dense_order

CHUNK_BYTES = 32 * 2**20
"""Largest size of a chunk. At 32 MiB a message's or a copy's fixed cost (tens of microseconds) is below 1 %."""
_ALIGN = 64  # bytes: any type of element may start there


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

    A pure function, so that all workers cut alike. limit: the largest chunk; None: `CHUNK_BYTES`. A tensor of less than
    a 32nd of it is small.
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
    """A view of the tensor's memory: uint8 [bytes], its elements in the order in which they lie there.

    None where they do not lie side by side, each once: then there is no such view.
    """
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
