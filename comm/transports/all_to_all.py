"""Every rank receives all contributions to its shard, adds them in canonical order in one kernel, and sends the sum.

Two phases: exchange (shard r of every contribution goes to rank r) and share (rank r's summed shard goes to all).
It sends as many bytes as a ring all-reduce. kfuse sets the order of additions, so the bits do not depend on the number
of workers.

With gloo a bucket is shared as soon as this rank's exchange is through: the two phases have connections of their own.
NCCL takes all messages in one order, the same on every rank. So there the order is fixed: each exchange is followed by
the share of the bucket before it, and the last share is started by the first wait. Streams order the work:

    communicator:   exchange 0   exchange 1   share 0   exchange 2   share 1   share 2
    side stream:             reduce 0     reduce 1               reduce 2
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
from kfuse.kernels import reduce


@dataclass
class _Message:
    what: str
    slots: Sequence[Tensor]
    received: Tensor
    shard: slice
    exchanges: list[Pending]
    shared: Pending | None = None


class AllToAll:
    """The transport `all_to_all`: every rank reduces one shard of each bucket, in an order that the plan gives."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._free: list[Tensor] = []  # receive buffers that no message uses
        self._messages: dict[int, _Message] = {}  # in the order of launches
        self._device = devices.of(group.device)
        self._stream = self._device.new_stream()
        if self._device.asynchronous:  # compiled here, between steps, for the orders of all later plans
            rows = torch.zeros(2, ALIGN, device=group.device)
            reduce(rows, ((0, 1),), rows[0])

    def plan(self, pieces: Sequence[int], merges: tuple[Merge, ...]) -> None:
        """Contributions arrive in rounds, one piece of each worker a round; `merges` counts them worker by worker."""
        self._pieces = pieces
        rounds = [[r for r, count in enumerate(pieces) if count > k] for k in range(max(pieces))]
        arrival = [(r, k) for k, workers in enumerate(rounds) for r in workers]
        row = {piece: index for index, piece in enumerate(arrival)}
        order = [row[r, k] for r, count in enumerate(pieces) for k in range(count)]
        self._merges = tuple((order[destination], order[source]) for destination, source in merges)

    def launch(self, key: int, slots: Sequence[Tensor], what: str) -> None:
        """Starts the exchange: shard r of this worker's pieces goes to rank r."""
        rank, size = self._group.rank, self._group.size
        shards = self._group.shards(slots[0].numel())
        sizes = [shard.stop - shard.start for shard in shards]
        received = self._take(sum(self._pieces) * sizes[rank], slots[0])
        rows = self._rows(received, sizes[rank])
        exchanges = []
        first = 0
        for k in range(max(self._pieces)):
            into = [sizes[rank] if count > k else 0 for count in self._pieces]
            sends = self._pieces[rank] > k
            last = first + sum(count > k for count in self._pieces)
            exchanges.append(
                self._group.all_to_all(
                    rows[first:last].view(-1),
                    into,
                    slots[k] if sends else slots[0][:0],
                    sizes if sends else [0] * size,
                    f"{what} (all_to_all, exchange)",
                )
            )
            first = last
        if self._device.asynchronous:
            self._share_all()
        self._messages[key] = _Message(what, slots, received, shards[rank], exchanges)

    def poll(self) -> None:
        """With gloo: starts sharing the sums of buckets whose exchange is through."""
        if self._device.asynchronous:
            return
        for message in self._messages.values():
            if message.shared is None:
                if not all(exchange.done() for exchange in message.exchanges):
                    break  # shards are shared in the order of launches on every rank
                self._share(message)

    def wait(self, key: int) -> None:
        """Returns when slot 0 of `key` holds the sum, for work on the current stream. Raises CommError."""
        message = self._messages[key]
        if self._device.asynchronous:
            self._share_all()
        elif message.shared is None:
            self._share(message)
        assert message.shared is not None
        message.shared.wait_on_stream()
        self._device.current_stream().wait_stream(self._stream)
        del self._messages[key]

    def _share_all(self) -> None:
        """Starts sharing the sums of all buckets that were launched, in that order."""
        for message in self._messages.values():
            if message.shared is None:
                self._share(message)

    def _share(self, message: _Message) -> None:
        """Adds up this rank's shard and starts sharing it, on a stream of its own."""
        flat = message.slots[0]
        with self._device.on(self._stream):
            for exchange in message.exchanges:
                exchange.wait_on_stream()
            # After an abort both may be dropped while the reduction still runs.
            self._device.keep([message.received, flat], self._stream)
            width = message.shard.stop - message.shard.start
            reduce(self._rows(message.received, width), self._merges, flat[message.shard])
            # A later exchange may write there: on a GPU it is behind this share, which is behind the reduction.
            self._free.append(message.received)
            message.shared = self._group.share(flat, f"{message.what} (all_to_all, share)")

    def _take(self, numel: int, like: Tensor) -> Tensor:
        """A receive buffer of at least `numel` elements that no other message uses: the smallest, or a new one.

        So there are as many as messages are under way at once, and not one for each bucket.
        """
        free = sorted((b.numel(), k) for k, b in enumerate(self._free) if b.dtype == like.dtype)
        fitting = [k for size, k in free if size >= numel]
        if fitting:
            return self._free.pop(fitting[0])
        if free:
            del self._free[free[-1][1]]  # too small: the new one takes its place
        return like.new_empty(numel)

    def _rows(self, received: Tensor, width: int) -> Tensor:
        """[contributions, width], the first elements of a receive buffer."""
        count = sum(self._pieces)
        return received[: count * width].view(count, width)
