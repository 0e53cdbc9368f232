"""The reduction engine: from backward's gradients to their mean over all workers, bucket by bucket, during backward.

1) Hooks take over each parameter's fresh gradient (`gradients`).
2) When a bucket has all of its gradients one kernel (`pack`) reads them once: into the flat buffer, scaled by the
   micro-batch's weight, with the sum of squares of this micro-batch's own gradient.
3) After the step's last micro-batch the bucket's reduction starts while backward goes on. Buckets start in index order
   on every rank; the tail is the end of the last one.
4) `finish` waits for all of them and measures the mean gradient.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from kfuse.comm import devices, gradients, transports
from kfuse.comm.buckets import AveragedBuffers, Bucket, make_buckets, plan_parameters
from kfuse.comm.gradients import STILL_THERE, GradientHooks, at_the_end_of_outer_backward
from kfuse.comm.group import CommError, Group
from kfuse.comm.measurement import Measurement
from kfuse.comm.plan import REMEDY, CommOptions, MicroBatch, Reduced, StepPlan, StepState
from kfuse.comm.reduction import Reduction
from kfuse.comm.tail import digest
from kfuse.kernels import pack

_LOG = logging.getLogger("kfuse")


class Engine:
    """Reduces the gradients of `groups` (lists of parameters that may share a bucket) over a `group` of workers."""

    buckets: list[Bucket]
    """All of them. The last one carries the tail."""
    gradient_buckets: list[Bucket]
    """The buckets that hold gradients: all, or all but the last one, which then holds averaged buffers and the tail."""
    measurement: Measurement
    """Measures the gradients and the time; writes the tail."""
    group: Group
    """The lane of the view's group that this engine uses."""
    device: torch.device
    """Where the parameters and buckets lie."""
    transport_name: str
    """A name in `transports.NAMES`, or the dotted path of the user's class."""

    def __init__(
        self,
        groups: Sequence[Sequence[Parameter]],
        group: Group,
        options: CommOptions,
        names: Sequence[str] | None = None,
        lane: int = 0,
    ) -> None:
        """names: of the parameters, for error messages. lane: which of the group's lanes (`Group.lane`) to use.

        Raises ValueError for parameters that are not dense, fp32 or bf16, and on one device.
        """
        self.options, self.lane = options, lane
        self.params = [p for params in groups for p in params]
        self.names = list(names) if names is not None else [f"parameter {i}" for i in range(len(self.params))]
        gradients.check_parameters(self.params, self.names)
        kinds = [index for index, params in enumerate(groups) for _ in params]
        capacity = max(1, int(options.bucket_mb * 2**20 / 4))
        self._layouts = plan_parameters(self.params, kinds, capacity)
        self.step = 0
        """Steps completed."""
        self.reduced: Reduced | None = None
        """The last step's result, until the optimizer takes it."""
        self.superseded = False
        """A newer engine has taken over some of the parameters."""
        self.digest_salt: Callable[[], int] = int
        """What else than parameters must be equal on all ranks (learning rates), as a number: see `tail.digest`."""
        self.on_first_micro_batch: Callable[[], None] = lambda: None  # once, before anything else happens
        self.on_last_micro_batch: Callable[[], None] = lambda: None  # its backward is over, all buckets are launched
        self.averaged = AveragedBuffers([])
        """Buffers whose changes are averaged with the gradients."""
        self._hooks: GradientHooks | None = None
        self.parts = 1
        """Bare backwards that make a step, each of a loss divided by their number (`opt.accumulate`)."""
        self.figures = 0
        """Slots of the tail for a step function's figures."""
        self._new, self._warned, self._warned_of_skipping = True, False, False
        self._digests: dict[int, Tensor] = {}  # by bucket, of the audited micro-batch of this worker
        self._repeats = False  # the backward under way is that of `digest_again`
        self.topology: str | None = None
        """The transport that a decision chose; None: the configured one."""
        self.tree: str | None = None
        """The shape that a decision chose for the transport `tree`; None: the configured one."""
        self._build()
        self.set_group(group)

    # -- set-up ---------------------------------------------------------------------------------------------------

    def track_buffers(self, buffers: Sequence[Tensor]) -> None:
        """Averages the changes of these (BatchNorm's running statistics) over the step's micro-batches, by samples."""
        self.averaged = AveragedBuffers(buffers)
        self._build()
        self.set_group(self.group)

    def carry_figures(self, count: int) -> None:
        """Between steps: so many numbers of each micro-batch are averaged with its loss (`MicroBatch.figures`)."""
        if count != self.figures:
            self.figures = self.measurement.figures = count
            self.set_group(self.group)

    def _build(self) -> None:
        """Makes buckets, partial sums and hooks. The last bucket carries the tail.

        With averaged buffers or bf16 messages it has no gradients: only the buffers and the tail, which need fp32.
        """
        gradients.check_owner(self)
        self.close()
        buffers = self.averaged.tensors
        apart = bool(buffers) or self.options.dtype != "fp32"
        self.buckets = make_buckets(self._layouts, self.params, buffers if apart else None)
        self.gradient_buckets = self.buckets[: len(self._layouts)]
        self.device = self.params[0].device if self.params else torch.device("cpu")
        self._streams = devices.StreamOrder(devices.of(self.device))
        self.measurement = Measurement(self.gradient_buckets, len(self.params), self.device)
        self.measurement.figures = self.figures
        gradients.take_over(self.params, self)
        self._hooks = GradientHooks(self.params, self.names, self.gradient_buckets, self._wants_gradients, self._pack)
        self._gradients_set = False

    def use_transport(self, topology: str | None, tree: str | None) -> None:
        """Between steps: goes on with another transport or tree (None: as configured).

        Where nothing changes nothing happens: a step that another training has begun goes on.
        """
        if (topology, tree) != (self.topology, self.tree):
            self.topology, self.tree = topology, tree
            self.set_group(self.group)

    def set_group(self, group: Group) -> None:
        """Between steps: goes on with other workers. Raises ValueError if devices differ."""
        if group.size > 1 and devices.of(group.device).name != self.device:
            raise ValueError(f"parameters lie on {self.device}, this worker's device is {group.device}: move the model")
        self.group = group.lane(self.lane)
        self.transport_name = self.topology or transports.choose(self.options.schedule, self.options.reproducible)
        made = transports.make(self.transport_name, self.group, self.tree or self.options.tree)
        on_host = self.options.slots_on_host and devices.of(self.device).asynchronous
        self._reduction = Reduction(self.buckets, self.group, made, self.options.dtype, on_host)
        self.measurement.set_group(group.rank, group.size)
        if self.buckets[-1].tail != (numel := self.measurement.tail.numel):
            self.buckets[-1].renew(numel)
        self._broken = ""
        self._reset()

    def close(self) -> None:
        """Removes the hooks: gradients stay in `p.grad`. Those of a step that the optimizer has made are dropped."""
        if self._hooks is not None:
            self._hooks.close(drop=self.reduced is None)

    # -- a step's micro-batches -----------------------------------------------------------------------------------

    def begin(self, plan: StepPlan) -> None:
        """Announces the coming step. Without it each worker's micro-batches are counted as they come."""
        self.abort()
        now = self._now
        mine = plan.ranges[self.group.rank]
        now.plan, now.expected = plan, len(mine)
        if plan.audited is not None and plan.audited in mine:
            now.audited = mine.index(plan.audited)
        if self.options.reproducible:
            now.leaves = self._reduction.plan(plan)

    def open_micro_batch(self, micro_batch: MicroBatch) -> None:
        """Gradients that arrive from now on belong to this micro-batch.

        Raises RuntimeError where none may begin now, CommError where an earlier failure has made this worker's
        reductions useless to the others.
        """
        now = self._now
        if self._new:
            self.on_first_micro_batch()
            self._new = False
        if self._broken:
            raise CommError(self._broken)
        now.open(micro_batch, self.group.size, self.reduced is not None)
        self._streams.add()
        if micro_batch.several_backwards and self._still_there():
            raise RuntimeError(STILL_THERE)
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
        if self._repeats:
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
            self._digests[bucket.index] = self._digest_of(bucket.grads)
        bucket.save(now.leaf)
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
            last.save(now.leaf)
            self.averaged.pack(last, now.leaf, now.scale / now.parts)
        self.measurement.write(last, now, self._digest() if now.done == 0 else None)
        is_last = now.current.last
        if is_last:
            self.measurement.stopwatch.stop(now.done + 1)
        now.count(is_last)
        self._complete(last)
        now.current = None
        if now.implicit and not is_last:
            self.averaged.put_back()  # before the next forward, which no context announces
        if is_last and then_wait:
            self.on_last_micro_batch()

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
        """Of the parameters and rates, in a step where the ranks compare theirs."""
        every = self.options.check_every
        compared = every is not None and self.step % every == 0 and not self._now.is_local and self.group.size > 1
        return digest(self.params, self.digest_salt()) if compared else None

    # -- an audit -------------------------------------------------------------------------------------------------

    def gradient_digest(self) -> Tensor:
        """The digest of the gradients of the plan's audited micro-batch, as backward produced them on this worker.

        int64 scalar on the device, without a wait. Once that micro-batch is over, until the next step begins.
        """
        digests = [self._digests[bucket.index] for bucket in self.gradient_buckets]
        self._keep_here(digests)  # forwards on other streams have their hooks there
        return digest([torch.stack(digests)])

    def digest_again(self, backward: Callable[[], object]) -> Tensor:
        """Runs the backward of a micro-batch that is not part of this worker's step; returns its `gradient_digest`.

        Its gradients are left in `p.grad`, which must be None before, and reach no bucket. Between micro-batches.
        """
        self._repeats = True
        try:
            backward()
        finally:
            self._repeats = False
        grads = [
            [None if (grad := self.params[i].grad) is None else bucket.laid_out(k, grad) for k, i in enumerate(indices)]
            for bucket in self.gradient_buckets
            for indices in [bucket.layout.params]
        ]
        self._keep_here([grad for each in grads for grad in each if grad is not None])
        return digest([torch.stack([self._digest_of(each) for each in grads])])

    def _keep_here(self, tensors: Sequence[Tensor]) -> None:
        """The current stream reads these, whose memory may be another stream's."""
        device = devices.of(self.device)
        device.keep(tensors, device.current_stream())

    def _digest_of(self, grads: Sequence[Tensor | None]) -> Tensor:
        return digest([grad for grad in grads if grad is not None]).to(self.device)

    # -- its reduction --------------------------------------------------------------------------------------------

    def _complete(self, bucket: Bucket) -> None:
        """The bucket has this micro-batch: merges partial sums; after the last one, launches what is due."""
        now = self._now
        assert now.current is not None
        bucket.merge(now.leaf)
        if now.current.last:
            self._reduction.launch([bucket], self.step, now.is_local)

    def finish(self) -> None:
        """Waits for all buckets; then slot 0 of each holds the mean gradient over the step's samples, and `reduced`
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
        last = self.buckets[-1]
        tail = last.slots[0][last.body :]
        total_weight = self.measurement.total_weight(tail, now)
        record = self.measurement.record(tail, now, total_weight)
        if len(self.gradient_buckets) < len(self.buckets):
            self.averaged.apply(last, total_weight)
        used = self.measurement.tail.flags(tail) if now.unused else None
        self.reduced = Reduced(record, used, frozenset(now.unused), now.implicit, now.is_local, now.plan is not None)
        self._gradients_set = True
        self.step += 1
        self._reset()

    def _contribute_nothing(self) -> None:
        """This worker has no micro-batch in this step: zeros, where the transport takes one contribution from each."""
        self.measurement.stopwatch.forget()
        self.averaged.begin_step()
        if not self.options.reproducible:
            for bucket in self.buckets:
                bucket.slots[0].zero_()
        self._now.closed, self._now.unused = True, set(range(len(self.params)))
        self._reduction.launch(self.buckets, self.step, self._now.is_local)

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
        """Drops the step under way, with its gradients. After a finished step: prepares for the next."""
        now = self._now
        self._streams.go_on_here()  # buffers may be dropped, and the next step writes those that stay
        if now.begun and not now.implicit:
            self.averaged.put_back()
        if now.current is not None and now.current.several_backwards:
            for param in self.params:
                param.grad = None
        if self._reduction.abandon():
            self._broken = (
                "a step was aborted after its reduction had begun: this worker cannot continue with the others"
            )
        self.reduced = None
        self._reset()

    def _reset(self) -> None:
        self._now = StepState()
        self._reduction.reset()
