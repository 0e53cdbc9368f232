"""One step of an engine, up to its messages: micro-batches are packed into buckets, and complete buckets are launched.

1) When a bucket has all of a micro-batch's gradients one kernel (`pack`) reads them once: into the flat buffer, scaled
   by the micro-batch's weight, with the sum of squares of this micro-batch's own gradient.
2) After the step's last micro-batch the bucket's reduction starts while backward goes on. Buckets start in index order
   on every rank; the tail is the end of the last one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter

from kfuse.comm.buckets import PACKED, AveragedBuffers, Bucket
from kfuse.comm.devices import StreamOrder
from kfuse.comm.executor import Executor
from kfuse.comm.group import Group
from kfuse.comm.measurement import Measurement
from kfuse.comm.settings import CommOptions
from kfuse.comm.step_state import MicroBatch, StepPlan, StepState
from kfuse.comm.sum_tree import ADD, WRITE, LeafStep
from kfuse.kernels import pack

if TYPE_CHECKING:  # few jobs need it
    from kfuse.comm.audit import AuditedGradient

_LOG = logging.getLogger("kfuse")

REMEDY = (
    "one backward is one micro-batch. For several a step, iterate over a step of kf.DataLoader, or wrap each in "
    "`with opt.micro_batch(samples=len(x), last=...)`; call opt.step() and opt.zero_grad() once after the last. "
    "Several losses of the same samples: add them up and call backward once, or give opt.micro_batch (kf.DataLoader) "
    "several_backwards=True. For ACC backwards of loss / ACC: opt.accumulate(ACC)"
)


@dataclass(frozen=True)
class Reduced:
    """The result of a step's reduction, on the device. The mean gradient is in the buckets."""

    record: Tensor  # float64 [RECORD_SLOTS + workers + figures]: see `Measurement.record`
    used: Tensor | None  # fp32 [parameters]: micro-batches of all that gave it a gradient. None: this worker's all did
    unused: frozenset[int]  # parameters that none of this worker's micro-batches gave a gradient
    now: Step  # the step that was reduced
    differs: bool  # the workers no longer have the same model, as they found in this step


class EngineParts:
    """What a step and the hooks of gradients know of the engine that they belong to: it is one."""

    options: CommOptions
    group: Group  # the lane of the view's group that this engine uses
    lane: int
    params: list[Parameter]
    names: list[str]  # of the parameters, for messages
    device: torch.device  # where the parameters and buckets lie
    on_gpu: bool
    streams: StreamOrder
    buckets: list[Bucket]  # the last one carries the tail
    gradient_buckets: list[Bucket]  # that hold gradients: all but a last one that has only averaged buffers and tail
    averaged: AveragedBuffers
    measurement: Measurement
    executor: Executor
    audited: AuditedGradient | None  # where steps may have an audit
    step: int  # steps completed
    now: Step  # the coming step, or the one under way
    reduced: Reduced | None  # the last step's result, until the optimizer takes it
    superseded: bool  # a newer engine has taken over some of the parameters
    on_last_micro_batch: Callable[[], None]  # its backward is over, all buckets are launched. The optimizer sets it.
    _warned: set[str]

    def wants_gradient(self) -> bool:
        """Whether to take the gradient that has just arrived."""
        raise NotImplementedError

    def close_micro_batch(self, then_wait: bool = True) -> None:
        """Ends the micro-batch under way."""
        raise NotImplementedError

    def close(self) -> None:
        """Removes the hooks."""
        raise NotImplementedError

    def warn_once(self, message: str, *values: object) -> None:
        if message not in self._warned:
            self._warned.add(message)
            _LOG.warning(message, *values)


class Step(StepState):
    """The step under way. The engine calls `follow` if it has a plan, then `open`, `pack` and `close` by turns."""

    def __init__(self, engine: EngineParts) -> None:
        super().__init__()
        self._engine = engine
        self._leaves: Sequence[LeafStep] | None = None  # with the canonical tree: how this worker sums its own
        self._audited: int | None = None  # which of this worker's, from 0, has the digest of its gradient taken
        engine.executor.reset()

    @property
    def tail_waits(self) -> bool:
        """With sharded state the last bucket, of buffers and tail, travels with the sums of squares: not where the
        weights' sum is needed before them, nor where each contribution is added up in its place.
        """
        options = self._engine.options
        return options.sharded and not options.reproducible and self.weights_are_known and self._engine.group.size > 1

    # -- micro-batches --------------------------------------------------------------------------------------------

    def follow(self, plan: StepPlan) -> None:
        mine = plan.ranges[self._engine.group.rank]
        self.plan, self.expected = plan, len(mine)
        if plan.audited is not None and plan.audited in mine:
            self._audited = mine.index(plan.audited)
        if self._engine.options.reproducible:
            self._leaves = self._engine.executor.plan_sums(plan).steps

    def open(self, micro_batch: MicroBatch) -> None:
        self._refuse_to_open()
        engine, self.current = self._engine, micro_batch
        self.leaf = self._leaves[self.done] if self._leaves is not None else ADD if self.done else WRITE
        if self.implicit:
            self.scale = 1.0 / engine.group.size
        elif self.plan is not None and self.weights_are_known:
            self.scale = micro_batch.weight / (self.plan.local or self.plan.samples)
        else:
            self.scale = float(micro_batch.weight)
        engine.streams.add()
        self.alone = (
            engine.group.size == 1 and micro_batch.last and not (self.done or engine.on_gpu) and self.scale == 1.0
        )
        self.collects = not (engine.on_gpu or engine.audited is not None or micro_batch.several_backwards)
        if not self.done:
            engine.measurement.stopwatch.start()
        if not self.implicit:
            if self.done:
                engine.averaged.put_back()
            else:
                engine.averaged.begin_step()
        for bucket in engine.buckets:
            bucket.begin_micro_batch()
        if self.plan is None and engine.options.reproducible and engine.group.rank == 0:
            engine.warn_once(
                "comm.reproducible=true: the micro-batches of this loop are not planned, so the bits depend on the "
                "number of workers; kf.fit and kf.DataLoader plan them"
            )

    def _refuse_to_open(self) -> None:
        if self.closed or self._engine.reduced is not None:  # the optimizer has not taken the last step's result
            if self.parts > 1:
                raise RuntimeError(f"opt.accumulate({self.parts}): another backward after the {self.parts} of a step")
            raise RuntimeError(
                f"another backward before opt.step(): {REMEDY}. Where the earlier one was for another optimizer, as a "
                "GAN's generator's is, call opt.zero_grad() before this one; of several that one loss trains make one: "
                "kf.Optimizer(a, b). Before an optimizer of torch's trains the same model: opt.close()"
            )
        if self.current is not None:
            raise RuntimeError("opt.micro_batch is already open: micro-batches do not nest")
        if self.expected is not None and self.done >= self.expected:
            raise RuntimeError(f"the plan has {self.expected} micro-batches for this worker: one more was begun")

    def pack(self, bucket: Bucket) -> None:
        engine = self._engine
        engine.streams.go_on_here(reads=bucket.grads)
        self.had_graph |= bucket.grads[0] is not None and bucket.grads[0].requires_grad
        if bucket.missing:
            self.missed |= {i for i, grad in zip(bucket.layout.params, bucket.grads, strict=True) if grad is None}
        if self.done == self._audited and engine.audited is not None:
            engine.audited.take(bucket)
        for number, which in enumerate(bucket.calls):
            if bucket.grads[which[0]] is not PACKED:
                grads = bucket.grads if len(bucket.calls) == 1 else [bucket.grads[k] for k in which]
                self._pack(bucket, number, grads, not bucket.missing)
                del grads  # they go before the bucket's messages begin
        bucket.grads = []
        bucket.packed = True
        if bucket is not engine.buckets[-1]:
            self._complete(bucket)

    def pack_large(self, bucket: Bucket, k: int) -> None:
        """Packs a large gradient as it comes: it lies in the cache, and its memory is there for the next one."""
        self._pack(bucket, bucket.call_of[k], [bucket.grads[k]], True)
        bucket.grads[k] = PACKED

    def _pack(self, bucket: Bucket, number: int, grads: Sequence[Tensor | None], complete: bool) -> None:
        """Packs the gradients of one of the bucket's `calls`. complete: none is None."""
        if self.alone and complete and not torch.is_grad_enabled():
            places = bucket.places if len(bucket.calls) == 1 else [bucket.places[k] for k in bucket.calls[number]]
            torch._foreach_copy_(places, grads)  # type: ignore[arg-type]
            return
        given = bucket.packings(self.leaf.slot)[number]
        given.grads, given.scale, given.accumulate = grads, self.scale, self.leaf.accumulate
        pack.run(given)
        given.grads = ()

    def close(self) -> bool:
        """Writes the tail, once all buckets are packed. Returns whether it was this worker's last micro-batch.

        Raises RuntimeError if the plan has more than were run.
        """
        engine, current, last = self._engine, self.current, self._engine.buckets[-1]
        assert current is not None
        if self.plan is not None and self.missed and len(self.missed) == len(engine.params):
            engine.warn_once(
                "step %d: a micro-batch ended without a backward: its samples count with a gradient of zero, in the "
                "mean and in the statistics",
                engine.step,
            )
        if engine.averaged.tensors:
            engine.averaged.pack(last, self.leaf, self.scale / self.parts)
        engine.measurement.write(last, self)
        if current.last:
            engine.measurement.stopwatch.stop(self.done + 1)
        self.weight += current.weight
        self.unused = self.unused & self.missed if self.done else self.missed
        self.missed = set()
        self.done += 1
        self.closed = current.last
        if current.last and self.expected not in (None, self.done):
            raise RuntimeError(f"the plan has {self.expected} micro-batches for this worker: {self.done} were run")
        self._complete(last)
        self.current, self.collects = None, False
        if self.implicit and not current.last:
            engine.averaged.put_back()  # before the next forward, which no context announces
        return current.last

    def _complete(self, bucket: Bucket) -> None:
        assert self.current is not None
        for destination, source in self.leaf.merges:
            bucket.slot(destination).add_(bucket.slot(source))
        if self.current.last and not (bucket is self._engine.buckets[-1] and self.tail_waits):
            self._engine.executor.launch([bucket], self._engine.step, self.is_local)

    # -- its end --------------------------------------------------------------------------------------------------

    def end(self) -> bool:
        """Whether this worker's part is complete. One without a micro-batch in the plan contributes nothing now.

        Raises RuntimeError if the step has begun, and its last micro-batch has not been run, or is being run.
        """
        if self.expected == 0 and not self.closed:
            self._contribute_nothing()
        if self.current is not None:
            raise RuntimeError(f"opt.step() inside a micro-batch: {REMEDY}")
        if self.done and self.implicit and not self.closed:
            raise RuntimeError(
                f"opt.accumulate({self.parts}): opt.step() after {self.done} of {self.parts} backwards. Where the last "
                "batches of an epoch are fewer, leave them out with opt.zero_grad(), or use opt.micro_batch"
            )
        if self.done and not self.closed:
            raise RuntimeError(f"opt.step() before the step's last micro-batch: {REMEDY}")
        return self.closed

    def _contribute_nothing(self) -> None:
        """Sends zeros; with reproducible sums there is no slot to write to."""
        engine = self._engine
        engine.averaged.begin_step()
        engine.measurement.stopwatch.forget()
        self.closed, self.unused = True, set(range(len(engine.params)))
        if not engine.options.reproducible:
            for bucket in engine.buckets:
                bucket.slot(0).zero_()
        launched = engine.gradient_buckets if self.tail_waits else engine.buckets
        engine.executor.launch(launched, engine.step, self.is_local)

    def reduce(self) -> KeptStep:
        """Waits for all buckets and measures them; then the `mean` of each is the mean gradient. Raises CommError.

        The last bucket may still have to be summed: see `tail_waits`.
        """
        engine, last = self._engine, self._engine.buckets[-1]
        engine.streams.go_on_here()
        engine.streams.end()
        engine.executor.wait(self.is_local)
        total_weight = engine.measurement.total_weight(last.tail_sum, self)
        engine.measurement.measure(total_weight, engine.executor.measured)
        changes = last.view(last.mean) if engine.averaged.tensors else []
        return KeptStep(engine.step, self, last.tail_sum, changes, total_weight)


@dataclass
class KeptStep:
    """The last step's reduced gradients, from which survivors finish an update that a loss interrupts."""

    step: int  # its number
    now: Step
    tail: Tensor  # the step's summed tail
    changes: Sequence[Tensor]  # the averaged buffers' summed changes, in the order of their bucket
    total_weight: Tensor | None  # what these sums are to be divided by; None: they are means
    reduced: Reduced | None = None  # None: not known here, as some worker's sums of squares have not arrived
    updated: bool = False  # the optimizer has updated this worker's part
    resumed: bool = False  # it is being ended in another group: what is updated is not shared
