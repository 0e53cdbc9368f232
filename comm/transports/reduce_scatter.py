"""The library's own reduce-scatter: each rank gets its shard of the sum, added up in an order of the library's choice.

It reads no contributions from memory, and sends half the bytes of an all-reduce. Only NCCL's is fast: over gloo the
transport of this name is `AllToAll`, which sends the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kfuse.comm.buckets import ALIGN
from kfuse.comm.group import Group, Pending
from kfuse.comm.sum_tree import Merge
from kfuse.comm.transport_names import check_one_each


class ReduceScatter:
    """The transport `reduce_scatter` of a group that has one."""

    def __init__(self, group: Group, unit: int | None = None) -> None:
        """unit: what the length of a shard is a multiple of; None: `ALIGN`."""
        self._group, self._unit = group, unit or ALIGN
        self._pending: dict[int, Pending] = {}

    def plan(self, pieces: Sequence[int], merges: tuple[Merge, ...]) -> None:
        """Raises ValueError unless each worker contributes one slot."""
        check_one_each("reduce_scatter", pieces)

    def launch(self, key: int, slots: Sequence[Tensor], what: str) -> None:
        """Starts the reduce-scatter of slot 0, in place."""
        self._pending[key] = self._group.reduce_scatter(slots[0], f"{what} (reduce_scatter)", self._unit)

    def wait(self, key: int) -> None:
        """Returns when slot 0 of `key` holds this rank's shard of the sum, for work on the current stream."""
        self._pending.pop(key).wait_on_stream()
