"""Runs the schedule of each bucket of a step, in one order of messages on all ranks.

With gloo an operation begins as soon as this rank has what it needs: exchanges and shares have connections of their
own. NCCL takes all messages in one order, the same on every rank. So there the order is fixed: each exchange is
followed by what comes next for the bucket before it. Streams order the work:

    communicator:   exchange 0   exchange 1   share 0   exchange 2   share 1   share 2
    side stream:             reduce 0     reduce 1               reduce 2
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from kfuse.comm import devices
from kfuse.comm.buckets import ALIGN, Bucket
from kfuse.comm.group import CommError, Group, Pending
from kfuse.comm.measurement import Measured
from kfuse.comm.plan import StepPlan
from kfuse.comm.schedule import GRADIENT, SHARD, Op, Program
from kfuse.comm.sum_tree import RangePlan, plan_merges, plan_range
from kfuse.comm.transports import BringsContributions, HoldsSlots, Transport
from kfuse.kernels import BLOCK, block_sumsq, num_blocks

AT_ONCE = 2
"""Buckets whose contributions may be under way at a time over gloo: they take memory until they are added up."""


@dataclass
class _Run:
    """How far a bucket has come in its program."""

    bucket: Bucket
    program: Program
    at: int
    """The number of the operation that comes next."""
    sum: Tensor | None = None
    """Where the sum goes: the bucket's `sum`, or its tail."""
    flat: Tensor | None = None
    """What travels: the same, or a copy of it in bf16."""
    shared: Pending | None = None
    """The share under way."""

    @property
    def next(self) -> Op:
        """The operation that comes next."""
        return self.program.ops[self.at]


def shard_unit(programs: Sequence[Program]) -> int:
    """What the length of a shard is a multiple of: where shards are measured they are of whole blocks."""
    return BLOCK if any(program.measures_shards for program in programs) else ALIGN


class Reduction:
    """Starts each bucket's program once it is complete and no earlier one is incomplete, and runs it to its end.

    So every rank starts its messages in the same order, whichever bucket backward completes first.
    """

    programs: Sequence[Program]
    """Of each bucket."""
    measured: dict[int, Measured]
    """Of each bucket whose shard was measured as it was added up in this step, by index."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        group: Group,
        transports: Mapping[str, Transport],
        programs: Sequence[Program],
        dtype: str,
    ) -> None:
        """transports: by the names that the programs use. programs: of each bucket. dtype: of gradients in messages,
        fp32 or bf16; the last bucket, with the tail, is always sent in fp32.
        """
        self._buckets, self._group = buckets, group
        self._transports = list(transports.values())
        self._transport_of = [transports[program.transport] for program in programs]
        self.programs = programs
        self._sharded = any(program.sharded for program in programs)
        self._unit = shard_unit(programs)
        self._wire = {} if dtype == "fp32" else {b.index: torch.empty(0) for b in buckets[:-1]}
        self._device = devices.of(group.device)
        self._side = self._device.new_stream()
        on_shards = any(program.ops[program.index("exchange")].place == SHARD for program in programs)
        self._polls = on_shards and group.size > 1 and not self._device.asynchronous
        self._canonical, self._step = True, 0
        self._places = range(1)  # the slots that are contributed
        self._measures: list[Measured] = []  # of each bucket, used again in each step
        for bucket, program in zip(buckets, programs, strict=True):
            shards = group.shards(bucket.body, self._unit)
            shard = shards[group.rank]
            mirrors = program.has("mirror") and group.size > 1
            bucket.assign(
                shard if program.sharded else slice(0, bucket.body),
                shards[group.rank - 1] if mirrors else slice(0, 0),
            )
            blocks = num_blocks(shard.stop - shard.start) if program.measures_shards else 0
            sums = torch.zeros(blocks, device=group.device)
            self._measures.append(Measured(shard, sums, rounded=not program.sharded))
        self.reset()

    def hold_slots(self) -> None:
        """Once the buckets' slots have their length: has them lie where the transports want them. Raises CommError."""
        for transport in self._transports:
            if isinstance(transport, HoldsSlots):
                pairs = zip(self._buckets, self._transport_of, strict=True)
                transport.hold([bucket for bucket, of_bucket in pairs if of_bucket is transport])

    def plan(self, plan: StepPlan) -> RangePlan:
        """Prepares a step whose sums follow the canonical tree. Returns how this worker sums its micro-batches."""
        total = plan.micro_batches
        plans = [plan_range(r.start, len(r), total) for r in plan.ranges]
        own = plans[self._group.rank]
        nodes = [node for of_rank in plans for node in of_rank.pieces]
        for transport in self._transports:
            transport.plan([len(of_rank.pieces) for of_rank in plans], plan_merges(nodes, total))
        self._canonical, self._places = True, range(len(own.pieces))
        return own

    def reset(self) -> None:
        """Prepares a step without a plan: one contribution from each worker, added up in rank order."""
        self._complete, self.measured = [False] * len(self._buckets), {}
        self._places = range(1)
        self._failed: CommError | None = None
        self._runs: list[_Run] = []  # of the buckets that were launched, in that order
        if self._canonical:
            size = self._group.size
            for transport in self._transports:
                transport.plan([1] * size, plan_merges([(0, r) for r in range(size)], size))
            self._canonical = False

    # -- during backward ------------------------------------------------------------------------------------------

    def launch(self, complete: Sequence[Bucket], step: int, local: bool) -> None:
        """`complete` have this worker's whole sum: starts each bucket whose predecessors are complete too.

        Where the messages of several optimizers need one order on all ranks, `wait` starts them: backward may reach
        the optimizers' parameters in another order on another rank. local: gradients stay with their worker; only the
        tail is reduced.

        Where the group may change it raises no CommError, which would leave the user's loop through its
        `loss.backward()`: the backward under way goes on to its end, and `wait` raises it. In a fixed group the job
        ends, and the error is raised at once: a GPU may be lost with the message, and with it what follows.
        """
        for bucket in complete:
            self._complete[bucket.index] = True
        self._step = step
        if self._failed is not None:
            return
        try:
            if not self._group.in_one_order:
                self._start(local)
                if self._polls:  # what is added up makes room for more messages
                    self._poll()
                    self._start(local)
        except CommError as error:
            if self._group.fixed:
                raise
            self._failed = error

    def _start(self, local: bool) -> None:
        while len(self._runs) < len(self._buckets) and self._complete[len(self._runs)]:
            if self._polls and sum(run.at < run.program.pause for run in self._runs) >= AT_ONCE:
                break
            bucket = self._buckets[len(self._runs)]
            program = self.programs[bucket.index]
            run = _Run(bucket, program, program.index("barrier"), bucket.sum[bucket.body :] if local else bucket.sum)
            outgoing = self._outgoing(bucket, local)
            if self._travels(bucket, local):
                run.at = program.index("exchange")
                self._exchange(run, outgoing)
                # Before this bucket is among the runs: NCCL's one order of messages is each exchange, then what comes
                # next for the buckets before it. Its own reduction would wait for the exchange that has just begun.
                if self._device.asynchronous:
                    self._go_on()
            self._runs.append(run)

    def _exchange(self, run: _Run, outgoing: list[Tensor]) -> None:
        """Starts the messages: behind the side stream's work if that adds up what they bring.

        The receive buffer may be an earlier bucket's, which the side stream still reads.
        """
        stream = self._device.current_stream()
        if run.next.place == SHARD:
            self._side.wait_stream(stream)
            stream = self._side
        with self._device.on(stream):
            self._transport_of[run.bucket.index].launch(run.bucket.index, outgoing, self._name(run.bucket))
        run.flat = run.sum if outgoing[0].dtype == torch.float32 else outgoing[0]
        run.at += 1

    def _poll(self) -> None:
        """With gloo: goes on with the buckets whose messages have arrived. Does not wait."""
        for run in self._runs:
            if run.at < run.program.pause:
                if not self._contributions(run.bucket).arrived(run.bucket.index):
                    break  # shards are shared in the order of launches on every rank
                self._go_on_with(run)

    def _go_on(self) -> None:
        for run in self._runs:
            self._go_on_with(run)

    def _go_on_with(self, run: _Run) -> None:
        """Runs the bucket's program up to its pause, on the side stream."""
        with self._device.on(self._side):
            while run.at < run.program.pause:
                self._do(run)

    # -- at the end of backward -----------------------------------------------------------------------------------

    def wait(self, local: bool) -> None:
        """Returns when each bucket has come to its barrier: its `sum` is that over all workers, or this worker's shard
        is, for work on the current stream. Raises CommError.
        """
        if self._failed is not None:
            raise self._failed
        self._start(local)
        if self._device.asynchronous:
            self._go_on()
        for run in self._runs:
            if run.at < run.program.pause:
                self._go_on_with(run)
                self._start(local)  # it may have waited for memory: this loop goes on with what it adds
        for run in self._runs:
            while run.at < run.program.index("barrier"):
                self._do(run)
            if run.flat is not None and run.sum is not None and run.flat is not run.sum and not run.program.sharded:
                run.sum.copy_(run.flat)
        self._device.current_stream().wait_stream(self._side)
        self._group.settle()

    def share_sums(self, sums: Tensor, what: str = "sums of squares") -> None:
        """Gives every worker the sums that each has of its own shards; zeros elsewhere. Raises CommError.

        sums: fp32 or float64, on the device. Zeros are added, so the bits stay. what: names the message in errors.
        """
        if (self._sharded or self.measured) and self._group.size > 1:
            self._group.all_reduce(sums, f"step {self._step}, {what}").wait_on_stream()

    # -- the update -----------------------------------------------------------------------------------------------

    def update(self, buckets: Sequence[Bucket], update: Callable[[Bucket], None]) -> None:
        """Runs the programs of the buckets that hold gradients to their end.

        update: changes the parameters of a bucket, or of this worker's shard of it. Buckets come in the order in which
        the next forward reads them: the last one has the first layers.
        When all shares are here, for work on the current stream, this method returns. Raises CommError.
        """
        runs: list[_Run] = []
        failed: CommError | None = None
        for bucket in reversed(buckets):
            update(bucket)  # also after a failure: of this worker's part all or nothing is updated
            if self._sharded and self._group.size > 1 and failed is None:
                program = self.programs[bucket.index]
                runs.append(_Run(bucket, program, program.index("update") + 1))
                try:
                    self._do(runs[-1])
                except CommError as error:
                    failed = error
        if failed is not None:
            raise failed
        for run in runs:
            self._do(run)

    def _do(self, run: _Run) -> None:
        """Runs the next operation on a bucket."""
        op, bucket = run.next, run.bucket
        match op.kind:
            case "wait" if run.shared is not None:
                run.shared.wait_on_stream()
                run.shared = None
            case "wait":
                self._transport_of[bucket.index].wait(bucket.index)
            case "reduce":
                assert run.sum is not None
                self._contributions(bucket).reduce(bucket.index, run.sum)
            case "mirror":
                what = f"{self._name(bucket)} (mirror of the gradient)"
                run.shared = self._group.pass_on(bucket.before, bucket.own, what)
            case "reduce+measure":
                assert run.sum is not None
                mine = self._measures[bucket.index]
                self._contributions(bucket).reduce(bucket.index, run.sum, mine.sumsq)
                self.measured[bucket.index] = mine
            case "measure":
                self._measure(run)
            case "share":
                flat = self._rounded_shard(run) if op.what == GRADIENT else bucket.parameters
                assert flat is not None, "only optimizers with flat parameters have sharded state"
                run.shared = self._group.share(flat, f"{self._name(bucket)} (share of the {op.what})", self._unit)
            case _:
                raise AssertionError(f"{op.kind} is no operation of messages")
        run.at += 1

    def _contributions(self, bucket: Bucket) -> BringsContributions:
        return cast(BringsContributions, self._transport_of[bucket.index])  # it is one where the program reduces

    def _measure(self, run: _Run) -> None:
        """Of a sum that the library has added up."""
        assert run.sum is not None
        mine = self._measures[run.bucket.index]
        self._device.keep([run.sum, mine.sumsq], self._device.current_stream())  # after an abort they may be dropped
        if mine.sumsq.numel():
            block_sumsq(run.sum[mine.shard], mine.sumsq)
        self.measured[run.bucket.index] = mine

    def _rounded_shard(self, run: _Run) -> Tensor:
        """What travels, with this worker's shard of the sum in it."""
        assert run.flat is not None and run.sum is not None
        if run.flat is not run.sum:
            shard = self._group.shards(run.flat.numel(), self._unit)[self._group.rank]
            # After an abort it may be dropped while the copy still runs; the sum is kept by `reduce`.
            self._device.keep([run.flat], self._device.current_stream())
            run.flat[shard].copy_(run.sum[shard])
        return run.flat

    def abandon(self, reduced: bool) -> bool:
        """The step is aborted. Returns whether messages may be under way.

        These may still write to their buffers at any time, so the buckets get new ones. reduced: all buckets have come
        to their barriers, so no message writes there any more.
        """
        under_way = len(self._runs) > 0 and self._group.size > 1
        if under_way and not reduced:
            self._wire = {index: torch.empty(0) for index in self._wire}
            for bucket in self._buckets:
                bucket.renew()
        return under_way

    def _name(self, bucket: Bucket) -> str:
        return f"step {self._step}, {bucket.name}"

    def _travels(self, bucket: Bucket, local: bool) -> bool:
        return self._group.size > 1 and (bucket is self._buckets[-1] or not local)

    def _outgoing(self, bucket: Bucket, local: bool) -> list[Tensor]:
        """What an exchange sends, or the sum where nothing travels."""
        slots = [bucket.slot(k) for k in self._places] or [bucket.slot(0)]
        if bucket.index in self._wire and self._travels(bucket, local) and not local:
            if self._wire[bucket.index].shape != slots[0].shape:
                self._wire[bucket.index] = torch.empty_like(slots[0], dtype=torch.bfloat16)
            return [self._wire[bucket.index].copy_(slots[0])]
        return [slot[bucket.body :] for slot in slots] if local else slots
