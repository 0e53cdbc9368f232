"""A double of a group of workers in one process: its other ranks contribute what this one does. For the recorder.

Only the order of work is of interest, so values are finite and mean nothing. A message belongs to the communicator's own
stream, as NCCL's does. Where the group may change (`check`), the host polls it, as `kfuse.comm.group` promises.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from gpu.recorder import Recorder
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from kfuse.comm.group import Group, Pending


class StandInWork:
    """Double of a Work of ProcessGroupNCCL."""

    def __init__(self, communicator: object) -> None:
        self.communicator = communicator


class StandInPending(Pending):
    """A message under way."""

    def __init__(self, group: StandInGroup, what: str, work: StandInWork) -> None:
        super().__init__(group, what, [])
        self._recorder, self._work = group.recorder, work

    def done(self) -> bool:
        """As Pending's."""
        return self._recorder.completed(self._work)

    def wait_on_stream(self) -> None:
        """As Pending's."""
        self._recorder.synchronized(self._work)

    def wait(self) -> None:
        """As Pending's."""
        self.wait_on_stream()
        self.poll()

    def poll(self) -> None:
        """The host waits until the message is through."""
        while not self.done():
            self.group.check()
            time.sleep(20e-6)


class StandInGroup(Group):
    """Rank 0 of `size` workers."""

    def __init__(self, recorder: Recorder, size: int, check: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.recorder, self.size, self.hosts = recorder, size, [""] * size
        self.waits_each_step = self.polls = check is not None
        self.check = check or (lambda: None)
        self._last: StandInPending | None = None

    def lane(self, number: int) -> Group:
        """One lane, as with NCCL."""
        return self

    def abort(self) -> None:
        """Ends what is under way."""
        self.recorder.aborted()

    def settle(self) -> None:
        """At the end of a step's reduction: where the group may change, the host waits for the last message."""
        if self.waits_each_step and self._last is not None:
            self._last.poll()

    def all_reduce(self, tensor: Tensor, what: str, op: str = "sum") -> Pending:
        """As Group's."""
        with _disable_current_modes():
            tensor.mul_(self.size if op in ("sum", "avg") else 1)
        return self._enqueue(what, [tensor], [tensor])

    def all_to_all(self, out: Tensor, into: Sequence[int], tensor: Tensor, cut: Sequence[int], what: str) -> Pending:
        """As Group's."""
        with _disable_current_modes():
            out.zero_()
            if into[0]:
                out[: into[0]].copy_(tensor[: cut[0]])
        return self._enqueue(what, [tensor], [out])

    def share(self, parts: Sequence[Tensor], what: str) -> Pending:
        """As Group's."""
        return self._enqueue(what, [parts[self.rank]], [part for r, part in enumerate(parts) if r != self.rank])

    def broadcast(self, tensor: Tensor, what: str, source: int = 0) -> Pending:
        """As Group's."""
        mine = source == self.rank
        return self._enqueue(what, [tensor] if mine else [], [] if mine else [tensor])

    def all_gather(self, tensor: Tensor, what: str) -> list[Tensor]:
        """As Group's."""
        out = [torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device) for _ in range(self.size)]
        for part in out:
            part.copy_(tensor)
        self.share(out, what).wait()
        return out

    def _enqueue(self, what: str, reads: list[Tensor], writes: list[Any]) -> Pending:
        work = StandInWork(self)
        self.recorder.enqueued(work, reads, writes)
        self._last = StandInPending(self, what, work)
        return self._last
