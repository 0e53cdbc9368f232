"""The library's own collectives: one message, one contribution a worker, in a summation order of its choice."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kfuse.comm.buckets import ALIGN
from kfuse.comm.group import Group, Pending
from kfuse.comm.sum_tree import Merge


class AllReduce:
    """The transport `allreduce`."""

    _name = "allreduce"

    def __init__(self, group: Group, unit: int = ALIGN) -> None:
        self._group, self._unit = group, unit
        self._pending: dict[int, Pending] = {}

    def plan(self, pieces: Sequence[int], merges: tuple[Merge, ...]) -> None:
        """Nothing to prepare: each worker contributes one slot."""

    def launch(self, key: int, slots: Sequence[Tensor], what: str) -> None:
        self._pending[key] = self._start(slots[0], f"{what} ({self._name})")

    def _start(self, flat: Tensor, what: str) -> Pending:
        return self._group.all_reduce(flat, what)

    def wait(self, key: int) -> None:
        self._pending.pop(key).wait_on_stream()


class ReduceScatter(AllReduce):
    """The transport `reduce_scatter` of a group that has one: slot 0 receives this rank's shard of the sum.

    It reads no contributions from memory, and sends half the bytes of an all-reduce. Only NCCL's is fast: over gloo the
    transport of this name is `AllToAll`, which sends the same bytes.
    """

    _name = "reduce_scatter"

    def _start(self, flat: Tensor, what: str) -> Pending:
        return self._group.reduce_scatter(flat, what, self._unit)
