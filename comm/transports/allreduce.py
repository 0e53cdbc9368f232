"""The library's own all-reduce: one message, one contribution a worker, in a summation order of its choice."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kfuse.comm.group import Group, Pending
from kfuse.comm.sum_tree import Merge
from kfuse.comm.transport_names import check_one_each


class AllReduce:
    """The transport `allreduce`."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._pending: dict[int, Pending] = {}

    def plan(self, pieces: Sequence[int], merges: tuple[Merge, ...]) -> None:
        """Raises ValueError unless each worker contributes one slot."""
        check_one_each("allreduce", pieces)

    def launch(self, key: int, slots: Sequence[Tensor], what: str) -> None:
        """Starts the all-reduce of slot 0."""
        self._pending[key] = self._group.all_reduce(slots[0], f"{what} (allreduce)")

    def wait(self, key: int) -> None:
        """Returns when slot 0 of `key` holds the sum, for work on the current stream. Raises CommError."""
        self._pending.pop(key).wait_on_stream()
