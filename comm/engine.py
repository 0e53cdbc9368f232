"""The reduction engine: from backward's gradients to their mean over all workers, bucket by bucket, as they come.

Post-accumulate hooks collect each parameter's fresh gradient. When a bucket has all of its gradients one kernel
(`pack`) reads them once: into the flat buffer, scaled by the micro-batch's weight, with the sum of squares of this
micro-batch's own gradient. After the step's last micro-batch the bucket's reduction starts while backward goes on.
Buckets start in index order on every rank; the tail rides at the end of the last one.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakTensorKeyDictionary

from kfuse.comm import tail as t
from kfuse.comm import transports
from kfuse.comm.averaged_buffers import AveragedBuffers
from kfuse.comm.buckets import Bucket, BucketLayout, plan_buckets
from kfuse.comm.group import CommError, Group
from kfuse.comm.plan import REMEDY, CommOptions, MicroBatch, Reduced, StepPlan, StepState
from kfuse.comm.sum_tree import LeafStep, plan_merges, plan_range
from kfuse.comm.timer import Stopwatch
from kfuse.kernels import block_sumsq, num_blocks, pack, sum_partials

_LOG = logging.getLogger("kfuse")


class Engine:
    """Reduces the gradients of `groups` (lists of parameters that may share a bucket) over a `group` of workers."""

    def __init__(
        self,
        groups: Sequence[Sequence[Parameter]],
        group: Group,
        options: CommOptions,
        names: Sequence[str] | None = None,
        lane: int = 0,
    ) -> None:
        """`names`: what messages call each parameter. `lane`: which of the group's to use, one for each engine.

        Raises ValueError for parameters that are not dense fp32 on one device.
        """
        self.options = options
        self.params = [p for params in groups for p in params]
        self.names = list(names) if names is not None else [f"parameter {i}" for i in range(len(self.params))]
        _check_parameters(self.params, self.names)
        kinds = [index for index, params in enumerate(groups) for _ in params]
        capacity = max(1, int(options.bucket_mb * 2**20 / 4))
        self._layouts = plan_buckets([p.numel() for p in self.params], kinds, capacity)
        self.lane = lane
        self.step = 0
        self.reduced: Reduced | None = None
        """The last step's result, until the optimizer takes it."""
        self.digest_salt: Callable[[], int] = int
        """What else than parameters must be equal on all ranks (learning rates), as a number: see `tail.digest`."""
        self.on_first_micro_batch: Callable[[], None] = lambda: None  # once, before anything else happens
        self.on_last_micro_batch: Callable[[], None] = lambda: None  # its backward is over, all buckets are launched
        self.averaged = AveragedBuffers([])
        """Buffers whose changes are averaged with the gradients."""
        self._warned = False
        self.of_params: list[Bucket] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self.superseded = False
        """A newer engine has some of the parameters."""
        self._new = True
        self.topology: str | None = None
        """The transport that a decision chose; None: the configured one."""
        self.tree: str | None = None
        """The same of the shape of transport `tree`."""
        self._build()
        self.set_group(group)

    # -- set-up ---------------------------------------------------------------------------------------------------

    def track_buffers(self, buffers: Sequence[Tensor]) -> None:
        """Averages the changes of these (BatchNorm's running statistics) over the step's micro-batches, by samples."""
        self.averaged = AveragedBuffers(buffers)
        self._build()
        self.set_group(self.group)

    def _build(self) -> None:
        """Buckets, partial sums and hooks. The last bucket carries the tail; buffers and a 16-bit wire need it fp32."""
        self.check_owner()
        self.close()
        tail = len(self.params) + t.TAIL_SLOTS  # and RANK_SLOTS for each rank, once the group is known
        buffers = self.averaged.tensors
        separate = bool(buffers) or self.options.dtype != "fp32" or not self._layouts
        count = len(self._layouts) + separate
        self.buckets = [
            Bucket(i, layout, self.params, 0 if i < count - 1 else tail, f"bucket {i + 1} of {count}")
            for i, layout in enumerate(self._layouts)
        ]
        if separate:
            [layout] = plan_buckets([b.numel() for b in buffers], [0] * len(buffers), 2**62) or [
                BucketLayout((), (), 0)
            ]
            self.buckets.append(Bucket(count - 1, layout, buffers, tail, f"bucket {count} of {count}"))
        self.of_params = self.buckets[: len(self._layouts)]
        self._device = self.params[0].device if self.params else torch.device("cpu")
        chunks = [b.table.num_chunks for b in self.of_params]
        blocks = [num_blocks(b.body) for b in self.of_params]
        self._sumsq = torch.zeros(sum(chunks), device=self._device)
        self._norms = torch.zeros(sum(blocks), device=self._device)
        self._sumsq_of = dict(enumerate(torch.split(self._sumsq, chunks))) if chunks else {}
        self._norms_of = dict(enumerate(torch.split(self._norms, blocks))) if blocks else {}
        self._stopwatch = Stopwatch(self._device)
        self._total = torch.zeros((), dtype=torch.float64, device=self._device)
        self._wire: dict[int, list[Tensor]] = {}
        for bucket in self.of_params:
            for position, index in enumerate(bucket.layout.params):
                self._own(self.params[index])
                register = self.params[index].register_post_accumulate_grad_hook
                self._handles.append(register(self._hook(bucket, position, index)))  # type: ignore[no-untyped-call]

    def use_transport(self, topology: str | None, tree: str | None) -> None:
        """Between steps: goes on with another transport or tree (None: as configured).

        Where nothing changes nothing happens: a step that another training has begun goes on.
        """
        if (topology, tree) != (self.topology, self.tree):
            self.topology, self.tree = topology, tree
            self.set_group(self.group)

    def set_group(self, group: Group) -> None:
        """Between steps: goes on with other workers. Raises ValueError if devices differ."""
        if group.size > 1 and group.device.type != self._device.type:
            raise ValueError(
                f"parameters lie on {self._device}, this worker's device is {group.device}: move the model"
            )
        name = self.topology or transports.choose(self.options.schedule, self.options.reproducible)
        group = group.lane(self.lane)
        self.group, self.transport_name = group, name
        last, tail = self.buckets[-1], len(self.params) + t.TAIL_SLOTS + t.RANK_SLOTS * group.size
        if last.tail != tail:
            last.renew(tail)
        self._transport = transports.make(name, group, self.tree or self.options.tree)
        self._broken = ""
        self._reset()

    def close(self) -> None:
        """Removes the hooks; gradients go where autograd leaves them. Those of a step that was taken are dropped."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for bucket in self.of_params if self.reduced is None else ():
            for index, view in zip(bucket.layout.params, bucket.views, strict=True):
                if self.params[index].grad is view:
                    self.params[index].grad = None

    def _own(self, parameter: Parameter) -> None:
        """A parameter has one engine: with two, the first to be asked would take the gradient from the other."""
        other = owner(parameter)
        if other is not None and other is not self:
            other.close()
            other.superseded = True
        _OWNERS[parameter] = weakref.ref(self)

    def check_owner(self) -> None:
        """Raises RuntimeError if a newer engine has taken parameters over: this one's would no longer be trained."""
        if self.superseded:
            raise RuntimeError(
                "parameters of this optimizer belong to a newer kfuse optimizer, which was made over the same "
                "parameters: use that one (or call rebuild() on this one, which takes them back)"
            )

    # -- a step ---------------------------------------------------------------------------------------------------

    def begin(self, plan: StepPlan) -> None:
        """Announces the coming step. Without it each worker's micro-batches are counted as they come."""
        self.abort()
        now = self._now
        now.plan, now.expected = plan, len(plan.ranges[self.group.rank])
        if self.options.reproducible:
            ranges = [plan_range(r.start, len(r), plan.micro_batches) for r in plan.ranges]
            now.leaves = ranges[self.group.rank].steps
            nodes = [node for r in ranges for node in r.pieces]
            self._transport.plan([len(r.pieces) for r in ranges], plan_merges(nodes, plan.micro_batches))

    def micro_batch(self, samples: float, last: bool) -> MicroBatch:
        """The context of one micro-batch of `samples`."""
        return MicroBatch(self, samples, last)

    def open(self, micro_batch: MicroBatch) -> None:
        """Gradients that arrive from now on belong to this micro-batch."""
        now = self._now
        if self._new:
            self.on_first_micro_batch()
            self._new = False
        if self._broken:
            raise CommError(self._broken)
        if self.reduced is not None or now.closed:
            raise RuntimeError(
                f"another backward before opt.step(): {REMEDY}. Where the earlier one was for another optimizer, as a "
                "GAN's generator's is, call opt.zero_grad() before this one. Reentrant activation checkpointing runs "
                "backwards in a backward: give checkpoint() use_reentrant=False, or use opt.micro_batch"
            )
        if now.current is not None:
            raise RuntimeError("opt.micro_batch is already open: micro-batches do not nest")
        if now.expected is not None and now.done >= now.expected:
            raise RuntimeError(f"the plan has {now.expected} micro-batches for this worker: one more was begun")
        if not now.done:
            self._seconds_each = self._stopwatch.seconds_each()
            self._stopwatch.start()
        now.current = micro_batch
        now.leaf = now.leaves[now.done] if now.leaves is not None else LeafStep(0, now.done > 0, ())
        if self.options.reproducible and now.plan is None:
            self._warn_of_no_plan()
        if now.plan is not None:
            now.scale = micro_batch.samples / (now.plan.local or now.plan.samples)
        else:
            now.scale = 1.0 / self.group.size if now.implicit else float(micro_batch.samples)
        if now.done:
            self.averaged.put_back()
        elif not now.implicit:
            self.averaged.begin_step()
        for bucket in self.buckets:
            bucket.begin_micro_batch()

    def _warn_of_no_plan(self) -> None:
        """Once: without a plan nobody knows a micro-batch's place in the canonical tree."""
        if self.group.rank == 0 and not self._warned:
            _LOG.warning(
                "comm.reproducible=true: the micro-batches of this loop are not planned, so the bits depend on the "
                "number of workers; kf.fit and kf.DataLoader plan them"
            )
        self._warned = True

    def _hook(self, bucket: Bucket, position: int, index: int) -> Callable[[Tensor], None]:

        def on_gradient(param: Tensor) -> None:
            if self._now.current is None and self._still_there():
                return  # perhaps of another optimizer's loss, as in a GAN: zero_grad drops them, or step() raises
            if param.grad is bucket.views[position] and self.reduced is None:
                raise RuntimeError(_STILL_THERE)
            if self._now.current is None:
                self._open_implicit()
            if bucket.packed or bucket.grads[position] is not None:
                raise RuntimeError(f"{self.names[index]} received a second gradient: {REMEDY}")
            self._collect(bucket, position, index)
            if bucket.missing == 0:
                self._pack(bucket)

        return on_gradient

    def _still_there(self) -> bool:
        """Some parameters have the gradients that the last step was made with."""
        return self.reduced is None and any(
            self.params[index].grad is view
            for bucket in self.of_params
            for index, view in zip(bucket.layout.params, bucket.views, strict=True)
        )

    def _collect(self, bucket: Bucket, position: int, index: int) -> None:
        """Takes over a parameter's fresh gradient."""
        param = self.params[index]
        assert param.grad is not None
        if param.grad.layout is not torch.strided:
            raise RuntimeError(
                f"{self.names[index]} of shape {tuple(param.shape)} has a sparse gradient: kfuse reduces dense ones "
                "only; make its layer with sparse=False"
            )
        if param.dtype != torch.float32:
            raise RuntimeError(
                f"{self.names[index]} was torch.float32 and is {param.dtype} now: change the model first, then make "
                "its optimizer"
            )
        bucket.grads[position], param.grad = param.grad, None
        bucket.missing -= 1

    def _open_implicit(self) -> None:
        """A bare `loss.backward()`: this worker's only micro-batch of the step."""
        self._begin_implicit()
        _at_the_end_of_backward(self._close_implicit)

    def _close_implicit(self) -> None:
        """Backward is over. All engines that took part start their last messages; then each waits for its own."""
        if self._now.current is None:
            return  # the backward failed, and was aborted before its callback ran
        try:
            self.close_micro_batch(then_wait=False)
        except BaseException:
            _TO_FINISH.clear()
            raise
        _TO_FINISH.append(self)
        _at_the_end_of_backward(_finish_all)

    def _begin_implicit(self) -> None:
        if self._now.done or self._now.plan is not None:
            raise RuntimeError(f"a backward outside opt.micro_batch: {REMEDY}")
        self._now.implicit = True
        self.open(MicroBatch(self, 1.0, last=True))

    def take_gradients(self) -> None:
        """The gradients that are there without a backward, set by hand: this worker's only micro-batch of the step.

        Raises RuntimeError if the last step's are among them.
        """
        if self._still_there():
            raise RuntimeError(_STILL_THERE)
        self._begin_implicit()
        self.close_micro_batch()

    def _collect_set_by_hand(self, bucket: Bucket) -> None:
        """Gradients of parameters that backward did not get to."""
        for position, index in enumerate(bucket.layout.params):
            if bucket.grads[position] is None and (grad := self.params[index].grad) is not None:
                if grad is bucket.views[position]:
                    raise RuntimeError(_STILL_THERE)
                self._collect(bucket, position, index)

    def _pack(self, bucket: Bucket) -> None:
        leaf = self._now.leaf
        sumsq = self._sumsq_of[bucket.index]
        if bucket.missing:
            for position, index in enumerate(bucket.layout.params):
                self._now.fired[index] = bucket.grads[position] is not None
        flat = bucket.slot(leaf.slot)
        pack(bucket.grads, flat, bucket.table, scale=self._now.scale, accumulate=leaf.accumulate, sumsq=sumsq)
        bucket.grads = []
        bucket.packed = True
        if bucket is not self.buckets[-1]:
            self._complete(bucket)

    def close_micro_batch(self, then_wait: bool = True) -> None:
        """The micro-batch's backward is over: packs what is left, writes the tail, launches if it was the last."""
        now = self._now
        if now.current is None:
            return
        for bucket in self.of_params:
            if not bucket.packed:
                self._collect_set_by_hand(bucket)
                self._pack(bucket)
        last = self.buckets[-1]
        if last not in self.of_params:
            self._pack_buffers(last)
        self._write_tail(last, now.current)
        now.done += 1
        now.closed = now.current.last
        if now.closed:
            self._stopwatch.stop(now.done)
        if now.closed and now.expected not in (None, now.done):
            raise RuntimeError(f"the plan has {now.expected} micro-batches for this worker: {now.done} were run")
        self._complete(last)
        now.current = None
        if now.closed and then_wait:
            self.on_last_micro_batch()

    def _pack_buffers(self, bucket: Bucket) -> None:
        leaf = self._now.leaf
        scratch = torch.empty(bucket.table.num_chunks, device=bucket.device)
        changes = self.averaged.changes()
        values = [changes[i] for i in bucket.layout.params]
        flat = bucket.slot(leaf.slot)
        pack(values, flat, bucket.table, scale=self._now.scale, accumulate=leaf.accumulate, sumsq=scratch)

    def _write_tail(self, bucket: Bucket, current: MicroBatch) -> None:
        now, weight = self._now, float(current.samples)
        values = [0.0] * (t.TAIL_SLOTS + t.RANK_SLOTS * self.group.size)
        values[t.SAMPLES], values[t.MICRO_BATCHES], values[t.LOSS] = weight, 1.0, float("nan")
        own = t.TAIL_SLOTS + t.RANK_SLOTS * self.group.rank
        if now.done == 0:
            values[own] = self._seconds_each
            if self.group.rank == 0 and now.plan is not None:
                values[t.CONTROL : t.TAIL_SLOTS] = now.plan.control.slots()
        flags = [float(fired) for fired in now.fired]
        tail = torch.tensor(flags + values, dtype=torch.float32)
        if self._device.type == "cuda":
            tail = tail.pin_memory().to(self._device, non_blocking=True)
        slots = tail[len(flags) :]
        sum_partials(self._sumsq, self._total)
        slots[t.SUM_SQUARES] = self._total * weight
        if current.loss is not None:
            loss = current.loss.detach() if isinstance(current.loss, Tensor) else current.loss
            slots[t.LOSS] = loss * weight
        if now.done == 0 and self._digest_is_due:
            slots[own + 1 : own + t.RANK_SLOTS] = t.digest_slots(t.digest(self.params, self.digest_salt()))
        place = bucket.slot(now.leaf.slot)[bucket.body :]
        if now.leaf.accumulate:
            place.add_(tail)
        else:
            place.copy_(tail)
        now.all_fired = now.all_fired and all(now.fired)
        now.fired = [True] * len(self.params)

    @property
    def _digest_is_due(self) -> bool:
        every = self.options.check_every
        return every is not None and self.step % every == 0 and not self._now.is_local and self.group.size > 1

    def _complete(self, bucket: Bucket) -> None:
        """The bucket has this micro-batch: merge partial sums; after the last one, launch what is due."""
        now = self._now
        assert now.current is not None
        for destination, source in now.leaf.merges:
            bucket.slot(destination).add_(bucket.slot(source))
        if now.current.last:
            now.complete[bucket.index] = True
            self._launch()

    def _launch(self) -> None:
        """Starts the reduction of every complete bucket that has no incomplete one before it."""
        now = self._now
        while now.launched < len(self.buckets) and now.complete[now.launched]:
            bucket = self.buckets[now.launched]
            if self._travels(bucket):
                self._transport.launch(bucket.index, self._outgoing(bucket), f"step {self.step}, {bucket.name}")
            now.launched += 1
        self._transport.poll()

    def _travels(self, bucket: Bucket) -> bool:
        """Whether the bucket is reduced over the workers: of a local step, only the tail is."""
        return self.group.size > 1 and (bucket is self.buckets[-1] or not self._now.is_local)

    def _outgoing(self, bucket: Bucket) -> list[Tensor]:
        if self._now.is_local:
            return [slot[bucket.body :] for slot in bucket.slots]
        if self.options.dtype == "fp32" or bucket is self.buckets[-1]:
            return bucket.slots
        wire = self._wire.setdefault(bucket.index, [torch.empty_like(bucket.slots[0], dtype=torch.bfloat16)])
        wire[0].copy_(bucket.slots[0])
        return wire

    def finish(self) -> None:
        """Waits for all buckets; then slot 0 of each holds the mean gradient over the step's samples, and `reduced`
        is set. Nothing happens if there was no backward since the last step.

        Raises CommError, and RuntimeError if the step's last micro-batch has not been run, or is being run.
        """
        if self._now.current is not None:
            raise RuntimeError(f"opt.step() inside a micro-batch: {REMEDY}")
        if self._now.plan is not None and self._now.expected == 0 and not self._now.closed:
            self._contribute_nothing()
        if not self._now.closed:
            if self._now.done:
                raise RuntimeError(f"opt.step() before the step's last micro-batch: {REMEDY}")
            return
        for bucket in self.buckets:
            if self._travels(bucket):
                self._transport.wait(bucket.index)
                if bucket.index in self._wire and not self._now.is_local:
                    bucket.slots[0].copy_(self._wire[bucket.index][0])
            self._transport.poll()
        last = self.buckets[-1]
        tail = last.slots[0][last.body :]
        flags, slots, of_ranks = torch.split(tail, [len(self.params), t.TAIL_SLOTS, t.RANK_SLOTS * self.group.size])
        slots = slots.double()
        for bucket in self.of_params:
            body = bucket.slots[0][: bucket.body]
            if not self._now.weighted:
                body.mul_((1.0 / slots[t.SAMPLES]).float())  # the weights' total was not known while packing
            block_sumsq(body, self._norms_of[bucket.index])
        sum_partials(self._norms, self._total)
        for position, index in enumerate(last.layout.params if last not in self.of_params else ()):
            change = last.views[position]
            self.averaged.apply(index, change if self._now.weighted else change / slots[t.SAMPLES])
        self.reduced = Reduced(
            torch.cat([slots, self._total[None]]),
            flags,
            of_ranks.view(self.group.size, t.RANK_SLOTS),
            self._now.all_fired,
            self._now.implicit,
            self._now.is_local,
            self._now.plan is not None,
        )
        self.step += 1
        self._reset()

    def _contribute_nothing(self) -> None:
        """This worker has no micro-batch in this step: zeros, where the transport takes one contribution from each."""
        self._stopwatch.forget()
        self.averaged.begin_step()
        if not self.options.reproducible:
            for bucket in self.buckets:
                bucket.slots[0].zero_()
        self._now.closed, self._now.all_fired = True, False
        self._now.complete = [True] * len(self.buckets)
        self._launch()

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
        """A bare backward began, and its reduction did not come to its end: something raised."""
        return self._now.implicit

    def drop(self) -> None:
        """Forgets gradients that came since the last step, but not a micro-batch under way, nor a planned step."""
        if self.reduced is not None:
            self.reduced = None
            self.step -= 1  # it was no step: the next one has its number, and the check that was due
        now = self._now
        unfinished = now.plan is None and now.done > 0 and now.current is None and not now.closed
        if self.interrupted or unfinished:
            self.abort()

    def abort(self) -> None:
        """Forgets the step under way (or, after one, makes ready for the next)."""
        if self._now.begun and not self._now.implicit:
            self.averaged.put_back()
        if self._now.launched and self.group.size > 1:
            # Messages are under way, and may arrive at any time: they keep their buffers, and we take others.
            self._wire = {}
            for bucket in self.buckets:
                bucket.renew()
            self._broken = "a step was given up after its reduction had begun: this worker cannot go on with the others"
        self.reduced = None
        self._reset()

    def _reset(self) -> None:
        self._now = StepState(len(self.buckets), len(self.params))
        size = self.group.size
        self._transport.plan([1] * size, plan_merges([(0, r) for r in range(size)], size))


def owner(parameter: Parameter) -> Engine | None:
    """The engine that has the parameter's gradients."""
    reference = _OWNERS.get(parameter)  # type: ignore[no-untyped-call]
    engine: Engine | None = reference() if reference is not None else None
    return engine


def _at_the_end_of_backward(act: Callable[[], None]) -> None:
    """Runs `act` when the backward under way is over, after what was asked for before."""
    torch.autograd.Variable._execution_engine.queue_callback(act)


def _finish_all() -> None:
    """Waits for the engines of one backward in the same order on every rank.

    A reduction may have several phases, and an engine moves on to the next as it waits.
    """
    engines = sorted(_TO_FINISH, key=lambda engine: engine.lane)
    _TO_FINISH.clear()
    for engine in engines:
        engine.on_last_micro_batch()


_TO_FINISH: list[Engine] = []
_OWNERS = WeakTensorKeyDictionary()
_STILL_THERE = "the last step's gradients are still there: call opt.zero_grad() after opt.step()"


def _check_parameters(params: Sequence[Parameter], names: Sequence[str]) -> None:
    devices = {p.device for p in params}
    if len(devices) > 1:
        raise ValueError(f"parameters lie on {sorted(map(str, devices))}: a worker has one device")
    for name, p in zip(names, params, strict=True):
        if p.dtype != torch.float32:
            raise ValueError(
                f"{name} is {p.dtype}: parameters must be torch.float32 (bf16 compute comes from autocast)"
            )
        if not p.is_contiguous():
            raise ValueError(f"{name} of shape {tuple(p.shape)} is not contiguous")
