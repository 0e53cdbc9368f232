"""A double of ProcessGroupNCCL in one process, for the recorder: the other ranks contribute what this one does.

Only the order of work is of interest, so values are finite and mean nothing. `kfuse.comm.nccl` runs over it.
A message has come through when the recorder says so: the host has polled it, with a pause between.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from gpu.order import patched
from gpu.recorder import Recorder
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


class StandInWork:
    def __init__(self, recorder: Recorder, communicator: object) -> None:
        self._recorder, self.communicator = recorder, communicator

    def is_completed(self) -> bool:
        return self._recorder.completed(self)

    def block_current_stream(self) -> None:
        self._recorder.synchronized(self)

    def get_future_result(self) -> Any:
        return SimpleNamespace(done=lambda: False)


class StandInProcessGroup:
    recorder: Recorder

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace()

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        self._size = size

    def eager_connect_single_device(self, device: Any) -> None:
        """Connects."""

    def allreduce(self, tensor: Tensor, op: Any = None) -> StandInWork:
        with _disable_current_modes():
            tensor.mul_(self._size)
        return self._enqueue([tensor], [tensor])

    def alltoall_base(self, out: Tensor, tensor: Tensor, into: list[int], cut: list[int]) -> StandInWork:
        with _disable_current_modes():
            out.zero_()
            out[: into[0]].copy_(tensor[: into[0]])
        return self._enqueue([tensor], [out])

    def _start_coalescing(self) -> None:
        self._reads: list[Tensor] = []
        self._writes: list[Tensor] = []

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        self._reads += tensors

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        with _disable_current_modes():
            for tensor in tensors:
                tensor.zero_()
        self._writes += tensors

    def _end_coalescing(self) -> StandInWork:
        return self._enqueue(self._reads, self._writes)

    def _reduce_scatter_base(self, out: Tensor, tensor: Tensor) -> StandInWork:
        with _disable_current_modes():
            out.mul_(self._size)
        return self._enqueue([tensor], [out])

    def reduce(self, tensor: Tensor, root: int) -> StandInWork:
        """In place: the tensor stays as it is; what ranks other than the root have after it is undefined."""
        return self._enqueue([tensor], [tensor])

    def broadcast(self, tensor: Tensor, root: int) -> StandInWork:
        return self._enqueue([tensor], []) if root == 0 else self._enqueue([], [tensor])

    def _allgather_base(self, out: Tensor, tensor: Tensor) -> StandInWork:
        if tensor.untyped_storage().data_ptr() != out.untyped_storage().data_ptr():  # else theirs are there already
            with _disable_current_modes():
                out.view(self._size, -1).copy_(tensor)
        return self._enqueue([tensor], [out])

    def abort(self) -> None:
        self.recorder.aborted()

    def shutdown(self) -> None:
        """Ends."""

    def _enqueue(self, reads: list[Tensor], writes: list[Tensor]) -> StandInWork:
        work = StandInWork(self.recorder, self)
        self.recorder.enqueued(work, reads, writes)
        return work


@contextmanager
def nccl_stood_in(recorder: Recorder) -> Iterator[None]:
    """Context: torch.distributed.ProcessGroupNCCL, which a torch for CPUs does not have, is the double."""
    stand_in = type("ProcessGroupNCCL", (StandInProcessGroup,), {"recorder": recorder})
    with patched(dist, "ProcessGroupNCCL", stand_in):
        yield
