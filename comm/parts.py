"""What an engine is made of: buckets over some parameters, and what brings them to the workers of a group.

All of it changes between steps only.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter

from kfuse.comm import devices, gradients, transports
from kfuse.comm.buckets import JOINED, AveragedBuffers, BucketLayout, dense_order, make_buckets, plan_parameters
from kfuse.comm.executor import Executor
from kfuse.comm.group import Group
from kfuse.comm.hooks import BucketHooks
from kfuse.comm.measurement import Measurement
from kfuse.comm.settings import CommOptions
from kfuse.comm.step import Phase, Step
from kfuse.kernels import BLOCK

if TYPE_CHECKING:  # imported when used: `import kfuse` is quick
    from kfuse.comm.audit import AuditedGradient
    from kfuse.comm.cost import Choice

_LOG = logging.getLogger("kfuse")


class EngineParts:
    """The parts of an engine over `groups` (parameters that may share a bucket) and the workers of a `group`."""

    audited: AuditedGradient | None = None  # where steps may have an audit
    parts = 1  # bare backwards that make a step, each of a loss divided by their number (`opt.accumulate`)
    figures = 0  # slots of the tail for a step function's figures
    # Whether a backward outside all contexts is a micro-batch. If not its gradients stay with their parameters.
    bare_backwards = True
    superseded = False  # a newer engine has taken over some of the parameters
    # What decisions and measured messages have chosen.
    topology: str | None = None  # the transport that a decision chose; None: the configured one
    # The shape that a decision chose for `tree`; None: the configured one. Parents are for the present group.
    tree: str | tuple[int, ...] | None = None
    choice: Choice | None = None  # what `comm.schedule=auto` chose by measured messages; None: no choice
    # How far it is.
    step = 0  # steps completed
    now: Step  # the coming step, or the one under way
    last: Step | None = None  # the one before, once this worker has its sums, until the next one is announced

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
        """lane: which of the group's lanes (`Group.lane`) to use. groups, names, costs: see `lay_out`.

        mirrors: with sharded state, the worker after this one gets its shard of the mean gradient too.
        """
        self.options, self.lane, self.mirrors = options, lane, mirrors and options.sharded
        self._warned, self.hooks = set[str](), list[BucketHooks]()
        self.group = group
        self.lay_out(groups, names, costs)

    def lay_out(
        self, groups: Sequence[Sequence[Parameter]], names: Sequence[str] | None, costs: Sequence[int | None]
    ) -> None:
        """Lays buckets out over `groups` of parameters, whose gradients are reduced from now on. Between steps.

        names: for error messages. costs: of each parameter, what its update costs a worker if that needs the whole
        gradient and so has one owner. Raises ValueError for parameters that are not dense, fp32 or bf16 (on a CPU also
        float64), and on one device; then nothing has changed.
        """
        params = [p for each in groups for p in each]
        names = list(names) if names is not None else [f"parameter {i}" for i in range(len(params))]
        check_parameters(params, names)
        if self.options.sync != "ssgd" and any(p.dtype == torch.float64 for p in params):
            raise ValueError(f"comm.sync={self.options.sync}: must be ssgd with parameters of float64")
        if self.hooks:
            self.close()
        self.params, self.names, self.audited, self.last = params, names, None, None
        kinds = [index for index, each in enumerate(groups) for _ in each]
        self.device = params[0].device if params else torch.device("cpu")
        self.streams = devices.StreamOrder(devices.of(self.device))
        self.on_gpu = devices.of(self.device).asynchronous
        capacity = self.options.bucket_elements * (JOINED if self.joins else 1)
        self._build(plan_parameters(params, kinds, capacity, costs), {})
        self.set_group(self.group)

    def track_buffers(self, buffers: Mapping[str, Tensor], summed: Sequence[Tensor] = ()) -> None:
        """Averages the changes of these (BatchNorm's running statistics) over the step's micro-batches, by samples.

        buffers: by name. summed: those of `buffers` whose changes are added up instead: see `AveragedBuffers`.
        """
        check_owner(self)
        self.close()
        self._build([bucket.layout for bucket in self.gradient_buckets], buffers, summed)
        self.set_group(self.group)

    def carry_figures(self, count: int) -> None:
        """Has so many numbers of each micro-batch averaged with its loss (`MicroBatch.figures`). Between steps."""
        if count != self.figures:
            self.figures = count
            self.set_group(self.group)

    def _build(
        self, layouts: Sequence[BucketLayout], buffers: Mapping[str, Tensor], summed: Sequence[Tensor] = ()
    ) -> None:
        """Makes the buckets. The last one carries the tail."""
        self.averaged = AveragedBuffers(buffers, summed)
        # In a bucket of their own buffers and tail are fp32, and all workers get all of them.
        own_bucket = bool(buffers) or self.options.dtype != "fp32" or self.options.sharded
        own_bucket |= any(layout.dtype is torch.float64 for layout in layouts)
        apart = self.averaged.tensors if own_bucket else None
        self.buckets = make_buckets(layouts, self.params, apart, self.device, self.options.sharded)
        self.gradient_buckets = self.buckets[: len(layouts)]  # but for one of averaged buffers and tail alone
        self.measurement = Measurement(self.gradient_buckets, len(self.params), self.device)
        take_over(self.params, self)

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
        rounds = options.dtype == "int8" and group.size > 1
        self.measurement.set_group(group.rank, group.size, self.figures, in_pack=self.joins, rounds=rounds)
        room = BLOCK * group.size if self.on_gpu and group.size > 1 else 0
        for bucket in self.buckets:
            tail = self.measurement.tail if bucket is self.buckets[-1] else 0
            if room > bucket.room or tail != bucket.tail:
                mean, bucket.room = bucket.mean, max(room, bucket.room)
                bucket.renew(tail)
                bucket.mean.copy_(mean)  # it may be the last step's, whose update is to be resumed in this group
        whole, matrices, apart = transports.make_programs(
            options, self.transport_name, self.group.adds_up, self.mirrors
        )
        programs = [matrices if bucket.layout.costs else whole for bucket in self.gradient_buckets]
        programs += [apart] * (len(self.buckets) - len(programs))
        for index, bucket in enumerate(self.buckets):
            if bucket.sum.nbytes < self.group.swap_below:
                programs[index] = transports.in_one_message(programs[index])
        tree = self.tree or options.tree
        self.executor = Executor(self.buckets, self.group, programs, options.dtype, tree, self.measurement.norms_of)
        self.now = Step()

    def _choose(self, group: Group, before: Group) -> Choice | None:
        """Returns what measured messages choose, if there is a choice. before: the group until now, or a lane of it.

        All workers of a view must come to the same messages, so decisions, which a joining worker does not know yet, do
        not matter here.
        """
        on_gpus = devices.of(group.device).asynchronous  # a probe would mostly measure how NCCL connects
        if group.size == 1 or on_gpus or not self.options.leaves_choice:
            return None
        from kfuse.comm import cost  # not before it is needed: `import kfuse` is quick

        elements = [bucket.layout.numel for bucket in self.gradient_buckets] or [1]
        if group.costs is None:
            group.costs = cost.known(group, before) or cost.probe(group, max(elements))
        return cost.choose(group.costs, group.size, elements)

    def close(self) -> None:
        """Removes the hooks: gradients stay in `p.grad`. Those of a step that the optimizer has made are dropped."""
        while self.hooks:
            self.hooks.pop().close()
        if self.reduced is None:
            for param in gradients.shown(self.gradient_buckets):
                param.grad = None
        self.group.first_steps.discard(self)

    @property
    def joins(self) -> bool:
        """Whether this is a GPU's only worker for good: buckets are larger then, and `pack` measures the mean."""
        return self.on_gpu and self.group.size == 1 and self.group.fixed and not self.options.reproducible

    @property
    def reduced(self) -> Step | None:
        """The last step, if the optimizer has not taken its result yet."""
        return self.last if self.last is not None and self.last.phase is Phase.REDUCED else None

    @property
    def transport_name(self) -> str:
        """The transport of gradients, as it is chosen: for `reduce_scatter` all_to_all may run."""
        return self.topology or self.options.transport(self.choice.schedule if self.choice else None)

    @property
    def wire(self) -> str:
        """The type of gradients in messages; "bf16 sums": bf16, added up in bf16, by the library or the transport."""
        in_bf16 = self.options.dtype == "bf16" and not self.executor.program.has("reduce")
        return "bf16 sums" if in_bf16 else self.options.dtype

    def warn_once(self, message: str, *values: object) -> None:
        if message not in self._warned:
            self._warned.add(message)
            _LOG.warning(message, *values)


# By the parameter's id, which no other has while the engine lives.
_OWNERS: weakref.WeakValueDictionary[int, EngineParts] = weakref.WeakValueDictionary()


def owner(parameter: Parameter) -> EngineParts | None:
    return _OWNERS.get(id(parameter))


def take_over(params: Sequence[Parameter], engine: EngineParts) -> None:
    """Makes `engine` these parameters' only owner, and the owner of no others. With two, the first hook would take the
    gradient from the second.
    """
    for key in [key for key, other in _OWNERS.items() if other is engine]:
        del _OWNERS[key]
    for param in params:
        if (other := owner(param)) is not None:
            other.close()
            other.superseded = True
        _OWNERS[id(param)] = engine
    engine.superseded = False


def check_owner(engine: EngineParts) -> None:
    """Raises RuntimeError if a newer engine has taken parameters over: this one's would no longer be trained."""
    if engine.superseded:
        raise RuntimeError(
            "parameters of this optimizer belong to a newer kfuse optimizer, which was made over the same "
            "parameters: use that one (or call rebuild() on this one, which takes them back)"
        )


def check_parameters(params: Sequence[Parameter], names: Sequence[str]) -> None:
    """Raises ValueError for parameters that are not dense, fp32 or bf16 (on a CPU also float64), and on one device."""
    places = {p.device for p in params}
    if len(places) > 1:
        raise ValueError(f"parameters lie on {sorted(map(str, places))}: a worker has one device")
    for name, p in zip(names, params, strict=True):
        if p.is_complex():
            raise ValueError(
                f"{name} is {p.dtype}: buckets hold real numbers: keep a real parameter of shape (..., 2), and call "
                "torch.view_as_complex in forward"
            )
        if p.dtype not in (torch.float32, torch.bfloat16) and (p.dtype, p.device.type) != (torch.float64, "cpu"):
            raise ValueError(
                f"{name} is {p.dtype}: parameters must be torch.float32 or torch.bfloat16, on a CPU also torch.float64 "
                "(fp16 compute comes from autocast)"
            )
        if dense_order(p) is None:
            raise ValueError(
                f"{name} is not dense in memory: its strides {p.stride()} for the shape {tuple(p.shape)} leave gaps or "
                "overlap"
            )
