"""Executes the program of each bucket of a step, with one order of messages on all ranks.

Each bucket's operations are executed in the order of its program, by one loop (`Executor._run`). It stops at those that
are others' work, which call back when it is done: the engine packs, and measures a whole sum; the optimizer
orthogonalises and updates.

With gloo an operation begins as soon as this rank has what it needs: exchanges and shares have connections of their
own. NCCL takes all messages in one order, the same on every rank. So there the order is fixed: each exchange is
followed by what comes next for the bucket before it. Streams order the work:

    communicator:   exchange 0   exchange 1   share 0   exchange 2   share 1   share 2
    side stream:             reduce 0     reduce 1               reduce 2
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from kfuse.comm import devices, transports
from kfuse.comm.buckets import ALIGN, Bucket
from kfuse.comm.group import CommError, Group, Pending
from kfuse.comm.schedule import FACTOR, GRADIENT, SHARD, Op, Program
from kfuse.comm.step import StepPlan
from kfuse.comm.sum_tree import RangePlan, plan_merges, plan_range
from kfuse.comm.transports import BringsContributions
from kfuse.kernels import BLOCK, block_sumsq, num_blocks, reduce
from kfuse.kernels.wire import in_wire

AT_ONCE = 2  # buckets whose contributions may be under way over gloo: they take memory until they are added up


@dataclass
class _Run:
    """A bucket's program, and how far the step has come in it."""

    bucket: Bucket
    program: Program
    transport: BringsContributions  # it is one where the program reduces
    sumsq: Tensor  # receives the sums of squares of each block of the bucket's `part`, where that is measured
    at: int = 0  # the number of the operation that comes next
    sum: Tensor = field(init=False)  # where the sum goes: the bucket's `sum`, or its tail
    flat: Tensor | None = None  # what travels: the same, its copy, factors or parameters
    shared: Pending | None = None  # the share under way
    measured: bool = False  # `sumsq` has those of this step

    def reset(self) -> None:
        self.at, self.sum, self.flat, self.shared, self.measured = 0, self.bucket.sum, None, None, False

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

    failed: str | None = None  # why this worker cannot go on with the others

    def __init__(
        self,
        buckets: Sequence[Bucket],
        group: Group,
        programs: Sequence[Program],
        dtype: str,
        tree: str | Sequence[int],
        norms: Sequence[Tensor],
    ) -> None:
        """programs: of each bucket. dtype: of gradients in messages, fp32, bf16 or int8; the last bucket, with the
        tail, is always sent in fp32, and those of float64 in float64. tree: see `transports.make`. norms: of each
        bucket of gradients, receives the sums of squares of its blocks, where a worker measures its shards. Raises
        CommError.
        """
        self._group, self._device = group, devices.of(group.device)
        # What the length of a shard is a multiple of: where shards are measured they are of whole blocks.
        unit = BLOCK if any(program.measures_shards for program in programs) else ALIGN

        def cuts(key: int, numel: int) -> Sequence[slice]:
            """Each rank's shard of a bucket's message of so many elements: of its gradients, of these and the tail, or
            of eight bits.

            Not a method: the executor, and the messages' memory, go as soon as the group has changed.
            """
            bucket = buckets[key]
            if bucket.added is not None and numel != bucket.body:
                return [in_wire(shard) for shard in bucket.shards]
            return bucket.shards if numel == bucket.body else group.shards(numel, unit)

        made = {name: transports.make(name, group, tree, cuts) for name in {p.transport: None for p in programs}}
        self._transports, self._cuts = list(made.values()), cuts
        self._side = self._device.new_stream()
        on_shards = any(program.ops[program.index("exchange")].place == SHARD for program in programs)
        self._polls = on_shards and group.size > 1 and not self._device.asynchronous
        self._canonical, self._step = True, 0
        owned: dict[int, list[slice]] = {}
        if any(bucket.layout.costs for bucket in buckets):
            from kfuse.comm.owners import owned_parts  # few optimizers need it

            owned = owned_parts([bucket.layout for bucket in buckets], group.size)
        self._runs: list[_Run] = []
        for bucket, program in zip(buckets, programs, strict=True):
            bucket.owned = owned.get(bucket.index, [])
            bucket.shards = bucket.owned if bucket.owned and program.sharded else group.shards(bucket.body, unit)
            shard = bucket.shards[group.rank]
            mirrors = program.has("mirror") and group.size > 1
            bucket.assign(shard, bucket.shards[group.before[group.rank]] if mirrors else slice(0, 0))
            sumsq = torch.empty(0)
            if program.measures_shards:
                first = shard.start // BLOCK
                sumsq = norms[bucket.index][first : first + num_blocks(shard.stop - shard.start)]
            is_rounded = bucket is not buckets[-1] and bucket.kind is torch.float32 and group.size > 1
            bucket.send_as(dtype if is_rounded else "fp32")
            brings = cast(BringsContributions, made[program.transport])
            self._runs.append(_Run(bucket, program, brings, sumsq))
        for transport in self._transports:
            if (hold := getattr(transport, "hold", None)) is not None:
                hold([run.bucket for run in self._runs if run.transport is transport])
        self.reset()

    @property
    def program(self) -> Program:
        """That of the first bucket of gradients."""
        return self._runs[0].program

    @property
    def measured(self) -> set[int]:
        """The buckets whose shards this worker has measured in this step, by index."""
        return {run.bucket.index for run in self._runs if run.measured}

    # -- before a step --------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Prepares a step without a plan: one contribution from each worker, added up in rank order."""
        self._started = 0  # how many buckets were started; the first ones
        self._slots = range(1)  # which of them are contributed
        for run in self._runs:
            run.reset()
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

    # -- a program ------------------------------------------------------------------------------------------------

    def _run(self, run: _Run, stop: int) -> None:
        """Executes the program up to operation number `stop`."""
        while run.at < stop:
            self._execute(run)

    def _pass(self, run: _Run, kind: str) -> None:
        """The operation of this kind, which is others' work, is done: the program goes on behind it."""
        run.at = run.program.index(kind) + 1

    def _execute(self, run: _Run) -> None:
        """Executes the next operation on a bucket. What an abort may drop meanwhile is kept for the stream."""
        op, bucket = run.next, run.bucket
        match op.kind:
            case "exchange":
                self._exchange(run)
            case "wait" if run.shared is not None:
                run.shared.wait_on_stream()
                run.shared = None
            case "wait":
                run.transport.wait(bucket.index)
            case "reduce":
                run.transport.reduce(bucket.index, run.sum)
            case "reduce+measure":
                shared = () if run.program.sharded or bucket.added is None else (bucket.message,)
                run.transport.reduce(bucket.index, run.sum, run.sumsq, *shared)
                run.measured = True
            case "measure" if op.place == SHARD:  # of a sum that the library has added up
                self._device.keep([run.sum, run.sumsq], self._device.current_stream())
                if run.sumsq.numel():
                    block_sumsq(run.sum[bucket.part], run.sumsq)
                run.measured = True
            case "mirror":
                name = f"{self._name(bucket)} (mirror of the gradient)"
                run.shared = self._group.pass_on(bucket.mean[bucket.mirrored], bucket.own, name)
            case "share":
                flat = run.flat
                assert flat is not None
                if op.what == GRADIENT and flat is not run.sum and bucket.added is None:
                    self._device.keep([flat], self._device.current_stream())  # the sum is kept by `reduce`
                    flat[bucket.part].copy_(run.sum[bucket.part])
                cuts = bucket.owned if op.what == FACTOR else self._cuts(bucket.index, flat.numel())
                run.shared = self._group.share(flat, f"{self._name(bucket)} (share of the {op.what})", cuts)
            case _:
                raise AssertionError(f"{op.kind} is others' work")
        run.at += 1

    def _exchange(self, run: _Run) -> None:
        """Starts the messages: behind the side stream's work if that adds up what they bring, as it may still read an
        earlier bucket in the receive buffer.
        """
        bucket = run.bucket
        slots = [bucket.slot(k) for k in self._slots] or [bucket.slot(0)]
        if run.sum is not bucket.sum:
            slots = [slot[bucket.body :] for slot in slots]
        if bucket.message is not None:
            slots = [bucket.message if bucket.added is not None else bucket.message.copy_(slots[0])]
        stream = self._device.current_stream()
        if run.next.place == SHARD:
            self._side.wait_stream(stream)
            stream = self._side
        with self._device.on(stream):
            run.transport.launch(bucket.index, slots, self._name(bucket))
        run.flat = run.sum if bucket.message is None else bucket.message

    def _name(self, bucket: Bucket) -> str:
        return f"step {self._step}, {bucket.name}"

    # -- during backward ------------------------------------------------------------------------------------------

    def launch(self, complete: Sequence[Bucket], step: int, local: bool) -> None:
        """`complete` have this worker's whole sum: starts each bucket whose predecessors are complete too.

        Where the messages of several optimizers need one order on all ranks, `wait` starts them: backward may reach
        the optimizers' parameters in another order on another rank. local: only the tail is reduced.

        Where the group may change `wait` raises what fails here, so that no CommError leaves the user's
        `loss.backward()`. In a fixed group it is raised at once: a GPU may be lost with the message.
        """
        self._step = step
        if self._group.size == 1:
            return
        for run in [self._runs[bucket.index] for bucket in complete]:
            self._pass(run, "pack")
            if local:
                run.sum = run.bucket.sum[run.bucket.body :]
                if run.bucket.index < len(self._runs) - 1:
                    run.at = run.program.index("barrier")
        if self.failed is not None or self._group.in_one_order:
            return
        try:
            self._start_complete()
            if self._polls:  # what is added up makes room for more messages
                self._run_arrived()
                self._start_complete()
        except CommError as error:
            self.failed = str(error)
            if self._group.fixed:
                raise

    def _start_complete(self) -> None:
        while self._started < len(self._runs) and (run := self._runs[self._started]).at:
            started = self._runs[: self._started]
            if self._polls and sum(each.before_pause for each in started) >= AT_ONCE:
                break
            if run.before_pause:
                self._execute(run)
                # NCCL's one order of messages is each exchange, then what comes next for the buckets before it. This
                # one's own reduction would wait for the exchange that has just begun.
                if self._device.asynchronous:
                    self._run_to_pause(started)
            self._started += 1

    def _run_arrived(self) -> None:
        """Runs the buckets whose messages have arrived to their pause. Does not wait."""
        for run in self._runs[: self._started]:
            if run.before_pause:
                if not run.transport.arrived(run.bucket.index):
                    break  # shards are shared in the order of launches on every rank
                self._run_to_pause([run])

    def _run_to_pause(self, runs: Sequence[_Run]) -> None:
        with self._device.on(self._side):
            for run in runs:
                self._run(run, run.program.pause)

    # -- at the end of backward -----------------------------------------------------------------------------------

    def wait(self) -> None:
        """Returns when each bucket is behind its barrier: its `sum` is that over all workers, or this worker's shard
        is, for work on the current stream. Raises CommError.
        """
        if self.failed is not None:
            raise CommError(self.failed)
        if self._group.size == 1:
            return
        self._start_complete()
        if self._device.asynchronous:
            self._run_to_pause(self._runs[: self._started])
        for run in self._runs:
            if run.at and run.before_pause:
                self._run_to_pause([run])
                self._start_complete()  # it may have waited for memory: this loop goes on with what it adds
        for run in self._runs[: self._started]:
            self._run(run, run.program.index("barrier"))
            self._pass(run, "barrier")
            if run.flat is not None and run.flat is not run.sum and not run.program.sharded:
                if run.bucket.added is None:
                    run.sum.copy_(run.flat)
                else:
                    reduce(run.flat[None], (), run.sum)
        self._device.current_stream().wait_stream(self._side)
        if not (self.program.sharded or self.measured):  # else `share_sums` follows
            self._group.settle()

    def share_sums(self, *sums: Tensor, what: str = "sums of squares") -> None:
        """Gives every worker the sums that each has of its own shards; zeros elsewhere. Raises CommError.

        sums: fp32 or float64, on the device, in one message. Zeros are added, so the bits stay. what: names it in
        errors.
        """
        if self._group.size > 1 and (self.program.sharded or self.measured):
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
            runs.append(run := self._runs[bucket.index])
            run.flat = flat
            self._pass(run, "orthogonalise")
            self._execute(run)
        for run in runs:
            self._run(run, run.program.index("update"))
        self._group.settle()

    def updates(self, buckets: Sequence[Bucket], parameters: Sequence[Tensor]) -> Iterator[Bucket]:
        """Runs the programs of the buckets that hold gradients to their end. Yields each for the caller to update.

        The last bucket comes first: it has the first layers, which the next forward needs first. The iteration ends
        when all shares are here, for work on the current stream. Raises CommError, after the last bucket: of this
        worker's part all or nothing is updated.
        """
        runs: list[_Run] = []
        failed: CommError | None = None
        for bucket in reversed(buckets):
            yield bucket
            run = self._runs[bucket.index]
            run.flat = parameters[bucket.index]
            self._pass(run, "update")
            if run.program.sharded and self._group.size > 1 and failed is None:
                runs.append(run)
                try:
                    self._execute(run)
                except CommError as error:
                    failed = error
        if failed is not None:
            raise failed
        for run in runs:
            self._run(run, len(run.program.ops))

    # -- a failure ------------------------------------------------------------------------------------------------

    def abandon(self, reduced: bool) -> bool:
        """Aborts the step. Where messages may be under way, which is returned, the executor has `failed`, and the
        buckets get new buffers.

        reduced: all buckets have come to their barriers, so no message writes to the old ones any more.
        """
        if not self._started or self._group.size == 1:
            return False
        if self.failed is None:
            self.failed = "a step was aborted after its reduction began: this worker cannot go on with the others"
        if not reduced:
            for run in self._runs:
                run.bucket.renew()
        return True
