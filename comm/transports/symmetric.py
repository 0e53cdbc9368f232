"""Every rank pulls all contributions to its shard from the other GPUs' memory, and adds them as it reads them.

The slots lie in symmetric memory. A barrier on the device says that all ranks have packed a bucket; then one kernel
reads this rank's shard of every rank's slots, in canonical order, and writes and measures the sum. No contribution is
received or copied before. The sums, or with sharded state the parameters, are then shared by the group's own messages.

When a slot may be packed again: a rank shares its part only behind its own pull (`share` of the gradient; with sharded
state the sums of squares, `Executor.share_sums`). So once a rank has all parts, all ranks have pulled.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from kfuse.comm import devices
from kfuse.comm.buckets import ALIGN, Bucket
from kfuse.comm.group import Group, Pending
from kfuse.comm.sum_tree import Merge
from kfuse.comm.symmetric_memory import SymmetricMemory, check_peer_access
from kfuse.kernels import reduce


class Symmetric:
    """The transport `symmetric`: contributions stay where they are, and every rank reads its shard of all of them."""

    def __init__(self, group: Group, unit: int = ALIGN) -> None:
        """Raises ValueError where this group's GPUs cannot read each other's memory, on every rank; CommError."""
        check_peer_access(group)
        self._group, self._unit, self._device = group, unit, devices.of(group.device)
        self._buckets: Sequence[Bucket] = ()
        self._numel = 0
        self._memories: list[SymmetricMemory] = []  # of the slots of all buckets, by the slot's number
        self._parts: dict[int, slice] = {}  # of the memories, by bucket: what is under way
        self._barriers: dict[int, Pending] = {}

    def hold(self, buckets: Sequence[Bucket]) -> None:
        """From now on the slots of these buckets that are exchanged lie in symmetric memory."""
        if self._group.size == 1:
            return
        starts = list(accumulate((-(-(b.body + b.tail) // ALIGN) * ALIGN for b in buckets), initial=0))
        self._numel = starts[-1]
        self._grow(1)
        for bucket, start in zip(buckets, starts, strict=False):
            bucket.renew(new_slot=partial(self._slot, start, bucket.body + bucket.tail))
        self._buckets = buckets
        rows = [torch.zeros(ALIGN, device=self._group.device) for _ in range(2)]
        for sumsq in (None, torch.zeros(1, device=self._group.device)):
            reduce(rows, ((0, 1),), rows[0], sumsq)  # compiled here, between steps, for the orders of all later plans

    def _grow(self, slots: int) -> None:
        while len(self._memories) < slots:
            self._memories.append(SymmetricMemory(self._group, self._numel))
            for bucket in self._buckets:
                del bucket.slots[len(self._memories) - 1 :]  # they lie there from now on

    def _slot(self, start: int, numel: int, k: int) -> Tensor | None:
        """Slot k of the bucket whose slots start there in each memory. None: it is not exchanged."""
        return self._memories[k].own[start : start + numel] if k < len(self._memories) else None

    def plan(self, pieces: Sequence[int], merges: tuple[Merge, ...]) -> None:
        """All ranks have the same plan. Where it exchanges more slots than any before, they get symmetric memory."""
        self._pieces, self._merges = pieces, merges
        if self._buckets:
            self._grow(max(pieces))

    def launch(self, key: int, slots: Sequence[Tensor], what: str) -> None:
        """Puts a barrier on the current stream: behind it all ranks have packed."""
        first = self._memories[0]
        start = (slots[0].data_ptr() - first.own.data_ptr()) // slots[0].element_size()
        part = slice(start, start + slots[0].numel())
        for slot, memory in zip(slots[: self._pieces[self._group.rank]], self._memories, strict=False):
            assert slot.data_ptr() == memory.own[part].data_ptr(), "a slot that is exchanged must lie in its memory"
        self._parts[key] = part
        self._barriers[key] = self._group.follow(f"{what} (symmetric, packed by all)", first.barrier)

    def arrived(self, key: int) -> bool:
        return self._barriers[key].done()

    def wait(self, key: int) -> None:
        self._barriers.pop(key).wait_on_stream()

    def reduce(self, key: int, flat: Tensor, sumsq: Tensor | None = None) -> None:
        part = self._parts.pop(key)
        shard = self._group.shards(part.stop - part.start, self._unit)[self._group.rank]
        here = slice(part.start + shard.start, part.start + shard.stop)
        rows = [self._memories[k].of[rank][here] for rank, count in enumerate(self._pieces) for k in range(count)]
        # After an abort they may be dropped while the kernel still runs.
        self._device.keep([flat, *([] if sumsq is None else [sumsq])], self._device.current_stream())
        reduce(rows, self._merges, flat[shard], sumsq)
