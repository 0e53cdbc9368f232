"""An engine reduces the gradients of some parameters to their mean over the workers of a group, step after step.

1) Hooks take gradients as backward has computed them. When a bucket has all of a micro-batch's gradients one kernel
   (`pack`) reads them once: into the flat buffer, scaled by the micro-batch's weight, with the sum of squares of this
   micro-batch's own gradient.
2) After the step's last micro-batch the bucket's reduction starts while backward goes on (`executor`). Buckets start in
   index order on every rank; the tail is the end of the last one.
3) `finish` waits for all of them, and sets each `p.grad`. The optimizer takes the step, and updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kfuse.comm import gradients
from kfuse.comm.buckets import Bucket, BucketLayout
from kfuse.comm.gradients import STILL_THERE, without_grad
from kfuse.comm.group import CommError
from kfuse.comm.hooks import BucketHooks
from kfuse.comm.parts import EngineParts
from kfuse.comm.step import REMEDY, MicroBatch, Phase, Step, StepPlan
from kfuse.comm.sum_tree import ADD, WRITE
from kfuse.kernels import pack


class Engine(EngineParts):
    """Runs the steps of its parts."""

    # commit(engine, step): in place of `_reduced`, where a worker has several processes: they take a step together.
    commit: Callable[[Any, Step], Tensor] | None = None

    @property
    def skips_on_device(self) -> bool:
        """Whether the optimizer leaves parameters alone where the device says so, and the host need not ask it."""
        return False

    def _build(
        self, layouts: Sequence[BucketLayout], buffers: Mapping[str, Tensor], summed: Sequence[Tensor] = ()
    ) -> None:
        super()._build(layouts, buffers, summed)
        try:
            for bucket in self.gradient_buckets:
                acts = self._wants_gradient, lambda: not self.now.implicit, self.pack
                self.hooks.append(BucketHooks(bucket, self.names, self.streams if self.on_gpu else None, *acts))
                self.hooks[-1].watch()
        except BaseException:  # by Ctrl-C: nobody has these hooks to remove them
            self.close()
            raise

    # -- micro-batches --------------------------------------------------------------------------------------------

    def begin(self, plan: StepPlan) -> None:
        """Announces the coming step. Without it each worker's micro-batches are counted as they come."""
        self.last = None
        if self.now.begun or self.now.closed or self.now.implicit:
            self.abort()
        else:
            self.executor.reset()
        self.now.plan, self.now.mine = plan, plan.ranges[self.group.rank]
        self.now.is_local, self.now.weights_are_known = plan.local is not None, not plan.by_weight
        if self.options.reproducible:
            self.now.leaves = self.executor.plan_sums(plan).steps

    def open(self, micro_batch: MicroBatch) -> None:
        """Gradients that arrive from now on belong to this micro-batch.

        Raises RuntimeError where none may begin now, CommError where an earlier failure has made this worker's
        reductions useless to the others.
        """
        now = self.now
        if self.executor.failed is not None and self.commit is None:  # which tells all of them
            raise CommError(self.executor.failed)
        if micro_batch.several_backwards and self._still_there():
            raise RuntimeError(STILL_THERE)
        untaken = now.plan is None and self.reduced is not None
        if untaken and now.implicit:
            self.take()  # autograd has added to it already, so that it is no mean any more: a step refuses it
        now.refuse_to_open(untaken)
        now.current, on_gpu = micro_batch, self.on_gpu
        micro_batch.leaf = now.leaves[now.done] if now.leaves is not None else ADD if now.done else WRITE
        if now.implicit:
            micro_batch.scale = 1.0 / self.group.size
        elif now.plan is not None and now.weights_are_known:
            micro_batch.scale = micro_batch.weight / (now.plan.local or now.plan.samples)
        else:
            micro_batch.scale = float(micro_batch.weight)
        if on_gpu:
            self.streams.add()
        now.alone = self.group.size == 1 and micro_batch.last and not (now.done or on_gpu) and micro_batch.scale == 1.0
        if not now.done:
            self.measurement.stopwatch.start()
            if now.plan is None:
                self.executor.reset()
        if self.averaged.tensors and not now.implicit:
            if now.done:
                self.averaged.put_back()
            else:
                self.averaged.begin_step()
        for bucket in self.buckets:
            bucket.begin_micro_batch()
        if now.plan is None and self.options.reproducible and self.group.rank == 0:
            self.warn_once(
                "comm.reproducible=true: the micro-batches of this loop are not planned, so the bits depend on the "
                "number of workers; kf.fit and kf.DataLoader plan them"
            )

    def _wants_gradient(self) -> bool:
        """Whether to take the gradient that has just arrived. A bare backward opens a micro-batch."""
        if self.audited is not None and self.audited.repeats:
            return False
        if (current := self.now.current) is None:
            if not self.bare_backwards or (self.reduced is None and self._still_there()):
                return False  # perhaps of another optimizer's loss, as in a GAN: zero_grad drops them, or step() raises
            self._begin_implicit()
            gradients.at_the_end_of_outer_backward(self._close_implicit)
        if self.on_gpu:
            self.streams.add()
        return current is None or not current.several_backwards

    def _still_there(self) -> bool:
        """Some parameters have the gradients that the last step was made with."""
        last = self.last
        return last is not None and last.phase == Phase.TAKEN and bool(gradients.shown(self.gradient_buckets))

    def _begin_implicit(self) -> None:
        """A bare `loss.backward()`, or gradients set by hand: this worker's next micro-batch of the step's `parts`."""
        now = self.now
        if not self.bare_backwards:
            raise RuntimeError("opt.step() with gradients of no pass of its optimizer: see step.micro_batches(opt)")
        if (now.done and not now.implicit) or now.plan is not None:
            raise RuntimeError(f"a backward outside opt.micro_batch: {REMEDY}")
        now.implicit, now.weights_are_known = True, True
        now.parts, now.mine = self.parts, range(self.parts)
        for hooks in self.hooks:
            if hooks.are_few:
                hooks.watch()
        self.open(MicroBatch(1.0, last=now.done + 1 == self.parts))

    def _close_implicit(self) -> None:
        """The backward is over. All engines that took part start their last messages; then each waits for its own, in
        the same order on every rank: a reduction may have several phases, and an engine moves on to the next as it
        waits.
        """
        current = self.now.current
        if current is None:
            return  # the backward failed, and was aborted before its callback ran
        try:
            self._close_micro_batch()
        except BaseException:
            _CLOSED.clear()
            raise
        if current.last:
            _CLOSED.append(self)
            gradients.at_the_end_of_backward(_finish_closed)

    def take_gradients(self) -> None:
        """Makes gradients that were set by hand this worker's only micro-batch of the step. Raises RuntimeError if the
        last step's are among them.
        """
        if self._still_there():
            raise RuntimeError(STILL_THERE)
        self._begin_implicit()
        self.close_micro_batch()

    @without_grad
    def close_micro_batch(self) -> None:
        """Ends the micro-batch under way. After the step's last one `finish` is called."""
        if (current := self.now.current) is None:
            return
        self._close_micro_batch()
        if current.last:
            self.finish()

    def _close_micro_batch(self) -> None:
        """Packs what is left after the micro-batch's backward, writes the tail, launches if it was the last.

        Raises RuntimeError if the plan has more micro-batches than were run.
        """
        now, last = self.now, self.buckets[-1]
        current = now.current
        assert current is not None
        if self.on_gpu:
            self.streams.go_on_here()
        for hooks in self.hooks:
            hooks.take_rest()
        if now.plan is not None and current.missed and len(current.missed) == len(self.params):
            self.warn_once(
                "step %d: a micro-batch ended without a backward: its samples count with a gradient of zero, in the "
                "mean and in the statistics",
                self.step,
            )
        if self.averaged.tensors:
            self.averaged.pack(last, current.leaf, current.scale / now.parts)
        last.slot(current.leaf.slot)  # makes it, if it is not there
        self.measurement.write(last.tails[current.leaf.slot], now, current)
        if current.last:
            self.measurement.stopwatch.stop(now.done + 1)
            now.phase = Phase.CLOSED
        now.weight += current.weight
        now.unused = now.unused & current.missed if now.done else current.missed
        now.done += 1
        if current.last and now.mine is not None and len(now.mine) != now.done:
            raise RuntimeError(f"the plan has {len(now.mine)} micro-batches for this worker: {now.done} were run")
        self._complete(last, current)
        now.current = None
        if now.implicit and not current.last:
            self.averaged.put_back()  # before the next forward, which no context announces

    def pack(self, bucket: Bucket) -> None:
        """Packs the micro-batch's gradients of a bucket."""
        now, current = self.now, self.now.current
        assert current is not None
        if self.on_gpu:
            self.streams.go_on_here(reads=bucket.grads)
        now.had_graph |= bucket.grads[0] is not None and bucket.grads[0].requires_grad
        if bucket.missing:
            current.missed |= {i for i, grad in zip(bucket.layout.params, bucket.grads, strict=True) if grad is None}
        if self.audited is not None and now.plan is not None and now.mine and now.mine[now.done] == now.plan.audited:
            self.audited.take(bucket)
        if now.alone and not bucket.missing and not torch.is_grad_enabled():
            torch._foreach_copy_(bucket.places, bucket.grads)  # type: ignore[arg-type]
        else:
            sends = current.last and not now.is_local
            given = bucket.packing(current.leaf.slot, current.leaf.accumulate, sends)
            given.grads, given.scale, given.stored = bucket.grads, current.scale, bucket.stored
            try:
                pack.run(given)
            finally:
                given.grads = ()
        bucket.grads = []  # they go before the bucket's messages begin
        if bucket is not self.buckets[-1]:
            self._complete(bucket, current)

    def _complete(self, bucket: Bucket, current: MicroBatch) -> None:
        for destination, source in current.leaf.merges:
            bucket.slot(destination).add_(bucket.slot(source))
        if current.last and not (bucket is self.buckets[-1] and self._tail_waits):
            self.executor.launch([bucket], self.step, self.now.is_local)

    @property
    def _tail_waits(self) -> bool:
        """With sharded state the last bucket, of buffers and tail, travels with the sums of squares: not where the
        weights' sum is needed before them, nor where each contribution is added up in its place.
        """
        options = self.options
        return options.sharded and not options.reproducible and self.now.weights_are_known and self.group.size > 1

    # -- the reduction and the update -----------------------------------------------------------------------------

    def finish(self) -> None:
        """Waits for all buckets; then the `mean` of each is the mean gradient over the step's samples, each `p.grad` is
        set to it, and the step is `reduced`. Nothing happens if there was no backward since the last step.

        Raises CommError, and RuntimeError if the step's last micro-batch has not been run, or is being run.
        """
        now = self.now
        if now.mine is not None and not now.mine and not now.closed:
            self._contribute_nothing()
        now.refuse_to_end()
        if not now.closed:
            return
        if self.on_gpu:
            self.streams.go_on_here()
            self.streams.end()
        # Nothing is changed by the step yet.
        self._complete_step(now, self._reduced(now) if self.commit is None else self.commit(self, now))
        if self._first_steps:
            self._first_steps -= 1
            if not self._first_steps:  # the first update may compile too: the second step's messages wait for it
                self.group.first_steps.discard(self)
        self.step += 1
        self.now = Step()

    def over_ranks(self, total: Tensor) -> Tensor:
        """Returns a sum over this process's gradients as one over all that its worker has."""
        return total

    def _reduced(self, now: Step) -> Tensor:
        """Waits for all buckets, measures them, and returns the step's record. Raises CommError."""
        last = self.buckets[-1]
        self.executor.wait()
        now.number, now.phase = self.step, Phase.SUMMED
        if self.options.sharded or now.unused or not now.weights_are_known:  # else nobody reads it
            now.tail = last.sum[last.body :]
        several = self.group.size > 1
        self.measurement.measure(self.measurement.total_weight(now), self.executor.measured if several else ())
        now.changes = last.view(last.mean) if self.averaged.tensors else ()
        self.last = now
        if several:
            # A worker takes part once its own shards are reduced, and the mirrored ones are here. So nobody has the
            # result, and nobody updates, before all gradients are where they are needed.
            self.executor.share_sums(self.measurement.norms, *([last.sum] if self._tail_waits else []))
            now.differs = self._workers_differ()
        return self.measurement.record(last.tails[0], now)

    def compared(self) -> tuple[Sequence[Tensor], int]:
        """Returns what must be equal on all workers beside the parameters: tensors on the device, and a salt for the
        digest of all.
        """
        return (), 0

    def _workers_differ(self) -> bool:
        """Whether what must be equal on all ranks is not, in a step in which they compare it. The host waits for the
        device then. Here, since of several optimizers the messages of each step need one order on all ranks. Raises
        CommError.
        """
        every = self.options.check_every
        if every is None or self.step % every or self.now.is_local:
            return False
        from kfuse.comm.digest import digest  # one worker alone does not need it

        tensors, salt = self.compared()
        mine = digest([*self.params, *tensors], salt).reshape(1).to(self.group.device)
        found = torch.stack(self.group.all_gather(mine, f"step {self.step}, digests of the parameters"))
        return bool((found != found[0]).any())

    def _contribute_nothing(self) -> None:
        """Sends zeros, where the plan has no micro-batch for this worker. With reproducible sums there is no slot to
        write to.
        """
        self.averaged.begin_step()
        self.measurement.stopwatch.forget()
        self.now.phase, self.now.unused = Phase.CLOSED, set(range(len(self.params)))
        if not self.options.reproducible:
            for bucket in self.buckets:
                bucket.slot(0).zero_()
                if bucket.message is not None:
                    bucket.message.zero_()
        launched = self.gradient_buckets if self._tail_waits else self.buckets
        self.executor.launch(launched, self.step, self.now.is_local)

    def _complete_step(self, step: Step, record: Tensor) -> None:
        """The step is reduced. record: see `Step`."""
        if self.averaged.tensors:
            self.averaged.apply(self.buckets[-1].layout.params, step.changes, self.measurement.total_weight(step))
        step.record, step.phase = record, Phase.REDUCED
        self._find_unused(step)
        gradients.show(self.gradient_buckets, step.left_out)

    def _find_unused(self, step: Step) -> None:
        """Finds the parameters that no worker gave a gradient: they keep no `.grad`, but for those in doubt.

        In doubt is, on a GPU with several workers, what this worker gave none: only the device knows whether another
        one did. An optimizer that can leave a parameter alone on the device takes zeros for it; else the host waits.
        """
        step.in_doubt, step.left_out = set(), set(step.unused)
        if not step.unused or (self.group.size == 1 and not step.resumed):  # resumed: of a group of several
            return
        if self.on_gpu and self.skips_on_device:
            step.in_doubt, step.left_out = step.left_out, set()
        else:
            counts = step.tail[: len(self.params)].tolist()
            step.left_out = {index for index, count in enumerate(counts) if count == 0}

    def updates(self, parameters: Sequence[Tensor]) -> Iterator[Bucket]:
        """After `finish`: yields each bucket of gradients for its update, and shares what each worker has updated.

        parameters: of each bucket, [body] in their dtype. Raises CommError, once all buckets are updated.
        """
        step = self.last
        assert step is not None
        try:
            if not step.resumed:
                yield from self.executor.updates(self.gradient_buckets, parameters)
            elif step.phase < Phase.UPDATED:
                yield from self.gradient_buckets
        except CommError:
            step.phase = Phase.UPDATED
            raise
        step.phase = Phase.UPDATED

    def resume(self, record: Tensor, tail: Tensor, changes: Sequence[Tensor]) -> Step:
        """After a loss, in another group: returns the last step, for an update that some worker has begun. This worker
        updates its part, and what it mirrors; nothing is shared.

        record, tail and changes: as in `Step`, of a worker that has them. Between `abort` and `begin`.
        """
        step = self.last
        assert step is not None, "no step is kept"
        step.resumed = True
        if step.record is None:  # the message with its tail did not arrive here
            step.tail, step.changes = tail, changes
            self._complete_step(step, record)
            step.phase = Phase.TAKEN
        else:
            self.averaged.put_back()  # an audit that failed has undone the step's changes
            self._find_unused(step)
            step.record = record
        return step

    # -- where the step stands ------------------------------------------------------------------------------------

    @property
    def interrupted(self) -> bool:
        """A bare backward began, and its reduction did not finish: something raised."""
        return self.now.implicit and (self.now.current is not None or self.now.closed)

    def drop(self) -> None:
        """Drops gradients that arrived since the last step, but not a micro-batch under way, nor a planned step.

        The caller takes the last step's gradients off the parameters.
        """
        if self.take() is not None:
            self.step -= 1  # it was no step: the next one has its number, and the check that was due
        if not self.options.sharded:
            self.last = None
        now = self.now
        unfinished = now.plan is None and now.done > 0 and now.current is None and not now.closed
        if now.implicit or unfinished:
            self.abort()

    def abort(self) -> None:
        """Drops the step under way, and what the last one brought. With sharded state `last` stays."""
        now = self.now
        if self.on_gpu:
            self.streams.go_on_here()  # buffers may be dropped, and the next step writes those that stay
        if now.begun and not now.implicit:
            self.averaged.put_back()
        if now.current is not None:
            for param in self.params:  # what has not been taken
                param.grad = None
        is_kept = self.options.sharded and self.last is now
        if (now.begun or now.closed) and self.executor.abandon(is_kept):
            self.measurement.renew()
        if self.last is now and not is_kept:
            self.last = None
        self.take()
        self.executor.reset()
        self.now = Step()

    def take(self) -> Step | None:
        """Returns the last step, if its result was not taken before: from now on it is."""
        if (last := self.last) is None or last.phase is not Phase.REDUCED:
            return None
        last.phase = Phase.TAKEN
        return last


_CLOSED: list[Engine] = []  # whose bare backward is over, and whose last messages have started


def _finish_closed() -> None:
    engines = sorted(_CLOSED, key=lambda engine: engine.lane)
    _CLOSED.clear()
    for engine in engines:
        engine.finish()
