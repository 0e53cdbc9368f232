"""The exchange of two workers over gloo, in parts: sums, their squares, and the memory that it takes."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from distributed import run_workers
from torch import Tensor

import kfuse as kf
from kfuse.comm import transports
from kfuse.comm.sum_tree import plan_merges
from kfuse.comm.transports import all_to_all
from kfuse.kernels import BLOCK, block_sumsq, num_blocks
from kfuse.kernels.reduction import postfix

PIECES = ([1, 1], [2, 1], [0, 2], [3, 4])
NUMEL = 9 * BLOCK + 700  # rank 0 has five blocks, rank 1 four and a ragged one


def slots_of(rank: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(NUMEL, generator=generator) for _ in range(max(1, count))]


def wanted(pieces: list[int]) -> Tensor:
    """The sum in the order of the merges, each addition rounded once."""
    rows = [slot for r, count in enumerate(pieces) for slot in slots_of(r, count)[:count]]
    stack: list[Tensor] = []
    for item in postfix(len(rows), merges(len(rows))):
        stack.append(rows[item] if item >= 0 else stack.pop(-2) + stack.pop())
    return stack[0]


def merges(count: int) -> tuple[tuple[int, int], ...]:
    return plan_merges([(0, k) for k in range(count)], count)


def exchange(part: int) -> list[dict[str, Any]]:
    """Of each case: whether this rank's bits are right, how many parts came, and how many of them are still alive."""
    all_to_all.PART = part
    group = kf.init().group
    rank, found = group.rank, []
    transport = transports.make("all_to_all", group, unit=BLOCK)
    assert isinstance(transport, all_to_all.TwoWorkers)
    shard = group.shards(NUMEL, BLOCK)[rank]
    for pieces in PIECES:
        transport.plan(pieces, merges(sum(pieces)))
        slots = slots_of(rank, pieces[rank])
        transport.launch(0, slots, "step 1, bucket 1 of 1")
        received = [weakref.ref(tensor) for each in transport._messages[0] for tensor in each.brought]
        sumsq = torch.zeros(num_blocks(shard.stop - shard.start))
        transport.wait(0)
        transport.reduce(0, slots[0], sumsq)
        gc.collect()
        squares = torch.zeros_like(sumsq)
        expected = wanted(pieces)[shard].clone()
        block_sumsq(expected, squares)
        found.append(
            {
                "sum": torch.equal(slots[0][shard], expected),
                "squares": torch.equal(sumsq, squares),
                "parts": len(received),
                "alive": sum(each() is not None for each in received),
            }
        )
    return found


def test_parts_have_the_bits_of_the_whole_and_leave_no_memory() -> None:
    for part in (2 * BLOCK, 2**20):
        for rank, cases in enumerate(run_workers(2, exchange, part)):
            for pieces, found in zip(PIECES, cases, strict=True):
                parts = 3 if part == 2 * BLOCK else 1
                assert found == {"sum": True, "squares": True, "parts": parts * pieces[1 - rank], "alive": 0}, pieces
