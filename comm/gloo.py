"""Groups of several workers on CPUs, over gloo.

A wait polls in short slices, so that a worker notices a timeout, or a new view from the supervisor, while a peer is
silent. (With gloo only the neighbours of a lost rank get an error, and nothing can interrupt its blocking wait.)
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from kfuse.comm.group import SLICE_S, CommError, Group, Pending, all_reduce_by, broadcast_from, first_line

_SLICE = timedelta(seconds=SLICE_S)


class GlooPending(Pending):
    """Messages of gloo. Their wait is the host's."""

    def wait(self) -> None:
        """Returns when all messages have completed. Raises CommError on failure or after the group's timeout."""
        for work, peer in self.works:
            self._wait_one(work, peer)
        self.group.under_way.pop(self, None)

    def _wait_one(self, work: Any, peer: int | None) -> None:
        whom = self.group.others if peer is None else f"rank {peer}"
        while True:
            with contextlib.suppress(RuntimeError):  # a timeout, or a failure that the next lines look at
                work.wait(_SLICE)
                return
            if work.is_completed():
                try:
                    work.wait()  # it may have come through since: then this returns
                    return
                except RuntimeError as error:
                    raise CommError(f"{self.what}: lost contact with {whom}: {first_line(error)}") from error
            self.group.check()
            waited = time.monotonic() - self.started
            if waited > self.group.timeout_s:
                late = self.group.late_ranks(self.what) if peer is None else ""
                raise CommError(f"{self.what}: waited {waited:.1f} s for {whom} (comm.timeout_s){late}")


class GlooGroup(Group):
    """Workers that gloo connects. A lane has two process groups: one for `share`, one for all other messages."""

    def __init__(
        self,
        rank: int,
        size: int,
        store: Store,
        device: torch.device | None = None,
        timeout_s: float = 60.0,
        hostname: str | None = None,
        check: Callable[[], None] | None = None,
        hosts: Sequence[str] | None = None,
    ) -> None:
        """hostname: the address gloo listens on. Raises CommError if the others do not connect."""
        super().__init__(rank, size, store, device, timeout_s, check, hosts)
        self._hostname = hostname
        self._number, self._further = 0, list[GlooGroup]()
        self._pg: Any
        self._share_pg: Any
        self._pg, self._share_pg = self.connect(
            lambda: [
                _process_group(PrefixStore(lane, store), rank, size, timeout_s, hostname) for lane in ("main", "share")
            ],
            lambda made: None,
        )

    def lane(self, number: int) -> Group:
        if number == self._number:
            return self
        assert self._store is not None
        while len(self._further) < number:
            store = PrefixStore(f"lane {len(self._further) + 1}", self._store)
            others = (self.device, self.timeout_s, self._hostname, self.check, self.hosts)
            lane = GlooGroup(self.rank, self.size, store, *others)
            self._further.append(lane)
            lane._number = len(self._further)
        return self._further[number - 1]

    def connect_lanes(self, count: int) -> None:
        counts = self.all_gather(torch.tensor([count]), "number of lanes")
        self.lane(max(int(each) for each in counts) - 1)

    def retire(self) -> None:
        for lane in self._further:
            lane.retire()
        super().retire()

    def close(self, timeout_s: float) -> bool:
        """Ends the group's threads and connections; it cannot be used any more.

        To be called before the interpreter ends: a thread of gloo that has a tensor to free after that ends the process
        with SIGABRT. False if messages are still under way after the timeout: then nothing is ended, since that would
        block.
        """
        deadline = time.monotonic() + timeout_s
        lanes = [lane.close(timeout_s) for lane in self._further]
        while not all(pending.done() for pending in self.under_way):
            if time.monotonic() > deadline:
                return False
            time.sleep(SLICE_S)
        self.under_way.clear()
        self._pg = self._share_pg = self._store = None
        return all(lanes)

    def all_reduce(self, tensor: Tensor, what: str, op: str = "sum") -> Pending:
        return GlooPending(self, what, [(self._pg.allreduce([tensor], all_reduce_by(op)), None)])

    def all_to_all(self, out: Tensor, into: Sequence[int], tensor: Tensor, cut: Sequence[int], what: str) -> Pending:
        options = dist.AllToAllOptions()
        return GlooPending(self, what, [(self._pg.alltoall_base(out, tensor, list(into), list(cut), options), None)])

    def share(self, flat: Tensor, what: str) -> Pending:
        return self._share([flat[shard] for shard in self.shards(flat.numel())], what)

    def _share(self, parts: Sequence[Tensor], what: str) -> Pending:
        """Broadcasts, over connections of their own: gloo's all-gather takes almost twice as long.

        Messages of one process group must be started in the same order on all ranks, and these are not.
        """
        works: list[tuple[Any, int | None]] = []
        for source, part in enumerate(parts):
            if part.numel():
                peer = None if source == self.rank else source
                works.append((self._share_pg.broadcast([part], broadcast_from(source)), peer))
        return GlooPending(self, what, works)

    def broadcast(self, tensor: Tensor, what: str, source: int = 0) -> Pending:
        work = self._pg.broadcast([tensor], broadcast_from(source))
        return GlooPending(self, what, [(work, source if self.rank != source else None)])

    def all_gather(self, tensor: Tensor, what: str) -> list[Tensor]:
        out = [torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device) for _ in range(self.size)]
        out[self.rank].copy_(tensor)
        self._share(out, what).wait()
        return out


def _process_group(store: Store, rank: int, size: int, timeout_s: float, hostname: str | None) -> Any:
    """A process group for kfuse alone, beside any that the user has. It is not registered in torch.distributed."""
    backend: Any = dist.ProcessGroupGloo  # its options are not in torch's type stubs
    gloo = backend._Options()
    gloo._devices = [backend.create_device(hostname=hostname) if hostname else backend.create_default_device()]
    gloo._timeout = timedelta(seconds=2 * timeout_s + 30)  # our own timeout comes first, and names the late ranks
    gloo._threads = 2
    return backend(store, rank, size, gloo)
