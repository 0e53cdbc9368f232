"""How a bucket is cut into pieces: chunks of one tensor for `pack`, blocks of the flat buffer for norms.

Both sizes are part of the numerical contract. A sum of squares is rounded once per chunk or block, so moving
a boundary changes bits; therefore boundaries depend on the bucket alone, never on a launch or on a worker's shard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

CHUNK = 4096
"""Most elements of one tensor that share a partial sum of squares in `pack`."""

BLOCK = 4096
"""Elements of a flat buffer that share a partial sum of squares in `block_sumsq`. Shards start at multiples of it."""


def num_blocks(numel: int) -> int:
    """Number of partial sums `block_sumsq` writes for a flat buffer of `numel` elements."""
    return -(-numel // BLOCK)


@dataclass
class DevicePointers:
    """The gradients' addresses on the device, and the host's copy, by which a change is noticed."""

    uploaded: list[int] = field(default_factory=list)
    tensor: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    def upload(self, addresses: list[int], device: torch.device) -> Tensor:
        """The addresses as an int64 tensor on `device`, copied there only when they have changed, without waiting."""
        if addresses != self.uploaded:
            self.tensor, self.uploaded = upload(torch.tensor(addresses, dtype=torch.int64), device), addresses
        return self.tensor


def upload(table: Tensor, device: torch.device) -> Tensor:
    """A table of the host's on `device`, copied on the stream that is current there, without waiting."""
    if device.type == "cuda":
        # Pinned memory is fresh each time: the caching allocator keeps it until the copy has run. Any device may copy
        # from it, whichever was current as it was allocated (torch 2.13, aten/src/ATen/cuda/CachingHostAllocator.cpp).
        table = table.pin_memory()
    return table.to(device, non_blocking=True)


@dataclass
class Segments:
    """The tensors' places in the flat buffer that was last asked for: cutting it takes longer than packing it."""

    flat: Tensor | None = None
    views: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class PackTable:
    """Where each tensor of a bucket lies in the flat buffer, and how it is cut into chunks.

    Built once per bucket and device, and reused every step. Chunks of a tensor follow each other, tensors follow each
    other in the order given, and no chunk spans two tensors. A table is used from one stream at a time.

    Args:
        numels, offsets: of each tensor, in elements of the flat buffer.
        end: one past the last element of the flat buffer that belongs to a tensor.
        flat_sizes: sizes that split `flat[:end]` into gap, tensor, gap, tensor, ...; every second piece is a tensor.
        sumsq_sizes: sizes that split `sumsq` into each tensor's full chunks and, apart, its ragged last chunk (0 or 1).
        chunk_sizes: sizes that split the tensors, laid end to end, into chunks.
        heads: of each tensor, the elements before its first chunk that is not cut short at its beginning.
        offset_alignment: largest power of two, at most 16, that divides every offset: what a GPU kernel may assume.
    """

    numels: tuple[int, ...]
    offsets: tuple[int, ...]
    device: torch.device
    num_chunks: int
    end: int
    flat_sizes: tuple[int, ...]
    sumsq_sizes: tuple[int, ...]
    chunk_sizes: tuple[int, ...]
    heads: tuple[int, ...]
    offset_alignment: int
    pointers: DevicePointers = field(repr=False, compare=False)
    last_segments: Segments = field(repr=False, compare=False)

    def segments(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Each tensor's place in a flat buffer, 1-D."""
        last = self.last_segments
        if last.flat is not flat:
            last.flat, last.views = flat, flat[: self.end].split_with_sizes(self.flat_sizes)[1::2]
        return last.views

    @cached_property
    def chunks(self) -> Tensor:
        """int64 [num_chunks, 4] on `device`: tensor index, start within it, length, start within the flat buffer.

        Triton's kernels read it. On a CPU nothing does, and it takes 1 / 128 of the gradients' memory.
        """
        rows = [
            (index, at, stop - at, self.offsets[index] + at)
            for index, (numel, head) in enumerate(zip(self.numels, self.heads, strict=True))
            for at, stop in pairwise(_edges(numel, head))
        ]
        return torch.tensor(rows, dtype=torch.int64).reshape(-1, 4).to(self.device)

    @cached_property
    def first_chunks(self) -> Tensor:
        """int64 [tensors + 1] on `device`: each tensor's first chunk, then `num_chunks`."""
        counts = [len(_edges(numel, head)) - 1 for numel, head in zip(self.numels, self.heads, strict=True)]
        return torch.tensor([0, *accumulate(counts)], dtype=torch.int64).to(self.device)

    @staticmethod
    def build(
        numels: Sequence[int], offsets: Sequence[int], device: torch.device, start: int | None = None
    ) -> PackTable:
        """Lay out tensors of `numels` elements at `offsets` (in elements) of a flat buffer on `device`.

        start: the flat buffer is a part of a bucket and begins at this element of it. Chunks then end where the
        bucket's blocks do, so that those of a tensor are the same in whatever parts the bucket is cut at blocks. Not
        for `pack`. None: a tensor's chunks are counted from its own first element.
        Raises ValueError when the lengths differ, a number is negative, or segments overlap or are out of order.
        """
        if len(numels) != len(offsets):
            raise ValueError(f"numels and offsets must have the same length, got {len(numels)} and {len(offsets)}")
        flat_sizes: list[int] = []
        sumsq_sizes: list[int] = []
        chunk_sizes: list[int] = []
        heads: list[int] = []
        end = 0
        for index, (numel, offset) in enumerate(zip(numels, offsets, strict=True)):
            if numel < 0 or offset < end:
                raise ValueError(
                    f"segment {index} (numel {numel}, offset {offset}) must not be negative "
                    f"and must start at or after element {end}, where the segment before it ends"
                )
            flat_sizes += [offset - end, numel]
            sumsq_sizes += [numel // CHUNK, int(numel % CHUNK > 0)]
            heads.append(0 if start is None else min(numel, -(start + offset) % CHUNK))  # to the end of a block
            chunk_sizes += [stop - at for at, stop in pairwise(_edges(numel, heads[-1]))]
            end = offset + numel
        table = PackTable(
            numels=tuple(numels),
            offsets=tuple(offsets),
            device=device,
            num_chunks=len(chunk_sizes),
            end=end,
            flat_sizes=tuple(flat_sizes),
            sumsq_sizes=tuple(sumsq_sizes),
            chunk_sizes=tuple(chunk_sizes),
            heads=tuple(heads),
            offset_alignment=math.gcd(16, *offsets),
            pointers=DevicePointers(),
            last_segments=Segments(),
        )
        if device.type != "cpu":
            table.chunks, table.first_chunks  # noqa: B018  now, and not while a CUDA graph is captured
        return table


def _edges(numel: int, head: int) -> list[int]:
    """Where a tensor's chunks begin, and its end."""
    return sorted({0, *range(head, numel, CHUNK), numel})
