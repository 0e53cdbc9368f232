"""Bytes a parameter of every transport, counted on the tensors of a real step, are what a formula gives.

One process stands for one worker of several: the engine, the optimizer and the transports are the real ones, on CPU
tensors. Only the group is a double, whose collectives send nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import kfuse as kf
from kfuse.comm.group import Group, Pending
from kfuse.comm.settings import CommOptions
from kfuse.comm.step import StepPlan
from kfuse.comm.sum_tree import aligned_ranges, bound, bytes_a_parameter, plan_range
from kfuse.session import reset

NUMEL = 2**18  # of a bucket: padding and tail are well below 1 % of it
PADDING = 0.15  # bytes a parameter: the tail, tables of chunks, and shards that are not all of one size
REPRODUCIBLE = CommOptions(reproducible=True)


class Slow(Pending):
    """A message that has not arrived until it is waited for: as many are under way as there can be."""

    def done(self) -> bool:
        return False


class Silent(Group):
    """One of `size` workers, the only one there is: a collective sends nothing, and brings zeros."""

    def __init__(self, rank: int, size: int, message: type[Pending]) -> None:
        super().__init__()
        self.message = message
        self.rank, self.size, self.hosts = rank, size, [""] * size
        self.most = 0
        """Bytes of all tensors at the collective where they were the most."""

    def _count(self, what: str) -> Pending:
        tensors = [found for found in gc.get_objects() if issubclass(type(found), Tensor)]
        storages = [found.untyped_storage() for found in tensors]
        total = reached = 0  # a parameter's storage may be a part of a flat buffer's
        for start, end in sorted((each.data_ptr(), each.data_ptr() + each.nbytes()) for each in storages):
            total += max(0, end - max(start, reached))
            reached = max(reached, end)
        self.most = max(self.most, total)
        return self.message(self, what, [])

    def all_reduce(self, tensor: Tensor, what: str, op: str = "sum") -> Pending:
        return self._count(what)

    def all_to_all(self, out: Tensor, into: Sequence[int], tensor: Tensor, cut: Sequence[int], what: str) -> Pending:
        out.zero_()
        return self._count(what)

    def share(self, flat: Tensor, what: str, unit: int = 1) -> Pending:
        return self._count(what)


def counted(
    options: CommOptions, ranges: Sequence[range], rank: int, message: type[Pending] = Slow, buckets: int = 2
) -> float:
    """The most bytes a parameter in the second step of worker `rank`, whose job sums these ranges of micro-batches.

    message: of type Pending, each arrives at once. The first step makes the moments and the buffers.
    """
    reset()
    gc.collect()
    gc.freeze()  # the collector then knows of what is made from now on
    kf.init(**replace(options, bucket_mb=4 * NUMEL / 2**20).named())
    group = Silent(rank, len(ranges), message)
    opt = kf.FusedAdamW([nn.Parameter(torch.zeros(NUMEL)) for _ in range(buckets)])
    opt.engine.set_group(group)
    opt.updates.lay_out(opt.engine)  # shards of this group's size
    for _ in range(2):
        group.most = 0
        opt.begin(StepPlan(ranges[-1].stop, tuple(ranges)))
        for j in ranges[rank]:
            with opt.micro_batch(samples=1, last=j == ranges[rank][-1]):
                torch.stack([param.sum() for param in opt.engine.params]).sum().backward()
        opt.step()
        opt.zero_grad()
    opt.engine.close()
    gc.unfreeze()
    reset()
    return group.most / (buckets * NUMEL)


@pytest.mark.parametrize(("total", "workers"), [(7, 2), (13, 8)])
def test_reproducible_sums_hold_what_the_formula_says(total: int, workers: int) -> None:
    """On the worker with the most partial sums. Two workers on CPUs do not copy their own contributions."""
    ranges = aligned_ranges(total, workers)
    plans = [plan_range(r.start, len(r), total) for r in ranges]
    most = max(range(workers), key=lambda rank: plans[rank].slots)
    found = counted(REPRODUCIBLE, ranges, most)
    own = 4 * len(plans[most].pieces) / 2 if workers == 2 else 0.0
    assert found == pytest.approx(bytes_a_parameter(ranges) - own, abs=PADDING)
    assert found <= bound(total, workers) + PADDING


def test_buckets_share_their_receive_buffers() -> None:
    """As many as there are messages under way: the rows of two of the four buckets, or those of one."""
    ranges = aligned_ranges(40, 4)
    rows = 4 * sum(len(plan_range(r.start, len(r), 40).pieces) for r in ranges) / 4
    slow, quick = (counted(REPRODUCIBLE, ranges, 0, message, buckets=4) for message in (Slow, Pending))
    assert slow - quick == pytest.approx(1 / 4 * rows, abs=PADDING)


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (CommOptions("allreduce"), 16),
        (CommOptions("allreduce", dtype="bf16"), 18),
        (CommOptions("all_to_all"), 16 + 2),  # and what is received for half of them
        (CommOptions("all_to_all", dtype="bf16"), 18 + 1),
        (CommOptions("all_to_all", dtype="int8"), 16 + 17 / 16 * 3 / 2),
        (CommOptions(state="sharded"), 8 + 2 + 8 / 2),  # parameter, gradient, received; moments
    ],
)
def test_other_transports_hold_one_gradient_and_their_messages(options: CommOptions, wanted: float) -> None:
    assert counted(options, [range(1), range(1, 2)], 0) == pytest.approx(wanted, abs=PADDING)
