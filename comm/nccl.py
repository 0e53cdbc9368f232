"""Groups of several workers on GPUs: NCCL's messages. Imported only where the device is a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from kfuse.comm.communicator import Communicator
from kfuse.comm.group import REDUCE_OPS, Pending


class NcclGroup(Communicator):
    """Workers that NCCL connects. All lanes are one communicator, which takes messages in one order."""

    adds_up = True

    def lane(self, number: int) -> NcclGroup:
        self.in_one_order = self.in_one_order or number > 0
        return self

    def all_reduce(self, tensor: Tensor, what: str, op: str = "sum") -> Pending:
        return self._start(what, _kind("all_reduce", tensor), lambda pg: [pg.allreduce(tensor, REDUCE_OPS[op])])

    def all_to_all(self, out: Tensor, into: Sequence[int], tensor: Tensor, cut: Sequence[int], what: str) -> Pending:
        return self._start(what, "all_to_all", lambda pg: [pg.alltoall_base(out, tensor, list(into), list(cut))])

    def to_few(self, out: Tensor, into: Sequence[int], tensor: Tensor, cut: Sequence[int], what: str) -> Pending:
        """Sends and receives in one group of NCCL's: 6) of `communicator`."""
        brings = [(peer, part) for peer, part in enumerate(out.split_with_sizes(list(into))) if part.numel()]
        sends = [(peer, part) for peer, part in enumerate(tensor.split_with_sizes(list(cut))) if part.numel()]

        def enqueue(pg: Any) -> list[Any]:
            if not (brings or sends):
                return []
            pg._start_coalescing()
            try:
                for peer, part in brings:
                    pg.recv([part], peer, 0)
                for peer, part in sends:
                    pg.send([part], peer, 0)
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    pg._end_coalescing()  # else this thread's later messages, of any communicator, would never begin
                raise
            return [pg._end_coalescing()]

        kind = ("few", *(peer for peer, _ in brings), -1, *(peer for peer, _ in sends))
        peers = {peer for peer, _ in (*brings, *sends)}
        return self._start(what, kind, enqueue, peers.pop() if len(peers) == 1 else None)

    def exchange(self, sent: Tensor, received: Tensor, peer: int, what: str) -> None:
        self.to_few(received, self._for_one(received, peer), sent, self._for_one(sent, peer), what).wait()

    def _of_equal_parts(self, flat: Tensor, cuts: Sequence[slice]) -> Tensor | None:
        """The memory that begins with `flat`, as parts of which each is as long as the first rank's. None where they
        are cut otherwise, or it has no `room` behind it (`Bucket`).
        """
        step, ends = cuts[0].stop, [*(cut.start for cut in cuts), flat.numel()]
        room = flat.untyped_storage().nbytes() // flat.element_size() - flat.storage_offset()
        if room < step * self.size or any(end != min(step * r, flat.numel()) for r, end in enumerate(ends)):
            return None
        return flat.as_strided((step * self.size,), (1,))

    def share(self, flat: Tensor, what: str, cuts: Sequence[slice]) -> Pending:
        """One all-gather in place; a broadcast of each part where they are not equal."""
        if (equal := self._of_equal_parts(flat, cuts)) is None:
            parts = [(r, flat[cut]) for r, cut in enumerate(cuts) if cut.stop > cut.start]
            kind = ("share", flat.dtype, *(part.numel() for _, part in parts))
            return self._start(what, kind, lambda pg: [pg.broadcast(part, r) for r, part in parts])
        mine = equal.view(self.size, -1)[self.rank]
        return self._start(what, _kind("share", flat), lambda pg: [pg._allgather_base(equal, mine)])

    def reduce_scatter(self, flat: Tensor, what: str, cuts: Sequence[slice]) -> Pending:
        """In place, as NCCL allows it: the result is the rank's own part of what it sends. `flat` has room."""
        equal = self._of_equal_parts(flat, cuts)
        assert equal is not None
        mine = equal.view(self.size, -1)[self.rank]
        return self._start(what, _kind("reduce_scatter", flat), lambda pg: [pg._reduce_scatter_base(mine, equal)])

    def broadcast(self, tensor: Tensor, what: str, source: int = 0) -> Pending:
        peer = source if self.rank != source else None
        return self._start(what, _kind("broadcast", tensor), lambda pg: [pg.broadcast(tensor, source)], peer)

    def all_gather(self, tensor: Tensor, what: str) -> list[Tensor]:
        out = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype, device=self.device)
        mine = tensor.reshape(-1).contiguous()
        self._start(what, _kind("all_gather", mine), lambda pg: [pg._allgather_base(out.view(-1), mine)]).wait()
        return list(out.unbind(0))


def _kind(name: str, tensor: Tensor) -> Hashable:
    """NCCL chooses an algorithm by operation, type and size."""
    return name, tensor.dtype, tensor.numel().bit_length()
