"""Every rank receives all contributions to its shard, adds them in canonical order in one kernel, and sends the sum.

Two phases: exchange (shard r of every contribution goes to rank r) and share (rank r's summed shard goes to all).
It sends as many bytes as a ring all-reduce. kfuse sets the order of additions, so the bits do not depend on the number
of workers.
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
    shards: list[slice]
    exchanges: list[Pending]
    shared: Pending | None = None


class AllToAll:
    """The transport `all_to_all`: every rank reduces one shard of each bucket, in an order that the plan gives."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._rows: dict[int, Tensor] = {}  # receive buffers
        self._messages: dict[int, _Message] = {}
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
        shards = cut(slots[0].numel(), size)
        sizes = [shard.stop - shard.start for shard in shards]
        rows = self._receive_rows(key, sizes[rank], slots[0])
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
        self._messages[key] = _Message(what, slots, shards, exchanges)

    def poll(self) -> None:
        """Starts sharing the sums of buckets whose exchange is through."""
        for key, message in self._messages.items():
            if message.shared is None:
                if self._group.polls and not all(e.done() for e in message.exchanges):
                    break  # shards are shared in the order of launches on every rank
                self._share(key, message)

    def wait(self, key: int) -> None:
        """Returns when slot 0 of `key` holds the sum. Raises CommError."""
        message = self._messages[key]
        if message.shared is None:
            self._share(key, message)
        assert message.shared is not None
        message.shared.wait()
        self._device.current_stream().wait_stream(self._stream)
        del self._messages[key]

    def _share(self, key: int, message: _Message) -> None:
        """Adds up this rank's shard and starts sharing it, on a stream of its own."""
        with self._device.on(self._stream):
            for exchange in message.exchanges:
                exchange.wait()
            flat, shard = message.slots[0], message.shards[self._group.rank]
            rows = self._receive_rows(key, shard.stop - shard.start, flat)
            reduce(rows, self._merges, flat[shard])
            message.shared = self._group.share([flat[s] for s in message.shards], f"{message.what} (all_to_all, share)")

    def _receive_rows(self, key: int, width: int, like: Tensor) -> Tensor:
        """[contributions, width], reused from step to step."""
        numel = sum(self._pieces) * width
        if key not in self._rows or self._rows[key].numel() < numel:
            self._rows[key] = like.new_empty(numel)
        return self._rows[key][:numel].view(sum(self._pieces), width)


def cut(numel: int, workers: int) -> list[slice]:
    """A flat buffer's shards: aligned, equal but for the last ones, which may be smaller or empty."""
    step = -(-numel // (workers * ALIGN)) * ALIGN
    return [slice(min(r * step, numel), min((r + 1) * step, numel)) for r in range(workers)]
