"""Sums along a tree of workers up to its root, then sends the sum down: for networks the library does not know.

The host tree sends one message from each host to the next, however many workers it has. (On one machine the library's
all-reduce is faster: see benchmarks/results.)
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kfuse.comm import devices
from kfuse.comm.group import Group, Pending
from kfuse.comm.sum_tree import Merge
from kfuse.comm.transports import TREES


def parents(shape: str, hosts: Sequence[str]) -> list[int]:
    """Each rank's parent in the tree, rank 0's being itself; `hosts[r]` is where rank r runs.

    binary: a heap. star: everyone under rank 0. host: everyone under the first rank of its host, and those in a heap.
    Raises ValueError for another shape.
    """
    ranks = range(len(hosts))
    match shape:
        case "binary":
            return [max(0, r - 1) // 2 for r in ranks]
        case "star":
            return [0 for _ in ranks]
        case "host":
            firsts = list({host: hosts.index(host) for host in hosts}.values())
            above = dict(zip(firsts, (firsts[max(0, i - 1) // 2] for i in range(len(firsts))), strict=True))
            return [above.get(r, hosts.index(hosts[r])) for r in ranks]
    raise ValueError(f"comm.tree={shape!r}: must be one of {', '.join(TREES)}")


def levels(parent: Sequence[int]) -> list[list[int]]:
    """The ranks at each depth below the root, the deepest first."""
    depth = [0] * len(parent)
    for rank in range(len(parent)):
        at = rank
        while at != parent[at]:
            at, depth[rank] = parent[at], depth[rank] + 1
    return [[r for r, d in enumerate(depth) if d == level] for level in range(max(depth), 0, -1)]


class Tree:
    """The transport `tree`. All ranks call each level's all-to-all, most of them with no data: so any wait can poll.

    The first level is sent as backward goes on, the others when the step waits for the bucket.
    """

    def __init__(self, group: Group, shape: str) -> None:
        self._group, self._device = group, devices.of(group.device)
        self._parent = parents(shape, group.hosts)
        self._levels = levels(self._parent)
        self._first: dict[int, tuple[Tensor, str, Pending, Tensor]] = {}

    def plan(self, pieces: Sequence[int], merges: tuple[Merge, ...]) -> None:
        """Raises ValueError unless each worker contributes one slot."""
        if any(count != 1 for count in pieces):
            raise ValueError("tree takes one contribution a worker")

    def launch(self, key: int, slots: Sequence[Tensor], what: str) -> None:
        """Starts the first level's message."""
        flat = slots[0]
        self._first[key] = (flat, what, *self._up(flat, self._levels[0], f"{what} (tree, up)"))

    def poll(self) -> None:
        """Nothing to start: the other levels are sent in `wait`, whose order is the same on every rank."""

    def wait(self, key: int) -> None:
        """Sums up level by level, then sends the sum down. Raises CommError."""
        flat, what, pending, rows = self._first.pop(key)
        self._add(flat, pending, rows)
        for children in self._levels[1:]:
            self._add(flat, *self._up(flat, children, f"{what} (tree, up)"))
        for children in reversed(self._levels):
            self._down(flat, children, f"{what} (tree, down)")

    def _up(self, flat: Tensor, children: list[int], what: str) -> tuple[Pending, Tensor]:
        """Sends `flat` from these children to their parents; the message, and what it brings this rank."""
        rank, numel = self._group.rank, flat.numel()
        into = [numel if r in children and self._parent[r] == rank else 0 for r in range(self._group.size)]
        cut = [numel if rank in children and r == self._parent[rank] else 0 for r in range(self._group.size)]
        rows = flat.new_empty(sum(into))
        return self._group.all_to_all(rows, into, flat if sum(cut) else flat[:0], cut, what), rows

    def _add(self, flat: Tensor, pending: Pending, rows: Tensor) -> None:
        pending.wait_on_stream()
        self._device.keep([rows], self._device.current_stream())  # `launch` was perhaps called on another one
        for row in rows.view(-1, flat.numel()) if rows.numel() else ():
            flat.add_(row)

    def _down(self, flat: Tensor, children: list[int], what: str) -> None:
        """The sum, from parents to these children."""
        rank, numel = self._group.rank, flat.numel()
        cut = [numel if r in children and self._parent[r] == rank else 0 for r in range(self._group.size)]
        into = [numel if rank in children and r == self._parent[rank] else 0 for r in range(self._group.size)]
        out = flat if sum(into) else flat[:0]
        self._group.all_to_all(out, into, flat.repeat(sum(map(bool, cut))), cut, what).wait_on_stream()
