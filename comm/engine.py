"""An engine reduces the gradients of some parameters to their mean over the workers of a group, step after step.

Hooks take over each fresh gradient (`gradients`), `step` packs micro-batches into buckets and launches complete ones
during backward, and `executor` runs each bucket's program with messages of the group.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter

from kfuse.comm import devices, gradients, transports
from kfuse.comm.buckets import AveragedBuffers, Bucket, make_buckets, plan_parameters
from kfuse.comm.executor import Executor
from kfuse.comm.gradients import STILL_THERE, GradientHooks
from kfuse.comm.group import CommError, Group
from kfuse.comm.measurement import Measurement
from kfuse.comm.settings import CommOptions
from kfuse.comm.step import REMEDY, EngineParts, KeptStep, Reduced, Step
from kfuse.comm.step_state import MicroBatch, StepPlan

if TYPE_CHECKING:  # imported when used: `import kfuse` is quick
    from kfuse.comm.cost import Choice

_LOG = logging.getLogger("kfuse")


class Engine(EngineParts):
    """Reduces the gradients of `groups` (parameters that may share a bucket) over a `group` of workers."""

    def __init__(
        self,
        groups: Sequence[Sequence[Parameter]],
        group: Group,
        options: CommOptions,
        names: Sequence[str] | None = None,
        lane: int = 0,
        mirrors: bool = False,
        costs: Sequence[int | None] = (),
    ) -> None:
        """names: of the parameters, for error messages. lane: which of the group's lanes (`Group.lane`) to use.

        costs: of each parameter, what its update costs a worker if that needs the whole gradient and so has one owner.

        mirrors: with sharded state, the worker after this one gets its shard of the mean gradient too.

        Raises ValueError for parameters that are not dense, fp32 or bf16 (on a CPU also float64), and on one device.
        """
        self.options, self.lane, self.mirrors = options, lane, mirrors and options.sharded
        self.params = [p for params in groups for p in params]
        self.names = list(names) if names is not None else [f"parameter {i}" for i in range(len(self.params))]
        gradients.check_parameters(self.params, self.names)
        if options.sync != "ssgd" and any(p.dtype == torch.float64 for p in self.params):
            raise ValueError(f"comm.sync={options.sync}: must be ssgd with parameters of float64")
        kinds = [index for index, params in enumerate(groups) for _ in params]
        # What the optimizer sets.
        self.on_last_micro_batch = lambda: None
        # What else than parameters must be equal on all ranks: tensors, and the `salt` of `digest`.
        self.compared: Callable[[], tuple[Sequence[Tensor], int]] = lambda: ((), 0)
        self.audited = None
        self.parts = 1  # bare backwards that make a step, each of a loss divided by their number (`opt.accumulate`)
        self.figures = 0  # slots of the tail for a step function's figures
        # What decisions and measured messages have chosen.
        self.topology: str | None = None  # the transport that a decision chose; None: the configured one
        # The shape that a decision chose for `tree`; None: the configured one. Parents are for the present group.
        self.tree: str | tuple[int, ...] | None = None
        self.choice: Choice | None = None  # what `comm.schedule=auto` chose by measured messages; None: no choice
        # How far it is.
        self.step, self.reduced = 0, None
        self.kept: KeptStep | None = None  # with sharded state: the last reduced step, until the next one begins
        self.superseded = False
        # Whether a backward outside `MicroBatch` is a micro-batch. If not its gradients stay with their parameters.
        self.bare_backwards = True
        self._warned = set[str]()
        self.group = group
        self._layouts = plan_parameters(self.params, kinds, options.bucket_elements, costs)
        self._build({})
        self.set_group(group)

    # -- set-up, between steps ------------------------------------------------------------------------------------

    def track_buffers(self, buffers: Mapping[str, Tensor], summed: Sequence[Tensor] = ()) -> None:
        """Averages the changes of these (BatchNorm's running statistics) over the step's micro-batches, by samples.

        buffers: by name. summed: those of `buffers` whose changes are added up instead: see `AveragedBuffers`.
        """
        gradients.check_owner(self)
        self.close()
        before = self.gradient_buckets
        self._build(buffers, summed)
        for bucket, old in zip(self.gradient_buckets, before, strict=True):  # what the optimizer has set
            bucket.parameters = old.parameters
        self.set_group(self.group)

    def carry_figures(self, count: int) -> None:
        """Has so many numbers of each micro-batch averaged with its loss (`MicroBatch.figures`). Between steps."""
        if count != self.figures:
            self.figures = count
            self.set_group(self.group)

    def _build(self, buffers: Mapping[str, Tensor], summed: Sequence[Tensor] = ()) -> None:
        """Makes buckets and hooks. The last bucket carries the tail."""
        self.averaged = AveragedBuffers(buffers, summed)
        # In a bucket of their own buffers and tail are fp32, and all workers get all of them.
        own_bucket = bool(buffers) or self.options.dtype != "fp32" or self.options.sharded
        own_bucket |= any(layout.dtype is torch.float64 for layout in self._layouts)
        apart = self.averaged.tensors if own_bucket else None
        self.device = self.params[0].device if self.params else torch.device("cpu")
        self.buckets = make_buckets(self._layouts, self.params, apart, self.device, self.options.sharded)
        self.gradient_buckets = self.buckets[: len(self._layouts)]
        self.on_gpu = devices.of(self.device).asynchronous
        self.streams = devices.StreamOrder(devices.of(self.device))
        self.measurement = Measurement(self.gradient_buckets, len(self.params), self.device)
        gradients.take_over(self.params, self)
        self._hooks = GradientHooks(self)
        self._gradients_set = False  # whether `p.grad` may have the gradients of the last step

    def use_transport(self, topology: str | None, tree: str | tuple[int, ...] | None) -> None:
        """Goes on with another transport or tree (None: the configured one), if it is another. Between steps."""
        if (topology, tree) != (self.topology, self.tree):
            self.topology, self.tree = topology, tree
            self.set_group(self.group)

    def set_group(self, group: Group) -> None:
        """Goes on with other workers. Between steps. Raises ValueError if devices differ."""
        if group.size > 1 and devices.of(group.device).name != self.device:
            raise ValueError(f"parameters lie on {self.device}, this worker's device is {group.device}: move the model")
        self.group.first_steps.discard(self)
        group.first_steps.add(self)  # before its lane connects
        group.first_steps.discard(group)
        before, self.group = self.group, group.lane(self.lane)
        self._first_steps = 2  # to be made in this group
        if self.group is not before and isinstance(self.tree, tuple):
            self.tree = None
        options = self.options
        if group.size == 1:  # nothing to choose: what was measured is kept for when the job grows again
            group.costs = group.costs or before.costs
        self.choice = self._choose(group, before)
        self.group.costs = group.costs  # a lane of its own
        if self.choice is not None and group.rank == 0:
            _LOG.info("comm.schedule=%s: %s: %s", options.schedule, self.choice.schedule, self.choice.reason)
        self.transport_name = self.topology or options.transport(self.choice.schedule if self.choice else None)
        self.measurement.set_group(group.rank, group.size, self.figures)
        if self.buckets[-1].tail != (numel := self.measurement.tail):
            self.buckets[-1].renew(numel)
        whole, matrices, apart = transports.make_programs(
            options, self.transport_name, self.group.adds_up, self.mirrors
        )
        programs = [matrices if bucket.layout.costs else whole for bucket in self.gradient_buckets]
        programs += [apart] * (len(self.buckets) - len(programs))
        self.executor = Executor(self.buckets, self.group, programs, options.dtype, self.tree or options.tree)
        # Whether bf16 messages are added up in bf16, by the library or the transport.
        self.bf16_sums = options.dtype == "bf16" and not self.executor.programs[0].has("reduce")
        self.now = Step(self)

    def _choose(self, group: Group, before: Group) -> Choice | None:
        """Returns what measured messages choose, if there is a choice. before: the group until now, or a lane of it.

        All workers of a view must come to the same messages, so decisions, which a joining worker does not know yet, do
        not matter here.
        """
        on_gpus = devices.of(group.device).asynchronous  # a probe would mostly measure how NCCL connects
        if group.size == 1 or on_gpus or not self.options.leaves_choice:
            return None
        from kfuse.comm import cost  # not before it is needed: `import kfuse` is quick

        elements = [layout.numel for layout in self._layouts] or [1]
        if group.costs is None:
            group.costs = cost.known(group, before) or cost.probe(group, max(elements))
        return cost.choose_program(group.costs, group.size, elements)

    # -- micro-batches --------------------------------------------------------------------------------------------

    def begin(self, plan: StepPlan) -> None:
        """Announces the coming step. Without it each worker's micro-batches are counted as they come."""
        self.kept = None
        self.abort()
        self.now.follow(plan)

    def open_micro_batch(self, micro_batch: MicroBatch) -> None:
        """Gradients that arrive from now on belong to this micro-batch.

        Raises RuntimeError where none may begin now, CommError where an earlier failure has made this worker's
        reductions useless to the others.
        """
        if self.executor.failed is not None:
            raise CommError(self.executor.failed)
        if micro_batch.several_backwards and self._still_there():
            raise RuntimeError(STILL_THERE)
        self.now.open(micro_batch)

    def wants_gradient(self) -> bool:
        """Whether to take the gradient that has just arrived. A bare backward opens a micro-batch."""
        if self.audited is not None and self.audited.repeats:
            return False
        if (current := self.now.current) is None:
            if not self.bare_backwards or (self.reduced is None and self._still_there()):
                return False  # perhaps of another optimizer's loss, as in a GAN: zero_grad drops them, or step() raises
            self._begin_implicit()
            gradients.at_the_end_of_outer_backward(self._close_implicit)
        self.streams.add()
        return current is None or not current.several_backwards

    def _still_there(self) -> bool:
        """Some parameters have the gradients that the last step was made with."""
        return self._gradients_set and self.reduced is None and self._hooks.still_there()

    def _begin_implicit(self) -> None:
        """A bare `loss.backward()`, or gradients set by hand: this worker's next micro-batch of the step's `parts`."""
        now = self.now
        if not self.bare_backwards:
            raise RuntimeError("opt.step() with gradients of no pass of its optimizer: see step.micro_batches(opt)")
        if (now.done and not now.implicit) or now.plan is not None:
            raise RuntimeError(f"a backward outside opt.micro_batch: {REMEDY}")
        now.implicit, now.parts = True, self.parts
        self.open_micro_batch(MicroBatch(self, 1.0, last=now.done + 1 == now.parts))

    def _close_implicit(self) -> None:
        current = self.now.current
        if current is None:
            return  # the backward failed, and was aborted before its callback ran
        if current.last:
            gradients.close_together(self)
        else:
            self.close_micro_batch()

    def take_gradients(self) -> None:
        """Makes gradients that were set by hand this worker's only micro-batch of the step. Raises RuntimeError if the
        last step's are among them.
        """
        if self._still_there():
            raise RuntimeError(STILL_THERE)
        self._begin_implicit()
        self.close_micro_batch()

    def close_micro_batch(self, then_wait: bool = True) -> None:
        """Packs what is left after the micro-batch's backward, writes the tail, launches if it was the last."""
        now = self.now
        if now.current is None:
            return
        self.streams.go_on_here()
        for bucket in self.gradient_buckets:
            self._hooks.collect_set_by_hand(bucket)
            if not bucket.packed:
                now.pack(bucket)
        if now.close() and then_wait:
            self.on_last_micro_batch()

    # -- the reduction and the update -----------------------------------------------------------------------------

    def finish(self) -> None:
        """Waits for all buckets; then the `mean` of each is the mean gradient over the step's samples, and `reduced`
        is set. Nothing happens if there was no backward since the last step.

        Raises CommError, and RuntimeError if the step's last micro-batch has not been run, or is being run.
        """
        now = self.now
        if not now.end():
            return
        kept = now.reduce()
        self.kept = kept if self.options.sharded else None
        # A worker takes part once its own shards are reduced, and the mirrored ones are here. So nobody has the result,
        # and nobody updates, before all gradients are where they are needed.
        last = self.buckets[-1]
        self.executor.share_sums(self.measurement.norms, *([last.sum] if now.tail_waits else []))
        differs = self._workers_differ()  # nothing is changed by the step yet
        self._take(kept, self.measurement.record(last.tails[0], now), differs)
        if self._first_steps:
            self._first_steps -= 1
            if not self._first_steps:  # the first update may compile too: the second step's messages wait for it
                self.group.first_steps.discard(self)
        self.step += 1
        self.now = Step(self)

    def _workers_differ(self) -> bool:
        """Whether what must be equal on all ranks is not, in a step in which they compare it. The host waits for the
        device then. Raises CommError.
        """
        every = self.options.check_every
        if every is None or self.step % every or self.now.is_local or self.group.size == 1:
            return False
        from kfuse.comm.digest import digest  # one worker alone does not need it

        tensors, salt = self.compared()
        mine = digest([*self.params, *tensors], salt).reshape(1).to(self.group.device)
        found = torch.stack(self.group.all_gather(mine, f"step {self.step}, digests of the parameters"))
        return bool((found != found[0]).any())

    def _take(self, kept: KeptStep, record: Tensor, differs: bool = False) -> None:
        now = kept.now
        if self.averaged.tensors:
            self.averaged.apply(self.buckets[-1].layout.params, kept.changes, kept.total_weight)
        used = kept.tail[: len(self.params)] if now.unused else None
        kept.reduced = Reduced(record, used, frozenset(now.unused), now, differs)
        self.reduced, self._gradients_set = kept.reduced, True

    def updates(self) -> Iterator[Bucket]:
        """After `finish`: yields each bucket of gradients for its update, and shares what each worker has updated.

        Raises CommError, once all buckets are updated.
        """
        kept = self.kept
        try:
            if kept is None or not kept.resumed:
                yield from self.executor.updates(self.gradient_buckets)
            elif not kept.updated:
                yield from self.gradient_buckets
        except CommError:
            if kept is not None:
                kept.updated = True
            raise
        if kept is not None:
            kept.updated = True

    def resume(self, record: Tensor, tail: Tensor, changes: Sequence[Tensor]) -> None:
        """After a loss, in another group: `reduced` is the kept step's result again, for an update that some worker has
        begun. This worker updates its part, and what it mirrors; nothing is shared.

        record: as in `Reduced`, and tail and changes: as in `KeptStep`, of a worker that has them. Between `abort` and
        `begin`.
        """
        assert self.kept is not None, "no step is kept"
        if self.kept.reduced is None:  # the message with its tail did not arrive here
            self.kept.tail, self.kept.changes = tail, changes
            self._take(self.kept, record)
        else:
            self.averaged.put_back()  # an audit that failed has undone the step's changes
            self.reduced, self._gradients_set = self.kept.reduced, True
        self.kept.resumed = True

    # -- where the step stands ------------------------------------------------------------------------------------

    @property
    def interrupted(self) -> bool:
        """A bare backward began, and its reduction did not finish: something raised."""
        return self.now.implicit and (self.now.current is not None or self.now.closed)

    def drop(self) -> None:
        """Drops gradients that arrived since the last step, but not a micro-batch under way, nor a planned step.

        The caller takes the last step's gradients off the parameters.
        """
        if self.reduced is not None:
            self.reduced = None
            self.step -= 1  # it was no step: the next one has its number, and the check that was due
        self._gradients_set = False
        now = self.now
        unfinished = now.plan is None and now.done > 0 and now.current is None and not now.closed
        if now.implicit or unfinished:
            self.abort()

    def abort(self) -> None:
        """Drops the step under way, and unless it is `kept` its gradients. After a finished step: prepares the next."""
        now = self.now
        self.streams.go_on_here()  # buffers may be dropped, and the next step writes those that stay
        if now.begun and not now.implicit:
            self.averaged.put_back()
        if now.current is not None and now.current.several_backwards:
            for param in self.params:
                param.grad = None
        is_kept = self.kept is not None and self.kept.now is now
        self.executor.abandon(is_kept)
        if is_kept:
            self.measurement.renew()
        self.reduced = None
        self.now = Step(self)

    def close(self) -> None:
        """Removes the hooks: gradients stay in `p.grad`. Those of a step that the optimizer has made are dropped."""
        self._hooks.close(drop=self.reduced is None)
        self.group.first_steps.discard(self)
