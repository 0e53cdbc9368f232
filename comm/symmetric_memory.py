"""Memory of the workers' GPUs that each of them can read over the links between them: torch's symmetric memory.

torch.distributed._symmetric_memory allocates it, maps it into each worker's address space, and has a barrier that one
kernel waits at (torch 2.11 and 2.13; CUDASymmetricMemory.cu):

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
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from kfuse.comm import devices
from kfuse.comm.gloo import process_group
from kfuse.comm.group import Group

GRACE_S = 10.0  # how much longer than the group's timeout a barrier may take: longer than `Group.late_ranks`

# The groups that have symmetric memory, as process groups: torch's own registry does not keep them.
_KNOWN: weakref.WeakKeyDictionary[Group, Any] = weakref.WeakKeyDictionary()
_numbers = count()


def check_peer_access(group: Group) -> None:
    """Raises ValueError, on every rank, where this group's GPUs cannot read each other's memory.

    Every rank must call it at the same point, since they tell each other what they can read. Raises CommError.
    """
    if reason := _reason(group):
        raise ValueError(f"comm.schedule='symmetric': {reason}: choose another schedule")


def _reason(group: Group) -> str:
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
        allocated = symm_mem._SymmetricMemory.empty_strided_p2p((numel,), (1,), torch.float32, group.device)
        self.own = allocated.zero_()
        self._timeout_ms = round(1000 * (group.timeout_s + GRACE_S))
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
        self._handle.barrier(0, self._timeout_ms)


def _name(group: Group) -> str:
    """What torch calls this group. At the first call torch is told of it, which waits for the other ranks."""
    if group not in _KNOWN:
        name = f"kfuse-{next(_numbers)}"
        store = PrefixStore("symmetric", group.store)
        # torch asks the process group for its name. Only one with messages has a name: gloo's, which sends none.
        known: Any = dist.ProcessGroup(store, group.rank, group.size)
        connected = process_group(PrefixStore("gloo", store), group.rank, group.size, group.timeout_s, "127.0.0.1")
        known._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, connected)
        known._set_group_name(name)
        known._set_group_desc("kfuse")
        importlib.import_module("torch._C._distributed_c10d")._register_process_group(name, known)
        symm_mem: Any = importlib.import_module("torch.distributed._symmetric_memory")
        symm_mem._SymmetricMemory.set_group_info(name, group.rank, group.size, store)
        _KNOWN[group] = known
    return str(_KNOWN[group].group_name)
