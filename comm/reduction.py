"""Passes a step's buckets to the transport in one order on all ranks, and waits for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kfuse.comm.buckets import Bucket
from kfuse.comm.group import Group
from kfuse.comm.plan import StepPlan
from kfuse.comm.sum_tree import LeafStep, plan_merges, plan_range
from kfuse.comm.transports import Transport


class Reduction:
    """Starts each bucket's reduction once it is complete and no earlier one is incomplete, and waits for them.

    So every rank starts its messages in the same order, whichever bucket backward completes first.
    """

    def __init__(
        self, buckets: Sequence[Bucket], group: Group, transport: Transport, dtype: str, on_host: bool
    ) -> None:
        """dtype: of gradients in messages, fp32 or bf16. The last bucket, with the tail, is always sent in fp32.

        on_host: older partial sums of the canonical tree lie on the host.
        """
        self._buckets, self._group, self._transport, self._on_host = buckets, group, transport, on_host
        self._wire = {} if dtype == "fp32" else {b.index: torch.empty(0) for b in buckets[:-1]}
        self._canonical = True
        self.reset()

    def plan(self, plan: StepPlan) -> Sequence[LeafStep]:
        """Prepares a step whose sums follow the canonical tree. Returns how this worker sums its micro-batches."""
        ranges = [plan_range(r.start, len(r), plan.micro_batches) for r in plan.ranges]
        nodes = [node for r in ranges for node in r.pieces]
        self._transport.plan([len(r.pieces) for r in ranges], plan_merges(nodes, plan.micro_batches))
        self._canonical = True
        mine = plan.ranges[self._group.rank]
        return plan_range(mine.start, len(mine), plan.micro_batches, self._on_host).steps

    def reset(self) -> None:
        """Prepares a step without a plan: one contribution from each worker, added up in rank order."""
        self._complete = [False] * len(self._buckets)
        self.launched = self._step = 0
        if self._canonical:
            size = self._group.size
            self._transport.plan([1] * size, plan_merges([(0, r) for r in range(size)], size))
            self._canonical = False

    def launch(self, complete: Sequence[Bucket], step: int, local: bool) -> None:
        """`complete` have this worker's whole sum: starts each bucket whose predecessors are complete too.

        Where the messages of several optimizers need one order on all ranks, `wait` starts them: backward may reach
        the optimizers' parameters in another order on another rank. local: gradients stay with their worker; only the
        tail is reduced.
        """
        for bucket in complete:
            self._complete[bucket.index] = True
        self._step = step
        if not self._group.in_one_order:
            self._start(local)
        self._transport.poll()

    def _start(self, local: bool) -> None:
        while self.launched < len(self._buckets) and self._complete[self.launched]:
            bucket = self._buckets[self.launched]
            if self._travels(bucket, local):
                outgoing = self._outgoing(bucket, local)
                self._transport.launch(bucket.index, outgoing, f"step {self._step}, {bucket.name}")
            self.launched += 1

    def wait(self, local: bool) -> None:
        """Returns when slot 0 of each bucket holds the sum over all workers. Raises CommError."""
        self._start(local)
        for bucket in self._buckets if self._group.size > 1 else ():
            if self._travels(bucket, local):
                self._transport.wait(bucket.index)
                if bucket.index in self._wire and not local:
                    bucket.slots[0].copy_(self._wire[bucket.index])
            self._transport.poll()
        self._group.settle()

    def abandon(self) -> bool:
        """The step is aborted. Returns whether messages are under way.

        These may still write to their buffers at any time, so the buckets get new ones.
        """
        under_way = self.launched > 0 and self._group.size > 1
        if under_way:
            self._wire = {index: torch.empty(0) for index in self._wire}
            for bucket in self._buckets:
                bucket.renew()
        return under_way

    def _travels(self, bucket: Bucket, local: bool) -> bool:
        return self._group.size > 1 and (bucket is self._buckets[-1] or not local)

    def _outgoing(self, bucket: Bucket, local: bool) -> list[Tensor]:
        if local:
            return [slot[bucket.body :] for slot in bucket.slots]
        if bucket.index not in self._wire:
            return bucket.slots
        if self._wire[bucket.index].shape != bucket.slots[0].shape:
            self._wire[bucket.index] = torch.empty_like(bucket.slots[0], dtype=torch.bfloat16)
        return [self._wire[bucket.index].copy_(bucket.slots[0])]
