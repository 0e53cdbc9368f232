"""A step of an engine: from backward's gradients to their mean over all workers, bucket by bucket, during backward.

1) Hooks take over each parameter's fresh gradient (`gradients`).
2) When a bucket has all of its gradients one kernel (`pack`) reads them once: into the flat buffer, scaled by the
   micro-batch's weight, with the sum of squares of this micro-batch's own gradient.
3) After the step's last micro-batch the bucket's reduction starts while backward goes on. Buckets start in index order
   on every rank; the tail is the end of the last one.
4) `finish` waits for all of them and measures the mean gradient.
5) `update` has the optimizer update each bucket, and shares what each worker has updated.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter

from kfuse.comm import devices, gradients
from kfuse.comm.buckets import AveragedBuffers, Bucket
from kfuse.comm.gradients import STILL_THERE, GradientHooks, at_the_end_of_outer_backward
from kfuse.comm.group import CommError, Group
from kfuse.comm.measurement import Measurement
from kfuse.comm.options import CommOptions
from kfuse.comm.plan import REMEDY, KeptStep, MicroBatch, Reduced, StepPlan, StepState
from kfuse.comm.reduction import Reduction
from kfuse.comm.tail import digest
from kfuse.kernels import pack

if TYPE_CHECKING:  # imported when used: `import kfuse` is quick
    from kfuse.comm.audit import AuditedGradient

_LOG = logging.getLogger("kfuse")


class Steps:
    """The steps of an engine, one after the other. `Engine` adds what is set up between them."""

    params: list[Parameter]
    """Whose gradients are reduced."""
    names: list[str]
    """Of the parameters, for messages."""
    options: CommOptions
    lane: int
    """Which of the group's lanes (`Group.lane`) is used."""
    group: Group
    """The lane of the view's group that this engine uses."""
    device: torch.device
    """Where the parameters and buckets lie."""
    buckets: list[Bucket]
    """All of them. The last one carries the tail."""
    gradient_buckets: list[Bucket]
    """The buckets that hold gradients: all, or all but the last one, which then holds averaged buffers and the tail."""
    averaged: AveragedBuffers
    """Buffers whose changes are averaged with the gradients."""
    measurement: Measurement
    """Measures the gradients and the time; writes the tail."""
    _reduction: Reduction
    _streams: devices.StreamOrder
    _hooks: GradientHooks | None = None
    _audited: AuditedGradient | None = None
    _broken: str = ""
    """Why this worker cannot continue with the others; empty: it can."""
    _now: StepState
    _gradients_set: bool = False
    """`p.grad` may have the gradients of the last step."""

    def __init__(self) -> None:
        self.step = 0
        """Steps completed."""
        self.reduced: Reduced | None = None
        """The last step's result, until the optimizer takes it."""
        self.kept: KeptStep | None = None
        """With sharded state: the last step whose gradients were all reduced, until the next one is begun."""
        self.superseded = False
        """A newer engine has taken over some of the parameters."""
        self.compared: Callable[[], tuple[Sequence[Tensor], int]] = lambda: ((), 0)
        """What else than parameters must be equal on all ranks: tensors on the device, and the `salt` of `tail.digest`.
        Called in the steps in which the ranks compare."""
        self.on_last_micro_batch: Callable[[], None] = lambda: None  # its backward is over, all buckets are launched
        self.parts = 1
        """Bare backwards that make a step, each of a loss divided by their number (`opt.accumulate`)."""
        self._warned, self._warned_of_skipping = False, False

    # -- its micro-batches ----------------------------------------------------------------------------------------

    def begin(self, plan: StepPlan) -> None:
        """Announces the coming step. Without it each worker's micro-batches are counted as they come."""
        self.kept = None
        self.abort()
        now, mine = self._now, plan.ranges[self.group.rank]
        now.plan, now.expected = plan, len(mine)
        if plan.audited is not None and plan.audited in mine:
            now.audited = mine.index(plan.audited)
        if self.options.reproducible:
            now.leaves = self._reduction.plan(plan).steps

    def open_micro_batch(self, micro_batch: MicroBatch) -> None:
        """Gradients that arrive from now on belong to this micro-batch.

        Raises RuntimeError where none may begin now, CommError where an earlier failure has made this worker's
        reductions useless to the others.
        """
        now = self._now
        if self._broken:
            raise CommError(self._broken)
        if micro_batch.several_backwards and self._still_there():
            raise RuntimeError(STILL_THERE)
        now.open(micro_batch, self.group.size, self.reduced is not None)
        self._streams.add()
        if not now.done:
            self.measurement.stopwatch.start()
        if now.plan is None and self.options.reproducible:
            self._warn_of_no_plan()
        if not now.implicit:
            if now.done:
                self.averaged.put_back()
            else:
                self.averaged.begin_step()
        for bucket in self.buckets:
            bucket.begin_micro_batch()

    def _warn_of_no_plan(self) -> None:
        """Warns once: without a plan a micro-batch has no known place in the canonical tree."""
        if self.group.rank == 0 and not self._warned:
            _LOG.warning(
                "comm.reproducible=true: the micro-batches of this loop are not planned, so the bits depend on the "
                "number of workers; kf.fit and kf.DataLoader plan them"
            )
        self._warned = True

    def _wants_gradients(self) -> bool:
        """Whether the gradient that has just arrived is this engine's to take. A bare backward opens a micro-batch."""
        current = self._now.current
        if self._audited is not None and self._audited.repeats:
            return False
        if current is None:
            if self.reduced is None and self._still_there():
                return False  # perhaps of another optimizer's loss, as in a GAN: zero_grad drops them, or step() raises
            self._begin_implicit()
            at_the_end_of_outer_backward(self._close_implicit)
        self._streams.add()
        return current is None or not current.several_backwards

    def _still_there(self) -> bool:
        """Some parameters have the gradients that the last step was made with."""
        assert self._hooks is not None
        return self._gradients_set and self.reduced is None and self._hooks.still_there()

    def _begin_implicit(self) -> None:
        """A bare `loss.backward()`, or gradients set by hand: this worker's next micro-batch of the step's `parts`."""
        now = self._now
        if (now.done and not now.implicit) or now.plan is not None:
            raise RuntimeError(f"a backward outside opt.micro_batch: {REMEDY}")
        now.implicit, now.parts = True, self.parts
        self.open_micro_batch(MicroBatch(self, 1.0, last=now.done + 1 == now.parts))

    def _close_implicit(self) -> None:
        """Backward is over."""
        current = self._now.current
        if current is None:
            return  # the backward failed, and was aborted before its callback ran
        if current.last:
            gradients.close_together(self)
        else:
            self.close_micro_batch()

    def take_gradients(self) -> None:
        """The gradients that are there without a backward, set by hand: this worker's only micro-batch of the step.

        Raises RuntimeError if the last step's are among them.
        """
        if self._still_there():
            raise RuntimeError(STILL_THERE)
        self._begin_implicit()
        self.close_micro_batch()

    def _pack(self, bucket: Bucket) -> None:
        """All gradients of this micro-batch that the bucket gets are there: into its flat buffer with them."""
        now = self._now
        self._streams.go_on_here(reads=bucket.grads)
        if bucket.missing:
            now.missed |= {i for i, grad in zip(bucket.layout.params, bucket.grads, strict=True) if grad is None}
        if now.done == now.audited:
            self.audited.take(bucket)
        flat, sumsq = bucket.slot(now.leaf.slot), self.measurement.sumsq_of[bucket.index]
        pack(bucket.grads, flat, bucket.table, scale=now.scale, accumulate=now.leaf.accumulate, sumsq=sumsq)
        bucket.grads = []
        bucket.packed = True
        if bucket is not self.buckets[-1]:
            self._complete(bucket)

    def close_micro_batch(self, then_wait: bool = True) -> None:
        """The micro-batch's backward is over: packs what is left, writes the tail, launches if it was the last."""
        now, last = self._now, self.buckets[-1]
        if now.current is None:
            return
        assert self._hooks is not None
        self._streams.go_on_here()
        for bucket in self.gradient_buckets:
            if not bucket.packed:
                self._hooks.collect_set_by_hand(bucket)
                self._pack(bucket)
        if now.plan is not None and self.params and len(now.missed) == len(self.params):
            self._warn_of_no_backward()
        if len(self.gradient_buckets) < len(self.buckets):
            self.averaged.pack(last, now.leaf, now.scale / now.parts)
        self.measurement.write(last, now, None if now.told else self._digest())
        is_last = now.current.last
        if is_last:
            self.measurement.stopwatch.stop(now.done + 1)
            self.measurement.own_part_ends()
        now.count(is_last)
        self._complete(last)
        now.current = None
        if now.implicit and not is_last:
            self.averaged.put_back()  # before the next forward, which no context announces
        if is_last and then_wait:
            self.on_last_micro_batch()

    @property
    def audited(self) -> AuditedGradient:
        """Takes the digest of a micro-batch's gradient, where the plan asks for it."""
        if self._audited is None:
            from kfuse.comm.audit import AuditedGradient  # not before it is needed: `import kfuse` is quick

            self._audited = AuditedGradient(self.params, self.gradient_buckets, self.device)
        return self._audited

    def _warn_of_no_backward(self) -> None:
        """Warns once: the samples of a micro-batch that was skipped still count."""
        if not self._warned_of_skipping:
            _LOG.warning(
                "step %d: a micro-batch ended without a backward: its samples count with a gradient of zero, in the "
                "mean and in the statistics",
                self.step,
            )
        self._warned_of_skipping = True

    def _digest(self) -> Tensor | None:
        """Of the parameters, and of what else must be equal, in a step where the ranks compare theirs."""
        every = self.options.check_every
        compared = every is not None and self.step % every == 0 and not self._now.is_local and self.group.size > 1
        if not compared:
            return None
        tensors, salt = self.compared()
        return digest([*self.params, *tensors], salt)

    # -- its reduction --------------------------------------------------------------------------------------------

    def _complete(self, bucket: Bucket) -> None:
        """The bucket has this micro-batch: merges partial sums; after the last one, launches what is due."""
        now = self._now
        assert now.current is not None
        bucket.merge(now.leaf)
        if now.current.last:
            self._reduction.launch([bucket], self.step, now.is_local)

    def finish(self) -> None:
        """Waits for all buckets; then the `mean` of each is the mean gradient over the step's samples, and `reduced`
        is set. Nothing happens if there was no backward since the last step.

        Raises CommError, and RuntimeError if the step's last micro-batch has not been run, or is being run.
        """
        now = self._now
        if now.current is not None:
            raise RuntimeError(f"opt.step() inside a micro-batch: {REMEDY}")
        if now.plan is not None and now.expected == 0 and not now.closed:
            self._contribute_nothing()
        if not now.closed:
            if now.done and now.implicit:
                raise RuntimeError(
                    f"opt.accumulate({now.parts}): opt.step() after {now.done} of {now.parts} backwards. Where the "
                    "last batches of an epoch are fewer, leave them out with opt.zero_grad(), or use opt.micro_batch"
                )
            if now.done:
                raise RuntimeError(f"opt.step() before the step's last micro-batch: {REMEDY}")
            return
        self._streams.go_on_here()
        self._streams.end()
        self._reduction.wait(now.is_local)
        self.measurement.sums_are_there(now)
        last = self.buckets[-1]
        tail = last.sum[last.body :]
        total_weight = self.measurement.total_weight(tail, now)
        self.measurement.measure(total_weight, self._reduction.measured)
        used = self.measurement.tail.flags(tail) if now.unused else None
        kept = KeptStep(self.step, now, used, last.views, total_weight)
        self.kept = kept if self.options.sharded else None
        # A worker takes part once its own shards are reduced, and the mirrored ones are here. So nobody has the result,
        # and nobody updates, before all gradients are where they are needed.
        self._reduction.share_sums(self.measurement.norms)
        self._take(kept, self.measurement.record(tail, now))
        self.step += 1
        self._reset()

    def _take(self, kept: KeptStep, record: Tensor) -> None:
        """The step's result is complete: as `reduced`, and in the averaged buffers."""
        now, last = kept.now, self.buckets[-1]
        if len(self.gradient_buckets) < len(self.buckets):
            self.averaged.apply(last.layout.params, kept.changes, kept.total_weight)
        unused = frozenset(now.unused)
        idle, planned = now.done == 0, now.plan is not None
        kept.reduced = Reduced(record, kept.used, unused, now.implicit, now.is_local, planned, idle)
        self.reduced, self._gradients_set = kept.reduced, True

    def resume(self, record: Tensor) -> None:
        """After a loss, in another group: `reduced` is the kept step's result again, for an update that some worker has
        begun. This worker updates its part, and what it mirrors; nothing is shared.

        record: as `Reduced.record`, of a worker that has it. Between `abort` and `begin`.
        """
        assert self.kept is not None, "no step is kept"
        if self.kept.reduced is None:
            self._take(self.kept, record)
        else:
            self.averaged.put_back()  # an audit that failed has undone the step's changes
            self.reduced, self._gradients_set = self.kept.reduced, True
        self.kept.resumed = True

    def update(self, update: Callable[[Bucket], None]) -> None:
        """After `finish`: calls `update` for each bucket of gradients, and shares what each worker has updated.

        Raises CommError.
        """
        kept = self.kept
        if kept is None:
            self._reduction.update(self.gradient_buckets, update)
            return
        try:
            if not kept.resumed:
                self._reduction.update(self.gradient_buckets, update)
            elif not kept.updated:
                for bucket in self.gradient_buckets:
                    update(bucket)
        except CommError:
            kept.updated = True  # it comes from a share
            raise
        kept.updated = True

    def share_sums(self, sums: Tensor, what: str) -> None:
        """As `Reduction.share_sums`, for the optimizer."""
        self._reduction.share_sums(sums, what)

    def _contribute_nothing(self) -> None:
        """This worker has no micro-batch in this step: zeros, where the transport takes one contribution from each."""
        now = self._now
        self.measurement.own_part_ends()
        self.averaged.begin_step()
        now.closed = True
        self.measurement.stopwatch.forget()
        now.unused = set(range(len(self.params)))
        if not self.options.reproducible:
            for bucket in self.buckets:
                bucket.slot(0).zero_()
            mine = self._digest()
            if mine is not None:  # with reproducible sums there is no slot to write to
                self.measurement.write_digest(self.buckets[-1], mine)
        self._reduction.launch(self.buckets, self.step, now.is_local)

    # -- where the step stands ------------------------------------------------------------------------------------

    @property
    def plan(self) -> StepPlan | None:
        """What was announced for the coming step."""
        return self._now.plan

    @property
    def begun(self) -> bool:
        """A micro-batch of the coming step has been run, or is being run."""
        return self._now.begun

    @property
    def interrupted(self) -> bool:
        """A bare backward began, and its reduction did not finish: something raised."""
        return self._now.implicit and (self._now.current is not None or self._now.closed)

    def drop(self) -> None:
        """Drops gradients that arrived since the last step, but not a micro-batch under way, nor a planned step.

        The caller takes the last step's gradients off the parameters.
        """
        if self.reduced is not None:
            self.reduced = None
            self.step -= 1  # it was no step: the next one has its number, and the check that was due
        self._gradients_set = False
        now = self._now
        unfinished = now.plan is None and now.done > 0 and now.current is None and not now.closed
        if now.implicit or unfinished:
            self.abort()

    def abort(self) -> None:
        """Drops the step under way, and unless it is `kept` its gradients. After a finished step: prepares the next."""
        now = self._now
        self._streams.go_on_here()  # buffers may be dropped, and the next step writes those that stay
        if now.begun and not now.implicit:
            self.averaged.put_back()
        if now.current is not None and now.current.several_backwards:
            for param in self.params:
                param.grad = None
        is_kept = self.kept is not None and self.kept.now is now
        if self._reduction.abandon(is_kept):
            self._broken = (
                "a step was aborted after its reduction had begun: this worker cannot continue with the others"
            )
        if is_kept:
            self.measurement.renew()
        self.reduced = None
        self._reset()

    def _reset(self) -> None:
        self._now = StepState()
        self._reduction.reset()

    def close(self) -> None:
        """Removes the hooks: gradients stay in `p.grad`. Those of a step that the optimizer has made are dropped."""
        if self._hooks is not None:
            self._hooks.close(drop=self.reduced is None)
