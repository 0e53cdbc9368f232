"""The snapshot of its weights that a worker offers to the others (pair averaging): written by one thread, read by many.

The weights are copied to one of two buffers in turn. A buffer that a reader still reads is not written: where a
transfer outlasts a publication, a further buffer is made, and kept. So a reader never gets a part of one snapshot and
a part of another, and the writer never waits for a reader.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kfuse.comm.devices import Device
from kfuse.comm.sync.weights import views


class Snapshot:
    """A copy of a model's weights in the host's memory, as they were after `step` steps."""

    flat: Tensor
    """fp32 [numel], each weight's elements in logical order."""
    step: int
    """Steps that the worker had made."""
    readers: int
    """How many read it now; `Snapshots` counts them under its lock."""

    def __init__(self, weights: Sequence[Tensor], device: Device) -> None:
        self.flat = device.pinned((sum(weight.numel() for weight in weights),), torch.float32)
        self.step, self.readers = -1, 0
        self._views = views(self.flat, weights)
        self._copied = device.event()

    def take(self, weights: Sequence[Tensor], step: int) -> None:
        """Starts copying the weights here. On a GPU the host does not wait."""
        torch._foreach_copy_(self._views, list(weights), non_blocking=True)
        self._copied.record()
        self.step = step

    def wait(self) -> None:
        """Returns when the copy is complete. Any thread may call it."""
        self._copied.synchronize()


class Snapshots:
    """The newest snapshot of one worker, and the buffers that it lies in by turns. Thread-safe.

    Needs twice the weights' bytes in fp32 on the host, and as much again for each transfer that outlasts a publication.
    """

    def __init__(self, weights: Sequence[Tensor], step: int, device: Device) -> None:
        """weights: of the model, fp32 or bf16, on `device`. They are published, as those after `step` steps."""
        self._device = device
        self._lock = threading.Lock()
        self._buffers: list[Snapshot] = []
        self._newest: Snapshot | None = None
        self.publish(weights, step)

    @property
    def buffers(self) -> int:
        """How many there are."""
        return len(self._buffers)

    def publish(self, weights: Sequence[Tensor], step: int) -> None:
        """Offers these weights, those of before with other values, from now on.

        Only one thread may call it. It waits for no reader.
        """
        with self._lock:
            free = next((each for each in self._buffers if each is not self._newest and not each.readers), None)
        if free is None:
            free = Snapshot(weights, self._device)
            self._buffers.append(free)
        free.take(weights, step)  # no reader can come to it: only the newest one is given out
        with self._lock:
            self._newest = free

    @contextlib.contextmanager
    def newest(self) -> Iterator[Snapshot]:
        """Context: the newest snapshot, complete, which is not written meanwhile."""
        with self._lock:
            assert self._newest is not None
            found = self._newest
            found.readers += 1
        try:
            found.wait()
            yield found
        finally:
            with self._lock:
                found.readers -= 1
