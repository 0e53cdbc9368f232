"""Every rank receives all contributions to its shard, and adds them in canonical order in one kernel.

kfuse sets the order of additions, so the bits do not depend on the number of workers. With the share of the sums that
follows in the program it sends as many bytes as a ring all-reduce.

Between two workers on CPUs neither copies its own contributions (`TwoWorkers`). The other's come in parts, each to
memory of its own, which is dropped as soon as the part is added up. That is memory that backward's gradients have just
left: receive buffers that stay would be half of the gradients again, and large ones are given back to the system, and
taken from it again, in each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kfuse.comm import devices
from kfuse.comm.buckets import ALIGN
from kfuse.comm.group import Group, Pending
from kfuse.comm.sum_tree import Merge
from kfuse.comm.transports import Cuts
from kfuse.kernels import num_blocks, reduce
from kfuse.kernels.wire import wire_numel


@dataclass
class _Message:
    received: Tensor
    shard: slice
    exchanges: list[Pending]


class AllToAll:
    """The transport `all_to_all`: every rank reduces one shard of each bucket, in an order that the plan gives."""

    def __init__(self, group: Group, cuts: Cuts | None = None) -> None:
        self._group, self._cuts = group, cuts or (lambda key, numel: group.shards(numel))
        self._free: list[Tensor] = []  # receive buffers that no message uses
        self._messages: dict[int, _Message] = {}
        self._device = devices.of(group.device)
        if self._device.asynchronous:  # compiled here, between steps, for the orders of all later plans
            rows = torch.zeros(2, ALIGN, dtype=torch.float32, device=group.device)
            reduce(rows, ((0, 1),), rows[0])

    def plan(self, pieces: Sequence[int], merges: tuple[Merge, ...]) -> None:
        """Contributions arrive in rounds, one piece of each worker a round; `merges` counts them worker by worker."""
        self._pieces, self._count = pieces, sum(pieces)
        self._rounds = rounds = [[r for r, count in enumerate(pieces) if count > k] for k in range(max(pieces))]
        arrival = [(r, k) for k, workers in enumerate(rounds) for r in workers]
        row = {piece: index for index, piece in enumerate(arrival)}
        order = [row[r, k] for r, count in enumerate(pieces) for k in range(count)]
        self._merges = tuple((order[destination], order[source]) for destination, source in merges)

    def launch(self, key: int, slots: Sequence[Tensor], what: str) -> None:
        rank, size = self._group.rank, self._group.size
        shards = self._cuts(key, slots[0].numel())
        sizes = [shard.stop - shard.start for shard in shards]
        width = sizes[rank]
        received = self._take(self._count * width, slots[0].dtype)
        exchanges, first = [], 0
        for k, workers in enumerate(self._rounds):
            into = [width if count > k else 0 for count in self._pieces]
            sent, cut = (slots[k], sizes) if self._pieces[rank] > k else (slots[0][:0], [0] * size)
            out = received[first * width : (first + len(workers)) * width]
            exchanges.append(self._group.all_to_all(out, into, sent, cut, f"{what} (all_to_all, exchange)"))
            first += len(workers)
        self._messages[key] = _Message(received, shards[rank], exchanges)

    def arrived(self, key: int) -> bool:
        return all(exchange.done() for exchange in self._messages[key].exchanges)

    def wait(self, key: int) -> None:
        for exchange in self._messages[key].exchanges:
            exchange.wait_on_stream()

    def reduce(self, key: int, flat: Tensor, sumsq: Tensor | None = None, wire: Tensor | None = None) -> None:
        message = self._messages.pop(key)
        # After an abort they may be dropped while the reduction still runs.
        used = [each for each in (message.received, flat, sumsq, wire) if each is not None]
        self._device.keep(used, self._device.current_stream())
        width = message.shard.stop - message.shard.start
        rows = message.received[: self._count * width].view(self._count, width)
        sent = None if wire is None else wire[message.shard]
        elements = self._cuts(key, flat.numel())[self._group.rank]  # in int8 messages they lie elsewhere
        reduce(rows, self._merges, flat[elements], sumsq=sumsq, wire=sent)
        self._free.append(message.received)  # a later exchange writes there: `launch` is called behind this reduction

    def _take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A receive buffer of at least `numel` elements that no other message uses: the smallest, or a new one.

        So there are as many as messages are under way at once, and not one for each bucket.
        """
        free = sorted((b.numel(), k) for k, b in enumerate(self._free) if b.dtype == dtype)
        fitting = [k for size, k in free if size >= numel]
        if fitting:
            return self._free.pop(fitting[0])
        if free:
            del self._free[free[-1][1]]  # too small: the new one takes its place
        return torch.empty(numel, dtype=dtype, device=self._group.device)


PART = 2**20  # elements, whole blocks of the sums of squares: 4 MiB of fp32


@dataclass
class _Part:
    """A part of this worker's shard, of which the other's contributions are under way."""

    place: slice  # in the slots
    own: list[Tensor]
    brought: list[Tensor]
    exchanges: list[Pending]


class TwoWorkers:
    """The transport `all_to_all` in a group of two over gloo."""

    def __init__(self, group: Group, cuts: Cuts | None = None) -> None:
        self._group, self._cuts = group, cuts or (lambda key, numel: group.shards(numel))
        self._messages: dict[int, list[_Part]] = {}

    def plan(self, pieces: Sequence[int], merges: tuple[Merge, ...]) -> None:
        self._pieces, self._merges = pieces, merges

    def launch(self, key: int, slots: Sequence[Tensor], what: str) -> None:
        """Starts the exchange: each worker sends its pieces of the other's shard, part by part."""
        rank, parts = self._group.rank, list[_Part]()
        shards = self._cuts(key, slots[0].numel())
        mine, theirs = shards[rank], shards[1 - rank]
        length = wire_numel(PART) if slots[0].dtype == torch.int8 else PART
        for at in range(0, max(shard.stop - shard.start for shard in shards), length):
            here, there = (slice(min(s.start + at, s.stop), min(s.start + at + length, s.stop)) for s in (mine, theirs))
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

    def reduce(self, key: int, flat: Tensor, sumsq: Tensor | None = None, wire: Tensor | None = None) -> None:
        """Adds up this rank's shard, while later parts are under way."""
        parts = self._messages.pop(key)[::-1]
        shard, last = self._cuts(key, flat.numel())[self._group.rank], 0
        start = shard.start
        while parts:
            part = parts.pop()  # the memory of the one before goes
            for exchange in part.exchanges:
                exchange.wait()
            rows = [*part.own, *part.brought] if self._group.rank == 0 else [*part.brought, *part.own]
            elements = slice(start, start := min(start + PART, shard.stop))
            first, last = last, last + num_blocks(elements.stop - elements.start)
            squares = None if sumsq is None else sumsq[first:last]
            sent = None if wire is None else wire[part.place]
            reduce(rows, self._merges, flat[elements], sumsq=squares, wire=sent)


class Swap:
    """The transport of small buckets in such a group: each worker gets the other's contributions whole, and adds up.

    One message: the second one of `TwoWorkers`, with the sums, costs more than it saves. Where each worker has one
    contribution the bytes are as many.
    """

    def __init__(self, group: Group, cuts: Cuts | None = None) -> None:
        self._group, self._received = group, dict[int, list[Tensor]]()
        self._messages: dict[int, tuple[Sequence[Tensor], list[Pending]]] = {}

    def plan(self, pieces: Sequence[int], merges: tuple[Merge, ...]) -> None:
        self._pieces, self._merges = pieces, merges

    def launch(self, key: int, slots: Sequence[Tensor], what: str) -> None:
        rank, theirs, none = self._group.rank, self._received.setdefault(key, []), slots[0][:0]
        mine, count = self._pieces[rank], self._pieces[1 - rank]
        if theirs and theirs[0].shape != slots[0].shape:
            theirs.clear()
        theirs += [torch.empty_like(slots[0]) for _ in range(count - len(theirs))]
        exchanges = []
        for k in range(max(mine, count)):
            sent, received = slots[k] if k < mine else none, theirs[k] if k < count else none
            into, cut = ([0 if r == rank else each.numel() for r in range(2)] for each in (received, sent))
            exchanges.append(self._group.all_to_all(received, into, sent, cut, f"{what} (all_to_all, exchange)"))
        self._messages[key] = slots, exchanges

    def wait(self, key: int) -> None:
        slots, exchanges = self._messages.pop(key)
        for exchange in exchanges:
            exchange.wait()
        rank = self._group.rank
        own, theirs = slots[: self._pieces[rank]], self._received[key][: self._pieces[1 - rank]]
        reduce([*own, *theirs] if rank == 0 else [*theirs, *own], self._merges, slots[0])
