"""What the engine asks of a transport."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from kfuse.comm.sum_tree import Merge


class Transport(Protocol):
    """Sums flat buffers over the group's workers. All ranks launch the same messages in the same order."""

    def plan(self, pieces: Sequence[int], merges: tuple[Merge, ...]) -> None:
        """For the coming step: how many slots each rank contributes, and the order in which they are added up."""

    def launch(self, key: int, slots: Sequence[Tensor], what: str) -> None:
        """Starts reducing this worker's `slots` (it may contribute fewer than given) into slots[0]."""

    def poll(self) -> None:
        """Moves multi-phase reductions on, without waiting."""

    def wait(self, key: int) -> None:
        """Returns when slots[0] of `key` holds the sum. Raises CommError."""
