"""The exchange of two workers over gloo, in parts: the memory that it takes. Its sums: test_schedule.py."""

from __future__ import annotations

import gc
import weakref

import torch
from distributed import run_workers

import kfuse as kf
from kfuse.comm import transports
from kfuse.comm.sum_tree import plan_merges
from kfuse.comm.transports import all_to_all
from kfuse.kernels import BLOCK

PIECES = ([1, 1], [0, 2], [3, 4])


def exchange(part: int) -> list[tuple[int, int]]:
    """Of each case: how many parts came, and how many of them are still alive once they are added up."""
    all_to_all.PART = part
    group, found = kf.init().group, []
    transport = transports.make("all_to_all", group, unit=BLOCK)
    assert isinstance(transport, all_to_all.TwoWorkers)
    for pieces in PIECES:
        total = sum(pieces)
        transport.plan(pieces, plan_merges([(0, k) for k in range(total)], total))
        slots = [torch.ones(9 * BLOCK + 700) for _ in range(max(1, pieces[group.rank]))]
        transport.launch(0, slots, "step 1, bucket 1 of 1")
        received = [weakref.ref(tensor) for each in transport._messages[0] for tensor in each.brought]
        transport.wait(0)
        transport.reduce(0, slots[0])
        gc.collect()
        found.append((len(received), sum(each() is not None for each in received)))
    return found


def test_parts_leave_no_memory() -> None:
    for part, parts in ((2 * BLOCK, 3), (2**20, 1)):
        for rank, found in enumerate(run_workers(2, exchange, part)):
            assert found == [(parts * pieces[1 - rank], 0) for pieces in PIECES]
