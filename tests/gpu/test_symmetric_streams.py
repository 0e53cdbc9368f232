"""comm.schedule=symmetric on a recorded device: a slot is packed again only behind every other rank's pull of it.

Other ranks do what this one does. So each pull of this rank stands for theirs: a stream of its own reads what they read
in this rank's memory, behind the barrier. It ends before a collective ends that this rank starts behind its own pull:
they start theirs behind their own, too. Nothing else of this rank is ordered behind it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu.order import Order, RecordedStream
from gpu.steps import OPTIMIZERS, job
from torch import Tensor

from kfuse.comm import devices
from kfuse.comm.executor import Executor
from kfuse.comm.group import Group
from kfuse.comm.transports import symmetric
from kfuse.comm.transports.symmetric import Symmetric


class Memory:
    """In place of `SymmetricMemory`: the other ranks' are memories of their own, of zeros."""

    def __init__(self, group: Group, numel: int) -> None:
        self.of = [torch.zeros(numel, device=group.device) for _ in range(group.size)]
        self.own = self.of[group.rank]

    def barrier(self) -> None:
        """Work on the current stream."""


@pytest.fixture(autouse=True)
def other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """They read their shards in this rank's memory before its own pull ends, and start collectives behind theirs."""
    pulls: list[tuple[RecordedStream, int, RecordedStream]] = []
    reduce, enqueued = Symmetric.reduce, Order.enqueued

    def reduced(self: Symmetric, key: int, flat: Tensor, sumsq: Tensor | None = None) -> None:
        order: Order = devices.of(self._group.device)._order  # type: ignore[attr-defined]
        theirs, own = RecordedStream(order, "another rank's stream"), order.current
        theirs.wait_stream(own)
        part, group = self._parts[key], self._group
        for rank, shard in enumerate(self._cuts(key, part.stop - part.start)):
            rows = [memory.own[part][shard] for memory in self._memories[: self._pieces[group.rank]]]
            if rank != group.rank:
                order.enqueue(theirs, [row for row in rows if row.numel()], [], "a pull of another rank")
        reduce(self, key, flat, sumsq)
        pulls.append((own, own.clock.get(own.number, 0), theirs))

    def collective(self: Order, work: Any, reads: list[Tensor], writes: list[Tensor]) -> None:
        for own, number, theirs in pulls:
            if self.current.clock.get(own.number, 0) >= number:
                for communicator in self._communicators.values():
                    communicator.wait_stream(theirs)
        enqueued(self, work, reads, writes)

    monkeypatch.setattr(symmetric, "SymmetricMemory", Memory)
    monkeypatch.setattr(symmetric, "_unfit", lambda group: "")
    monkeypatch.setattr(Symmetric, "reduce", reduced)
    monkeypatch.setattr(Order, "enqueued", collective)


@pytest.mark.parametrize(
    ("state", "optimizer", "reproducible"),
    [("replicated", "adamw", False), ("sharded", "adamw", True), ("sharded", "lamb", False)],
)
def test_every_use_of_memory_is_in_order(state: str, optimizer: str, reproducible: bool) -> None:
    """And the host waits for nothing."""
    options: dict[str, Any] = {"state": state, "reproducible": reproducible, "width": 2100}
    with job(OPTIMIZERS[optimizer], 2, schedule="symmetric", lag=2, **options) as it:
        it.planned_step([range(0, 3), range(3, 5)])  # the slots that it exchanges are allocated at its start
        it.recorder.host_waits.clear()
        for _ in range(3):
            it.bare_step()
        it.step()
        it.planned_step([range(0, 3), range(3, 5)])
        it.planned_step([range(0, 3), range(3, 5)], by_weight=True)
        if state == "replicated" and not reproducible:
            it.planned_step([range(0, 2), range(2, 4)], local=True)  # the tail alone is pulled
        assert it.recorder.host_waits == []


def test_a_slot_that_is_packed_before_others_have_read_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative: with sharded state nothing but the exchange of the sums of squares tells that all have pulled."""
    monkeypatch.setattr(Executor, "share_sums", lambda *_: None)
    with job(size=2, schedule="symmetric", state="sharded", width=2100, lag=2, check_every=None) as it:
        it.opt.engine.executor.updates = lambda buckets, _: iter(buckets)
        for _ in range(2):
            it.bare_step()
        errors = it.recorder.take_errors()
    assert any("no order between a pull of another rank" in error for error in errors)
