"""`all_to_all` between two workers on CPUs: neither copies its own contributions, and what arrives takes little memory.

A worker's own contributions are added up where they lie. The other's come in parts of at most `PART` elements, each to
memory of its own, which is dropped as soon as the part is added up. That is memory that backward's gradients have just
left: receive buffers that stay would be half of the gradients again, and large ones are given back to the system, and
taken from it again, in each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kfuse.comm.buckets import ALIGN
from kfuse.comm.group import Group, Pending
from kfuse.comm.sum_tree import Merge
from kfuse.kernels import num_blocks, reduce

PART = 2**20
"""Elements, whole blocks of the sums of squares: 4 MiB of fp32."""


@dataclass
class _Part:
    """A part of this worker's shard (elements of the bucket), of which the other's contributions are under way."""

    elements: slice
    own: list[Tensor]
    brought: list[Tensor]
    exchanges: list[Pending]


class TwoWorkers:
    """The transport `all_to_all` in a group of two over gloo."""

    def __init__(self, group: Group, unit: int = ALIGN) -> None:
        self._group, self._unit = group, unit
        self._messages: dict[int, list[_Part]] = {}

    def plan(self, pieces: Sequence[int], merges: tuple[Merge, ...]) -> None:
        self._pieces, self._merges = pieces, merges

    def launch(self, key: int, slots: Sequence[Tensor], what: str) -> None:
        """Starts the exchange: each worker sends its pieces of the other's shard, part by part."""
        rank, parts = self._group.rank, list[_Part]()
        shards = self._group.shards(slots[0].numel(), self._unit)
        mine, theirs = shards[rank], shards[1 - rank]
        for at in range(0, max(shard.stop - shard.start for shard in shards), PART):
            here, there = (slice(min(s.start + at, s.stop), min(s.start + at + PART, s.stop)) for s in (mine, theirs))
            part = _Part(here, [slot[here] for slot in slots[: self._pieces[rank]]], [], [])
            for k in range(max(self._pieces)):
                sent = slots[k][there] if k < self._pieces[rank] else slots[0][:0]
                received = sent.new_empty(here.stop - here.start if k < self._pieces[1 - rank] else 0)
                into, cut = ([0 if r == rank else each.numel() for r in range(2)] for each in (received, sent))
                if k < self._pieces[1 - rank]:
                    part.brought.append(received)
                message = self._group.all_to_all(received, into, sent, cut, f"{what} (all_to_all, exchange)")
                part.exchanges.append(message)
            parts.append(part)
        self._messages[key] = parts

    def arrived(self, key: int) -> bool:
        return all(exchange.done() for part in self._messages[key] for exchange in part.exchanges)

    def wait(self, key: int) -> None:
        """Returns when the first part's contributions are here; `reduce` waits for the others. Raises CommError."""
        for part in self._messages[key][:1]:
            for exchange in part.exchanges:
                exchange.wait()

    def reduce(self, key: int, flat: Tensor, sumsq: Tensor | None = None) -> None:
        """Adds up this rank's shard, while later parts are under way."""
        parts = self._messages.pop(key)[::-1]
        last = 0
        while parts:
            part = parts.pop()  # the memory of the one before goes
            for exchange in part.exchanges:
                exchange.wait()
            rows = [*part.own, *part.brought] if self._group.rank == 0 else [*part.brought, *part.own]
            first, last = last, last + num_blocks(part.elements.stop - part.elements.start)
            squares = None if sumsq is None else sumsq[first:last]
            reduce(rows, self._merges, flat[part.elements], sumsq=squares)
