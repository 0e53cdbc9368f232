"""Sums along a tree of workers up to its root, then sends the sum down: for networks the library does not know.

A large buffer goes in chunks, one behind the other, so that all levels are busy at once.

The shape is one of TREES, or a list of parents. Two of them are more than a fixed tree:

- `host` is hierarchical. Workers of one host send to the first of them. These first ones sum among themselves
  (`Group.sum_among`). Then the sum goes down on each host. A host sends and receives 2 (h - 1) / h times the buffer,
  for h hosts, however many workers it has.
- `latency` is the minimum spanning tree of the time that a message as large as the bucket takes on each link, as
  `topology.measure` found it: so a bucket may have another tree than the short message of a step without gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kfuse.comm.group import Group, Links, Pending
from kfuse.comm.topology import best_tree, check_parents, chunks, depths
from kfuse.comm.transports import Transport

_LOG = logging.getLogger("kfuse")


def parents(shape: str, hosts: Sequence[str]) -> list[int]:
    """Each rank's parent in a binary tree (a heap), a star (all under rank 0), or a tree of each host (all under its
    first rank), a root's being itself; `hosts[r]` is where rank r runs.
    """
    if shape == "host":
        return [hosts.index(host) for host in hosts]
    return [max(0, r - 1) // 2 if shape == "binary" else 0 for r in range(len(hosts))]


class _Shape:
    """A tree, or one for each host."""

    def __init__(self, parents: Sequence[int]) -> None:
        self.parents, self.depths = list(parents), depths(parents)
        self.roots = [r for r, parent in enumerate(parents) if parent == r]
        self.levels = max(self.depths)


class Tree(Transport):
    """The transport `tree`: all ranks call each round's `to_few`, some with no data, when the step waits for it."""

    def __init__(self, group: Group, shape: str | Sequence[int]) -> None:
        """shape: a name in TREES, or each rank's parent. Raises ValueError where that is no tree.

        With `latency`, `launch` raises RuntimeError unless the group's links have been measured.
        """
        self._group = group
        self._shape: _Shape | None = None  # that of the links
        if not isinstance(shape, str):
            check_parents(shape, group.size)
            self._shape = _Shape(shape)
        elif shape != "latency":
            self._shape = _Shape(parents(shape, group.hosts))
        self._links: Links | None = None
        self._by_bytes: dict[int, _Shape] = {}  # of `_links`, by bytes of a bucket
        self._launched: dict[int, Iterator[Pending]] = {}

    def launch(self, key: int, slots: Sequence[Tensor], what: str) -> None:
        """Sends nothing: the first sum connects the hosts, for which no hook of backward must wait."""
        shape = self._shape or self._measured(slots[0].nbytes)
        self._launched[key] = self._messages(slots[0], shape, what)

    def wait(self, key: int) -> None:
        """Sums up to the root, and sends the sum down. Raises CommError."""
        for message in self._launched.pop(key):
            message.wait_on_stream()

    def _measured(self, nbytes: int) -> _Shape:
        links = self._group.links
        if links is None:
            raise RuntimeError("comm.tree=latency: the links between the workers have not been measured")
        if links is not self._links:
            self._links, self._by_bytes = links, {}
        if nbytes not in self._by_bytes:
            self._by_bytes[nbytes] = found = _Shape(best_tree(links, nbytes))
            if self._group.rank == 0:
                _LOG.info("comm.tree=latency: messages of %d bytes go along the parents %s", nbytes, found.parents)
        return self._by_bytes[nbytes]

    def _messages(self, flat: Tensor, shape: _Shape, what: str) -> Iterator[Pending]:
        """Each is to be waited for before the next one is asked for.

        Chunk k leaves depth d for its parent in round k + levels - d, and for its children in round k + levels + d. So
        a rank has at most one chunk for each of its neighbours in a round, and all levels are busy at once.
        """
        rank, parent, depth, levels = self._group.rank, shape.parents, shape.depths, shape.levels
        several, between = len(shape.roots) > 1, f"{what} (tree, between hosts)"
        count = 1 if several else chunks(flat.nbytes)
        ends = [flat.numel() * k // count for k in range(count + 1)]

        def chunk(number: int) -> Tensor:
            return flat[slice(*ends[number : number + 2])] if 0 <= number < count else flat[:0]

        for step in range(count + 2 * levels - 1 if levels else 0):
            if several and step == levels:
                yield from self._group.sum_among(flat, shape.roots, between)
            up, down = chunk(step - levels + depth[rank]), chunk(step - levels - depth[rank])
            children, above = chunk(step - levels + depth[rank] + 1), chunk(step - levels - depth[rank] + 1)
            sends, brings = [flat[:0]] * self._group.size, [flat[:0]] * self._group.size
            for r in range(self._group.size):
                if r != rank and parent[r] == rank:
                    sends[r], brings[r] = down, children
                elif r != rank and parent[rank] == r:
                    sends[r], brings[r] = up, above
            into, cut = [each.numel() for each in brings], [each.numel() for each in sends]
            outgoing = [each for each in sends if each.numel()]
            sent = outgoing[0] if len(outgoing) == 1 else torch.cat(outgoing) if outgoing else flat[:0]
            received = flat.new_empty(sum(into))
            yield self._group.to_few(received, into, sent, cut, f"{what} (tree)")
            self._take(received, brings, parent[rank])
        if several and not levels:
            yield from self._group.sum_among(flat, shape.roots, between)

    def _take(self, received: Tensor, places: Sequence[Tensor], parent: int) -> None:
        """Adds each child's chunk to its place in the buffer; the parent's is the sum already. By rank."""
        pieces = torch.split(received, [place.numel() for place in places])
        for rank, (place, brought) in enumerate(zip(places, pieces, strict=True)):
            if brought.numel():
                place.copy_(brought) if rank == parent else place.add_(brought)
