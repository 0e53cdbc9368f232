"""A double of torch's symmetric memory, between real processes of one host: files in shared memory that each one maps.

It stands for hardware that is not here. Installed over the double of NCCL (nccl_double.py); then a worker's "GPU" is
the CPU, with RANK as its number, and everything of kfuse runs as it does on GPUs. What is kept of the original (torch
2.13, torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemory.cu and CUDASymmetricMemory-inl.cuh):

1. Memory comes from `empty_strided_p2p`, uninitialised, and is mapped by `rendezvous`, which every rank must call; all
   ranks' sizes must be alike, and no two GPUs have the same number (`validate_rendezvous_requests`). The group's name
   must be known by `set_group_info`, and as a process group (`get_group_info`, `resolve_process_group`).
2. `barrier` is work on the current stream, and the host goes on (CUDASymmetricMemory::barrier). It ends when every
   rank's has begun. Signals are put when it begins; here each rank counts its own in every rank's pad, so that each
   word has one writer (the original sets and takes away a flag by compare-and-swap).
3. A barrier that takes longer than its timeout is a trap (barrier_kernel): whatever is asked of the GPU from then on
   fails with a CUDA error.
4. An event has happened when the work before it has; `wait` orders the stream behind it. Where the stream is the host,
   it blocks (`HOST_IS_STREAM` of nccl_double.py).
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from pathlib import Path
from typing import Any

import nccl_double
import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed import _symmetric_memory

from kfuse import session
from kfuse.comm import devices

FOLDER = Path("/dev/shm")
_CHANNELS = 32
_POLL_S = 0.0005


class _Gpu(nccl_double.AsynchronousCpu):
    def __init__(self, name: torch.device) -> None:
        super().__init__(name)
        self.number = int(os.environ.get("RANK", "0"))
        self.barriers: list[_Barrier] = []
        """On the stream, and not known to have ended."""
        self.trapped = False

    def reads(self, number: int) -> bool:
        return True

    def event(self, timing: bool = False) -> Any:
        return _Event(self)

    def check(self) -> None:
        """Raises RuntimeError after a trap. [3]"""
        if self.trapped:
            raise RuntimeError("CUDA error: unspecified launch failure")


class _Event(nccl_double.Event):
    """[4]"""

    def __init__(self, gpu: _Gpu) -> None:
        self._gpu, self._before = gpu, list[_Barrier]()

    def record(self, stream: Any = None) -> None:
        super().record(stream)
        self._before = list(self._gpu.barriers)

    def query(self) -> bool:
        over = super().query() and all(barrier.over() for barrier in self._before)
        self._gpu.check()
        return over

    def wait(self, stream: Any = None) -> None:
        super().wait(stream)
        while not (self._gpu.trapped or all(barrier.over() for barrier in self._before)):
            time.sleep(_POLL_S)

    def synchronize(self) -> None:
        super().synchronize()
        self.wait()
        self._gpu.check()


class _Barrier:
    def __init__(self, gpu: _Gpu, words: np.ndarray, number: int, timeout_ms: int) -> None:
        """words: this rank's pad for the channel, a word for each rank. number: of the barrier, from 1."""
        self._gpu, self._words, self._number = gpu, words, number
        self._deadline = time.monotonic() + timeout_ms / 1000

    def over(self) -> bool:
        """Whether every rank's has begun. [2]"""
        if self not in self._gpu.barriers:
            return True
        if (self._words >= self._number).all():
            with contextlib.suppress(ValueError):  # the group's thread asks, too
                self._gpu.barriers.remove(self)
            return True
        self._gpu.trapped = self._gpu.trapped or time.monotonic() > self._deadline  # [3]
        return False


class Handle:
    def __init__(self, gpu: _Gpu, rank: int, buffers: list[Tensor], pads: list[np.ndarray]) -> None:
        self._gpu, self.rank, self.world_size, self._buffers, self._pads = gpu, rank, len(pads), buffers, pads
        self._begun = [0] * _CHANNELS

    def get_buffer(self, rank: int, sizes: Any, dtype: torch.dtype, storage_offset: int = 0) -> Tensor:
        (numel,) = sizes
        assert dtype == self._buffers[rank].dtype
        return self._buffers[rank][storage_offset : storage_offset + numel]

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """As torch's. [2]"""
        self._gpu.check()
        self._begun[channel] += 1
        for pad in self._pads:
            pad[channel, self.rank] = self._begun[channel]
        mine = self._pads[self.rank][channel]
        self._gpu.barriers.append(_Barrier(self._gpu, mine, self._begun[channel], timeout_ms))


class Allocator:
    def __init__(self) -> None:
        self._files: dict[int, str] = {}
        self._groups: dict[str, tuple[int, int, Any]] = {}
        self._rendezvous = 0

    def empty_strided_p2p(self, size: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        """As torch's. What lies there is no number, so that a use before it is set shows. [1]"""
        (numel,) = size
        assert stride == (1,)
        name = f"kfuse-double-{uuid.uuid4()}"
        made = _mapped(name, numel, dtype).fill_(torch.nan)
        self._files[made.data_ptr()] = name
        return made

    def set_group_info(self, group_name: str, rank: int, world_size: int, store: Any) -> None:
        assert group_name not in self._groups
        self._groups[group_name] = (rank, world_size, store)

    def rendezvous(self, tensor: Tensor, group: str) -> Handle:
        """As torch's. [1]"""
        rank, size, store = self._groups[group]
        known: Any = _resolve_process_group(group)  # type: ignore[arg-type]
        assert (known.group_name, known.rank(), known.size()) == (group, rank, size)
        gpu = devices.of(tensor.device)
        assert isinstance(gpu, _Gpu)
        name, self._rendezvous = self._files[tensor.data_ptr()], self._rendezvous + 1
        store.set(f"double/{self._rendezvous}/{rank}", f"{name} {tensor.numel()} {gpu.number}")
        told = [store.get(f"double/{self._rendezvous}/{r}").decode().split() for r in range(size)]
        if len({number for _, _, number in told}) < size:
            raise RuntimeError("detected allocations from overlapping devices from different ranks.")
        if len({numel for _, numel, _ in told}) > 1:
            raise RuntimeError("Expected reqs[r].block_size == reqs[0].block_size to be true, but got false.")
        buffers = [tensor if r == rank else _mapped(told[r][0], tensor.numel(), tensor.dtype) for r in range(size)]
        flat_pads = [_mapped(f"{each[0]}-pad", _CHANNELS * size, torch.int64) for each in told]
        pads = [pad.numpy().reshape(_CHANNELS, size) for pad in flat_pads]
        store.set(f"double/{self._rendezvous}/{rank}/mapped", "")
        store.wait([f"double/{self._rendezvous}/{r}/mapped" for r in range(size)])
        for file in (name, f"{name}-pad"):
            (FOLDER / file).unlink()  # who has mapped it keeps it
        return Handle(gpu, rank, buffers, pads)


def _mapped(name: str, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.from_file(str(FOLDER / name), shared=True, size=max(1, numel), dtype=dtype)[:numel]


def install(**gpu: Any) -> None:
    """From now on this process's workers are on GPUs that read each other's memory. gpu: attributes of the device."""
    nccl_double.install()
    known: dict[torch.device, _Gpu] = {}

    def of(name: torch.device) -> _Gpu:
        if name not in known:
            known[name] = _Gpu(name)
            vars(known[name]).update(gpu)
        return known[name]

    allocator = Allocator()
    devices.of = of  # type: ignore[assignment]
    devices.count = lambda: 1
    session._choose_device = lambda: torch.device("cpu")
    _symmetric_memory._SymmetricMemory = allocator  # type: ignore[attr-defined]
    _symmetric_memory.rendezvous = allocator.rendezvous  # type: ignore[assignment]
