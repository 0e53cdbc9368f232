"""Executes the program of each bucket of a step, with one order of messages on all ranks.

With gloo an operation begins as soon as this rank has what it needs: exchanges and shares have connections of their
own. NCCL takes all messages in one order, the same on every rank. So there the order is fixed: each exchange is
followed by what comes next for the bucket before it. Streams order the work:

    communicator:   exchange 0   exchange 1   share 0   exchange 2   share 1   share 2
    side stream:             reduce 0     reduce 1               reduce 2
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from kfuse.comm import devices, transports
from kfuse.comm.buckets import ALIGN, Bucket
from kfuse.comm.group import CommError, Group, Pending
from kfuse.comm.schedule import FACTOR, PARAMETER, SHARD, Op, Program
from kfuse.comm.step import StepPlan
from kfuse.comm.sum_tree import RangePlan, plan_merges, plan_range
from kfuse.comm.transports import BringsContributions
from kfuse.kernels import BLOCK, block_sumsq, num_blocks

AT_ONCE = 2  # buckets whose contributions may be under way over gloo: they take memory until they are added up


@dataclass
class _Run:
    """How far a bucket has come in its program."""

    bucket: Bucket
    program: Program
    at: int  # the number of the operation that comes next
    sum: Tensor  # where the sum goes: the bucket's `sum`, or its tail
    flat: Tensor | None = None  # what travels: the same, or a copy of it in bf16
    shared: Pending | None = None  # the share under way

    @property
    def next(self) -> Op:
        return self.program.ops[self.at]

    @property
    def before_pause(self) -> bool:
        """Whether the last message before the barrier has not been waited for."""
        return self.at < self.program.pause


class Executor:
    """Starts each bucket's program once it is complete and no earlier one is incomplete, and runs it to its end.

    So every rank starts its messages in the same order, whichever bucket backward completes first. Made for one group:
    after a failure it starts no more messages.
    """

    measured: dict[int, Tensor]  # by bucket: fp32, the sum of squares of each block of its `part`, in this step
    failed: str | None = None  # why this worker cannot go on with the others

    def __init__(
        self,
        buckets: Sequence[Bucket],
        group: Group,
        programs: Sequence[Program],
        dtype: str,
        tree: str | Sequence[int],
    ) -> None:
        """programs: of each bucket. dtype: of gradients in messages, fp32 or bf16; the last bucket, with the tail, is
        always sent in fp32, and those of float64 in float64. tree: see `transports.make`. Raises CommError.
        """
        self._buckets, self._group, self.programs = buckets, group, programs
        # What the length of a shard is a multiple of: where shards are measured they are of whole blocks.
        self.unit = BLOCK if any(program.measures_shards for program in programs) else ALIGN
        names = dict.fromkeys(program.transport for program in programs)
        made = {name: transports.make(name, group, tree, self._cuts) for name in names}
        self._transports, self._transport_of = list(made.values()), [made[program.transport] for program in programs]
        self._sharded = any(program.sharded for program in programs)
        rounded = [] if dtype == "fp32" else [b for b in buckets[:-1] if b.kind is torch.float32]
        self._wire = {bucket.index: torch.empty(0) for bucket in rounded}
        self._device = devices.of(group.device)
        self._side = self._device.new_stream()
        on_shards = any(program.ops[program.index("exchange")].place == SHARD for program in programs)
        self._polls = on_shards and group.size > 1 and not self._device.asynchronous
        self._canonical, self._step = True, 0
        self._sumsq: list[Tensor] = []  # of each bucket, for `measured`; used again in each step
        owned: dict[int, list[slice]] = {}
        if any(bucket.layout.costs for bucket in buckets):
            from kfuse.comm.owners import owned_parts  # few optimizers need it

            owned = owned_parts([bucket.layout for bucket in buckets], group.size)
        for bucket, program in zip(buckets, programs, strict=True):
            bucket.owned = owned.get(bucket.index, [])
            bucket.shards = bucket.owned if bucket.owned and program.sharded else group.shards(bucket.body, self.unit)
            shard = bucket.shards[group.rank]
            mirrors = program.has("mirror") and group.size > 1
            bucket.assign(shard, bucket.shards[group.before[group.rank]] if mirrors else slice(0, 0))
            blocks = num_blocks(shard.stop - shard.start) if program.measures_shards else 0
            self._sumsq.append(torch.zeros(blocks, dtype=torch.float32, device=group.device))
        for transport in self._transports:
            if (hold := getattr(transport, "hold", None)) is not None:
                hold([bucket for bucket in buckets if self._transport_of[bucket.index] is transport])
        self.reset()

    def _cuts(self, key: int, numel: int) -> Sequence[slice]:
        """Each rank's shard of a bucket's message of so many elements: of its gradients, or of these and the tail."""
        bucket = self._buckets[key]
        return bucket.shards if numel == bucket.body else self._group.shards(numel, self.unit)

    # -- before a step --------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Prepares a step without a plan: one contribution from each worker, added up in rank order."""
        self._complete, self.measured = [False] * len(self._buckets), {}
        self._slots = range(1)  # which of them are contributed
        self._runs: list[_Run] = []  # of the buckets that were launched, in that order
        if self._canonical:
            size = self._group.size
            for transport in self._transports:
                transport.plan([1] * size, plan_merges([(0, r) for r in range(size)], size))
            self._canonical = False

    def plan_sums(self, plan: StepPlan) -> RangePlan:
        """Prepares a step whose sums follow the canonical tree. Returns how this worker sums its micro-batches."""
        total = plan.micro_batches
        plans = [plan_range(r.start, len(r), total) for r in plan.ranges]
        own = plans[self._group.rank]
        nodes = [node for of_rank in plans for node in of_rank.pieces]
        for transport in self._transports:
            transport.plan([len(of_rank.pieces) for of_rank in plans], plan_merges(nodes, total))
        self._canonical, self._slots = True, range(len(own.pieces))
        return own

    # -- during backward ------------------------------------------------------------------------------------------

    def launch(self, complete: Sequence[Bucket], step: int, local: bool) -> None:
        """`complete` have this worker's whole sum: starts each bucket whose predecessors are complete too.

        Where the messages of several optimizers need one order on all ranks, `wait` starts them: backward may reach
        the optimizers' parameters in another order on another rank. local: only the tail is reduced.

        Where the group may change `wait` raises what fails here, so that no CommError leaves the user's
        `loss.backward()`. In a fixed group it is raised at once: a GPU may be lost with the message.
        """
        for bucket in complete:
            self._complete[bucket.index] = True
        self._step = step
        if self.failed is not None or self._group.in_one_order or self._group.size == 1:
            return
        try:
            self._start_complete(local)
            if self._polls:  # what is added up makes room for more messages
                self._run_arrived()
                self._start_complete(local)
        except CommError as error:
            self.failed = str(error)
            if self._group.fixed:
                raise

    def _start_complete(self, local: bool) -> None:
        while len(self._runs) < len(self._buckets) and self._complete[len(self._runs)]:
            if self._polls and sum(run.before_pause for run in self._runs) >= AT_ONCE:
                break
            bucket = self._buckets[len(self._runs)]
            program = self.programs[bucket.index]
            run = _Run(bucket, program, program.index("barrier"), bucket.sum[bucket.body :] if local else bucket.sum)
            if self._group.size > 1 and (bucket is self._buckets[-1] or not local):
                run.at = program.index("exchange")
                self._exchange(run, self._outgoing(bucket, local))
                # Before this bucket is among the runs: NCCL's one order of messages is each exchange, then what comes
                # next for the buckets before it. Its own reduction would wait for the exchange that has just begun.
                if self._device.asynchronous:
                    self._run_to_pause(*self._runs)
            self._runs.append(run)

    def _outgoing(self, bucket: Bucket, local: bool) -> list[Tensor]:
        slots = [bucket.slot(k) for k in self._slots] or [bucket.slot(0)]
        if bucket.index in self._wire and not local:
            if self._wire[bucket.index].shape != slots[0].shape:
                self._wire[bucket.index] = torch.empty_like(slots[0], dtype=torch.bfloat16)
            return [self._wire[bucket.index].copy_(slots[0])]
        return [slot[bucket.body :] for slot in slots] if local else slots

    def _exchange(self, run: _Run, outgoing: list[Tensor]) -> None:
        """Starts the messages: behind the side stream's work if that adds up what they bring, as it may still read an
        earlier bucket in the receive buffer.
        """
        stream = self._device.current_stream()
        if run.next.place == SHARD:
            self._side.wait_stream(stream)
            stream = self._side
        with self._device.on(stream):
            self._transport_of[run.bucket.index].launch(run.bucket.index, outgoing, self._name(run.bucket))
        run.flat = run.sum if outgoing[0].dtype == run.sum.dtype else outgoing[0]
        run.at += 1

    def _run_arrived(self) -> None:
        """Runs the buckets whose messages have arrived to their pause. Does not wait."""
        for run in self._runs:
            if run.before_pause:
                if not self._contributions(run.bucket).arrived(run.bucket.index):
                    break  # shards are shared in the order of launches on every rank
                self._run_to_pause(run)

    def _run_to_pause(self, *runs: _Run) -> None:
        with self._device.on(self._side):
            for run in runs:
                while run.before_pause:
                    self._execute(run)

    # -- at the end of backward -----------------------------------------------------------------------------------

    def wait(self, local: bool) -> None:
        """Returns when each launched bucket is at its barrier: its `sum` is that over all workers, or this worker's
        shard is, for work on the current stream. Raises CommError.
        """
        if self.failed is not None:
            raise CommError(self.failed)
        if self._group.size == 1:
            return
        self._start_complete(local)
        if self._device.asynchronous:
            self._run_to_pause(*self._runs)
        for run in self._runs:
            if run.before_pause:
                self._run_to_pause(run)
                self._start_complete(local)  # it may have waited for memory: this loop goes on with what it adds
        for run in self._runs:
            while run.at < run.program.index("barrier"):
                self._execute(run)
            if run.flat is not None and run.flat is not run.sum and not run.program.sharded:
                run.sum.copy_(run.flat)
        self._device.current_stream().wait_stream(self._side)
        if not (self._sharded or self.measured):  # else `share_sums` follows
            self._group.settle()

    def share_sums(self, *sums: Tensor, what: str = "sums of squares") -> None:
        """Gives every worker the sums that each has of its own shards; zeros elsewhere. Raises CommError.

        sums: fp32 or float64, on the device, in one message. Zeros are added, so the bits stay. what: names it in
        errors.
        """
        if (self._sharded or self.measured) and self._group.size > 1:
            flat = sums[0] if len(sums) == 1 else torch.cat(sums)
            self._group.all_reduce(flat, f"step {self._step}, {what}").wait_on_stream()
            if len(sums) > 1:
                torch._foreach_copy_(sums, flat.split_with_sizes([each.numel() for each in sums]))
            self._group.settle()

    # -- the update -----------------------------------------------------------------------------------------------

    def share_factors(self, factors: Iterable[tuple[Bucket, Tensor]]) -> None:
        """Returns when each of these flat tensors, [body] on every rank, holds what each rank has of its matrices
        (`Bucket.owned`), for work on the current stream. Raises CommError.

        One bucket's messages travel while the next one's factors are computed, as the iterable is asked for them.
        """
        runs: list[_Run] = []
        for bucket, flat in factors:
            program = self.programs[bucket.index]
            runs.append(_Run(bucket, program, program.index("share", FACTOR), bucket.sum, flat))
            self._execute(runs[-1])
        for run in runs:
            self._execute(run)
        self._group.settle()

    def updates(self, buckets: Sequence[Bucket]) -> Iterator[Bucket]:
        """Runs the programs of the buckets that hold gradients to their end. Yields each for the caller to update.

        The last bucket comes first: it has the first layers, which the next forward needs first. The iteration ends
        when all shares are here, for work on the current stream. Raises CommError, after the last bucket: of this
        worker's part all or nothing is updated.
        """
        runs: list[_Run] = []
        failed: CommError | None = None
        for bucket in reversed(buckets):
            yield bucket
            if self._sharded and self._group.size > 1 and failed is None:
                program = self.programs[bucket.index]
                runs.append(_Run(bucket, program, program.index("share", PARAMETER), bucket.sum))
                try:
                    self._execute(runs[-1])
                except CommError as error:
                    failed = error
        if failed is not None:
            raise failed
        for run in runs:
            self._execute(run)

    # -- one operation --------------------------------------------------------------------------------------------

    def _execute(self, run: _Run) -> None:
        """Executes the next operation on a bucket. What an abort may drop meanwhile is kept for the stream."""
        op, bucket = run.next, run.bucket
        sumsq = self._sumsq[bucket.index]
        match op.kind:
            case "wait" if run.shared is not None:
                run.shared.wait_on_stream()
                run.shared = None
            case "wait":
                self._transport_of[bucket.index].wait(bucket.index)
            case "reduce":
                self._contributions(bucket).reduce(bucket.index, run.sum)
            case "mirror":
                name = f"{self._name(bucket)} (mirror of the gradient)"
                run.shared = self._group.pass_on(bucket.before, bucket.own, name)
            case "reduce+measure":
                self._contributions(bucket).reduce(bucket.index, run.sum, sumsq)
                self.measured[bucket.index] = sumsq
            case "measure":  # of a sum that the library has added up
                self._device.keep([run.sum, sumsq], self._device.current_stream())
                if sumsq.numel():
                    block_sumsq(run.sum[bucket.part], sumsq)
                self.measured[bucket.index] = sumsq
            case "share":
                flat = self._shared(run)
                assert flat is not None, "only optimizers with flat parameters have sharded state"
                cuts = bucket.owned if op.what == FACTOR else self._cuts(bucket.index, flat.numel())
                run.shared = self._group.share(flat, f"{self._name(bucket)} (share of the {op.what})", cuts)
            case _:
                raise AssertionError(f"{op.kind} is no operation of messages")
        run.at += 1

    def _contributions(self, bucket: Bucket) -> BringsContributions:
        return cast(BringsContributions, self._transport_of[bucket.index])  # it is one where the program reduces

    def _shared(self, run: _Run) -> Tensor | None:
        """What travels, with this worker's part in it."""
        if run.next.what == PARAMETER:
            return run.bucket.parameters
        if run.next.what == FACTOR:
            return run.flat
        assert run.flat is not None
        if run.flat is not run.sum:
            self._device.keep([run.flat], self._device.current_stream())  # the sum is kept by `reduce`
            run.flat[run.bucket.part].copy_(run.sum[run.bucket.part])
        return run.flat

    def _name(self, bucket: Bucket) -> str:
        return f"step {self._step}, {bucket.name}"

    # -- a failure ------------------------------------------------------------------------------------------------

    def abandon(self, reduced: bool) -> None:
        """Aborts the step. Where messages may be under way the executor has `failed`, and the buckets get new buffers.

        reduced: all buckets have come to their barriers, so no message writes to the old ones any more.
        """
        if not self._runs or self._group.size == 1:
            return
        if self.failed is None:
            self.failed = "a step was aborted after its reduction began: this worker cannot go on with the others"
        if not reduced:
            self._wire = {index: torch.empty(0) for index in self._wire}
            for bucket in self._buckets:
                bucket.renew()
