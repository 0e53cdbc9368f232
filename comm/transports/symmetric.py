"""Every rank pulls all contributions to its shard from the other GPUs' memory, and adds them as it reads them.

The slots lie in symmetric memory, which all of the workers' GPUs can read. A barrier on the device says that all ranks
have packed a bucket; then one kernel reads this rank's shard of every rank's slots, in canonical order, and writes and
measures the sum. No contribution is received or copied before. The sums, or with sharded state the parameters, are then
shared by the group's own messages.

When a slot may be packed again: a rank shares its part only behind its own pull (`share` of the gradient; with sharded
state the sums of squares, `Executor.share_sums`). So once a rank has all parts, all ranks have pulled.

torch.distributed._symmetric_memory allocates such memory, maps it into each worker's address space, and has a barrier
that one kernel waits at (torch 2.11 and 2.13; CUDASymmetricMemory.cu):

1) `rendezvous` takes the name of a group: it asks for the store by `get_group_info`, later versions for the process
   group by `resolve_process_group`. Both are given here, for a group that only kfuse knows. It tells GPUs apart by
   their numbers, and refuses two workers whose GPU has the same one (`validate_rendezvous_requests`).
2) A barrier that takes longer than its timeout ends the kernel by a trap: after that the process cannot use its GPU any
   more. So it has longer than a group's timeout, after which the group's own thread names whom it waited for.
3) `symm_mem.empty` takes memory from a pool, which would give it away again while another worker may still read it. So
   it is allocated without the pool, and freed when it is dropped: what others have mapped stays until they drop it too.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from kfuse.comm import devices
from kfuse.comm.buckets import ALIGN, Bucket, flat_zeros
from kfuse.comm.gloo import process_group
from kfuse.comm.group import Group, Pending
from kfuse.comm.sum_tree import Merge
from kfuse.comm.transports import Cuts
from kfuse.kernels import reduce
from kfuse.kernels.private_names import need

GRACE_S = 10.0  # how much longer than the group's timeout a barrier may take: longer than `Group.late_ranks`

# The groups that have symmetric memory, as process groups: torch's own registry does not keep them.
_KNOWN: weakref.WeakKeyDictionary[Group, Any] = weakref.WeakKeyDictionary()
_numbers = count()


class Symmetric:
    """The transport `symmetric`: contributions stay where they are, and every rank reads its shard of all of them."""

    def __init__(self, group: Group, cuts: Cuts) -> None:
        """Raises ValueError where this group's GPUs cannot read each other's memory, on every rank; CommError."""
        if reason := _unfit(group):
            raise ValueError(f"comm.schedule='symmetric': {reason}: choose another schedule")
        self._group, self._cuts, self._device = group, cuts, devices.of(group.device)
        self._buckets: Sequence[Bucket] = ()
        self._numel = 0
        self._memories: list[SymmetricMemory] = []  # of the slots of all buckets, by the slot's number
        self._parts: dict[int, slice] = {}  # of the memories, by bucket: what is under way
        self._barriers: dict[int, Pending] = {}

    def hold(self, buckets: Sequence[Bucket]) -> None:
        """From now on the slots of these buckets that are exchanged lie in symmetric memory."""
        if self._group.size == 1:
            return
        starts = list(accumulate((-(-(b.body + b.tail + b.room) // ALIGN) * ALIGN for b in buckets), initial=0))
        self._numel = starts[-1]
        self._grow(1)
        for bucket, start in zip(buckets, starts, strict=False):
            bucket.renew(new_slot=partial(self._slot, start, bucket.body + bucket.tail))
        self._buckets = buckets
        rows = [torch.zeros(ALIGN, dtype=torch.float32, device=self._group.device) for _ in range(2)]
        for sumsq in (None, torch.zeros(1, dtype=torch.float32, device=self._group.device)):
            reduce(rows, ((0, 1),), rows[0], sumsq)  # compiled here, between steps, for the orders of all later plans

    def _grow(self, slots: int) -> None:
        while len(self._memories) < slots:
            self._memories.append(SymmetricMemory(self._group, self._numel))
            for bucket in self._buckets:
                del bucket.slots[len(self._memories) - 1 :]  # they lie there from now on

    def _slot(self, start: int, numel: int, k: int) -> Tensor:
        """Slot k of the bucket whose slots start there in each memory, or in memory of its own: it is not exchanged."""
        if k >= len(self._memories):
            return flat_zeros(numel, k, self._group.device)
        slot: Tensor = self._memories[k].own[start : start + numel]
        return slot

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
        shard = self._cuts(key, part.stop - part.start)[self._group.rank]
        here = slice(part.start + shard.start, part.start + shard.stop)
        rows = [self._memories[k].of[rank][here] for rank, count in enumerate(self._pieces) for k in range(count)]
        # After an abort they may be dropped while the kernel still runs.
        self._device.keep([flat, *([] if sumsq is None else [sumsq])], self._device.current_stream())
        reduce(rows, self._merges, flat[shard], sumsq)


# -- the memory -------------------------------------------------------------------------------------------------------


def _unfit(group: Group) -> str:
    """Why this group's GPUs cannot read each other's memory, on every rank; "" where they can.

    Every rank must call it at the same point, since they tell each other what they can read. Raises CommError.
    """
    device, size = devices.of(group.device), group.size
    if device.number is None:
        return "parameters lie on the CPU, and symmetric memory is GPUs'"
    if not group.fixed:
        return "the number of workers may change, or a lost one be replaced"
    if len(set(group.hosts)) > 1:
        return f"the workers are on {len(set(group.hosts))} hosts"
    if size == 1:
        return ""
    numbers = _of_all(group, device.number, "numbers of the GPUs")
    unreadable = next((rank for rank in range(size) if rank != group.rank and not device.reads(numbers[rank])), -1)
    for rank, other in enumerate(_of_all(group, unreadable, "links between the GPUs")):
        if other >= 0:
            return f"cuda:{numbers[rank]} (rank {rank}) cannot read the memory of cuda:{numbers[other]} (rank {other})"
    return ""


def _of_all(group: Group, number: int, what: str) -> list[int]:
    return [int(each) for each in group.all_gather(torch.tensor([number], device=group.device), what)]


class SymmetricMemory:
    """fp32 memory on each worker's GPU, as much on every one, that all of them read. `own`: this worker's, [numel]."""

    def __init__(self, group: Group, numel: int) -> None:
        """numel: elements on each worker; they are zeros. Every rank must make it at the same point.

        Raises CommError if the others do not come, or their memory cannot be mapped.
        """
        symm_mem: Any = importlib.import_module("torch.distributed._symmetric_memory")
        need("torch.distributed._symmetric_memory._SymmetricMemory")
        allocated = symm_mem._SymmetricMemory.empty_strided_p2p((numel,), (1,), torch.float32, group.device)
        self.own = allocated.zero_()
        self._group = group
        device = devices.of(group.device)

        def connect() -> Any:
            device.make_current()
            return symm_mem.rendezvous(allocated, _name(group))

        self._handle = group.connect(connect, lambda handle: None, "symmetric memory", "map symmetric memory")
        get = self._handle.get_buffer
        # By rank: fp32 [numel], the memory of that worker, at this one's address for it.
        self.of: list[Tensor] = [get(rank, (numel,), torch.float32, 0) for rank in range(group.size)]

    def barrier(self) -> None:
        """Puts a kernel on the current stream that ends when every worker's has begun: what was written to the memory
        before, on that stream of each worker, can be read behind it.
        """
        self._handle.barrier(0, round(1000 * (self._group.limit_s + GRACE_S)))


def _name(group: Group) -> str:
    """What torch calls this group. At the first call torch is told of it, which waits for the other ranks."""
    if group not in _KNOWN:
        name = f"kfuse-{next(_numbers)}"
        store = PrefixStore("symmetric", group.store)
        # torch asks the process group for its name. Only one with messages has a name: gloo's, which sends none.
        known: Any = dist.ProcessGroup(store, group.rank, group.size)
        connected = process_group(PrefixStore("gloo", store), group.rank, group.size, group.limit_s, "127.0.0.1")
        known._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, connected)
        known._set_group_name(name)
        known._set_group_desc("kfuse")
        importlib.import_module("torch._C._distributed_c10d")._register_process_group(name, known)
        symm_mem: Any = importlib.import_module("torch.distributed._symmetric_memory")
        symm_mem._SymmetricMemory.set_group_info(name, group.rank, group.size, store)
        _KNOWN[group] = known
    return str(_KNOWN[group].group_name)
