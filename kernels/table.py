"""How a bucket is cut into pieces: chunks of one tensor for `pack`, blocks of the flat buffer for norms.

Both sizes are part of the numerical contract. A sum of squares is rounded once per chunk or block, so moving
a boundary changes bits; therefore boundaries depend on the bucket alone, never on a launch or on a worker's shard.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

CHUNK = 4096  # most elements of one tensor that share a partial sum of squares in `pack`

BLOCK = 4096  # elements of a flat buffer that share a partial sum of squares; shards start at multiples of it

KEPT_TABLES = 8  # of the addresses of a bucket's gradients


def num_blocks(numel: int) -> int:
    """Number of partial sums `block_sumsq` writes for a flat buffer of `numel` elements."""
    return -(-numel // BLOCK)


def upload(table: Tensor, device: torch.device) -> Tensor:
    """A table of the host's on `device`, copied on the stream that is current there, without waiting."""
    if device.type == "cuda":
        # Pinned memory is fresh each time: the caching allocator keeps it until the copy has run. Any device may copy
        # from it, whichever was current as it was allocated (torch 2.13, aten/src/ATen/cuda/CachingHostAllocator.cpp).
        table = table.pin_memory()
    return table.to(device, non_blocking=True)


@dataclass(eq=False)
class PackTable:
    """Where each tensor of a bucket lies in the flat buffer, and how it is cut into chunks.

    Built once per bucket and device, and reused every step. Chunks of a tensor follow each other, tensors follow each
    other in the order given, and no chunk spans two tensors.

    Args:
        numels, offsets: of each tensor, in elements of the flat buffer.
        edges: of each tensor, where its chunks begin, and its end, in its own elements.
    """

    numels: tuple[int, ...]
    offsets: tuple[int, ...]
    device: torch.device
    edges: tuple[tuple[int, ...], ...]
    # By the stream and the addresses, the newest last: a step's micro-batches often have their gradients where the step
    # before had them, and making a table again takes the host longer than packing.
    _pointers: dict[tuple[int, tuple[int, ...]], Tensor] = field(default_factory=dict, repr=False)
    copied: int = 0  # how many of these were made, and copied to the device

    @cached_property
    def end(self) -> int:
        """One past the last element of the flat buffer that belongs to a tensor."""
        return self.offsets[-1] + self.numels[-1] if self.numels else 0

    @cached_property
    def numel(self) -> int:
        return sum(self.numels)

    @cached_property
    def chunk_counts(self) -> tuple[int, ...]:
        """The number of chunks of each tensor."""
        return tuple(len(edges) - 1 for edges in self.edges)

    @cached_property
    def num_chunks(self) -> int:
        return sum(self.chunk_counts)

    @cached_property
    def offset_alignment(self) -> int:
        """Largest power of two, at most 16, that divides every offset: what a GPU kernel may assume."""
        return math.gcd(16, *self.offsets)

    @cached_property
    def chunks(self) -> Tensor:
        """int64 [num_chunks, 4] on `device`: tensor index, start within it, length, start within the flat buffer.

        Triton's kernels read it. On a CPU nothing does, and it takes 1 / 128 of the gradients' memory.
        """
        rows = [
            (index, start, stop - start, offset + start)
            for index, (offset, edges) in enumerate(zip(self.offsets, self.edges, strict=True))
            for start, stop in pairwise(edges)
        ]
        return torch.tensor(rows, dtype=torch.int64).reshape(-1, 4).to(self.device)

    @cached_property
    def first_chunks(self) -> Tensor:
        """int64 [tensors + 1] on `device`: each tensor's first chunk, then `num_chunks`."""
        return torch.tensor([0, *accumulate(self.chunk_counts)], dtype=torch.int64).to(self.device)

    def split(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Each tensor's place in a flat buffer, 1-D."""
        sizes, end = [], 0
        for numel, offset in zip(self.numels, self.offsets, strict=True):
            sizes += [offset - end, numel]
            end = offset + numel
        return flat[:end].split_with_sizes(sizes)[1::2]

    def pointers(self, addresses: tuple[int, ...], stream: int) -> Tensor:
        """The gradients' addresses as an int64 tensor on `device`, copied there where they are not among the newest.

        stream: the current one's handle. A stream uses what was copied there on the same stream.
        """
        key = stream, addresses
        if key not in self._pointers:
            if len(self._pointers) == KEPT_TABLES:
                del self._pointers[next(iter(self._pointers))]
            self.copied += 1
            # By an array: torch.tensor takes several times as long to read as many numbers.
            self._pointers[key] = upload(torch.frombuffer(array("q", addresses), dtype=torch.int64), self.device)
        return self._pointers[key]

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
        edges: list[tuple[int, ...]] = []
        end = 0
        for numel, offset in zip(numels, offsets, strict=True):
            if numel < 0 or offset < end:
                raise ValueError(
                    f"segment {len(edges)} (numel {numel}, offset {offset}) must not be negative "
                    f"and must start at or after element {end}, where the segment before it ends"
                )
            head = 0 if start is None else min(numel, -(start + offset) % CHUNK)  # to the end of a block
            edges.append(tuple(sorted({0, *range(head, numel, CHUNK), numel})))
            end = offset + numel
        table = PackTable(tuple(numels), tuple(offsets), device, tuple(edges))
        if device.type != "cpu":
            table.chunks, table.first_chunks  # noqa: B018  now, and not while a CUDA graph is captured
        return table
