"""An engine reduces the gradients of some parameters over the workers of a group. Here it is set up, between its steps.

What it is made of: buckets, a program for each (`schedule`), the transports that these name, and the `Reduction` that
runs them. A new group, another transport or other buffers make some of it anew. `Steps` has what a step does with it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter

from kfuse.comm import devices, gradients, schedule, transport_names, transports
from kfuse.comm.buckets import AveragedBuffers, Bucket, BucketLayout, make_buckets, plan_parameters
from kfuse.comm.gradients import GradientHooks
from kfuse.comm.group import Group
from kfuse.comm.measurement import Measurement
from kfuse.comm.options import DEFAULT_BUCKET_MB, CommOptions
from kfuse.comm.reduction import Reduction, shard_unit
from kfuse.comm.schedule import Program
from kfuse.comm.steps import Steps

if TYPE_CHECKING:  # imported when used: `import kfuse` is quick
    from kfuse.comm.probe import Choice

_LOG = logging.getLogger("kfuse")


def make_programs(options: CommOptions, name: str, adds_up: bool, mirrors: bool) -> tuple[Program, Program]:
    """What a step does with a bucket of gradients, and with a last bucket that has none: buffers and the tail.

    name: of the transport. adds_up: see `Group.adds_up`. mirrors: with sharded state, the next worker gets each
    worker's shard of the mean gradient too. Raises ValueError unless both are valid.
    """
    running = transports.resolve(name, adds_up, options.dtype)
    program = transports.program(running, options.sharded, options.dtype)
    program = schedule.mirror(program) if mirrors and options.sharded else program
    apart = transports.program_apart(running, options.reproducible)
    for each in (program, apart):
        schedule.validate(each)
    return program, apart


class Engine(Steps):
    """Reduces the gradients of `groups` (lists of parameters that may share a bucket) over a `group` of workers."""

    transport_name: str
    """A name in `transport_names.NAMES`, or the dotted path of the user's class."""
    mirrors: bool
    """With sharded state: the next worker gets each worker's shard of the mean gradient too."""

    def __init__(
        self,
        groups: Sequence[Sequence[Parameter]],
        group: Group,
        options: CommOptions,
        names: Sequence[str] | None = None,
        lane: int = 0,
        mirrors: bool = False,
    ) -> None:
        """names: of the parameters, for error messages. lane: which of the group's lanes (`Group.lane`) to use.

        mirrors: with sharded state, the next worker gets each worker's shard of the mean gradient too.

        Raises ValueError for parameters that are not dense, fp32 or bf16, and on one device.
        """
        super().__init__()
        self.options, self.lane, self.mirrors = options, lane, mirrors and options.sharded
        self.params = [p for params in groups for p in params]
        self.names = list(names) if names is not None else [f"parameter {i}" for i in range(len(self.params))]
        gradients.check_parameters(self.params, self.names)
        self.averaged = AveragedBuffers([])
        self.figures = 0
        """Slots of the tail for a step function's figures."""
        self.topology: str | None = None
        """The transport that a decision chose; None: the configured one."""
        self.tree: str | tuple[int, ...] | None = None
        """The shape that a decision chose for the transport `tree`; None: the configured one. A list of parents counts
        for the present group only."""
        self.choice: Choice | None = None
        """What `comm.schedule=auto` chose by measured messages; None where it was not asked, or has no choice."""
        self._kinds = [index for index, params in enumerate(groups) for _ in params]
        self.group = group
        if group.costs is not None:  # a new engine in a group that has been measured
            self.choice = self._choose(group)
        self.bucket_mb = self.choice.bucket_mb if self.choice else options.bucket_mb or DEFAULT_BUCKET_MB
        """MiB of fp32 gradients in a bucket, at most."""
        self._layouts = self._plan(self.bucket_mb)
        self._build()
        self.set_group(group)

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
        """Makes buckets, partial sums and hooks. The last bucket carries the tail."""
        gradients.check_owner(self)
        self.close()
        buffers = self.averaged.tensors
        apart = self.options.has_bucket_apart(buffers)
        self.buckets = make_buckets(self._layouts, self.params, buffers if apart else None, self.options.sharded)
        before: list[Bucket] = getattr(self, "gradient_buckets", [])
        self.gradient_buckets = self.buckets[: len(self._layouts)]
        for bucket, old in zip(self.gradient_buckets, before, strict=False):  # what the optimizer has set
            bucket.parameters, bucket.unscale = old.parameters, old.unscale
        self.device = self.params[0].device if self.params else torch.device("cpu")
        self._streams = devices.StreamOrder(devices.of(self.device))
        self.measurement = Measurement(self.gradient_buckets, len(self.params), self.device)
        self.measurement.figures = self.figures
        self._audited = None
        gradients.take_over(self.params, self)
        self._hooks = GradientHooks(self.params, self.names, self.gradient_buckets, self._wants_gradients, self._pack)
        self._gradients_set = False

    def use_transport(self, topology: str | None, tree: str | tuple[int, ...] | None) -> None:
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
        before, self.group = self.group, group.lane(self.lane)
        if self.group is not before and isinstance(self.tree, tuple):
            self.tree = None
        self.choice = self._choose(group)
        options = self.options
        if self.choice is not None and group.rank == 0:
            _LOG.info("comm.schedule=%s: %s: %s", options.schedule, self.choice.schedule, self.choice.reason)
        self.transport_name = self.topology or options.transport(self.choice.schedule if self.choice else None)
        programs = self._programs()
        unit, tree = shard_unit(programs), self.tree or options.tree
        names = dict.fromkeys(program.transport for program in programs)
        others = transport_names.allowed(options.reproducible, options.sharded)
        made = {name: transports.make(name, self.group, tree, unit, others) for name in names}
        self._reduction = Reduction(self.buckets, self.group, made, programs, options.dtype)
        self.measurement.set_group(group.rank, group.size)
        if self.buckets[-1].tail != (numel := self.measurement.tail.numel):
            self.buckets[-1].renew(numel)
        self._reduction.hold_slots()
        self._broken = ""
        self._reset()

    def _programs(self) -> list[Program]:
        """Of each bucket, in this group."""
        name, adds_up = self.transport_name, self.group.adds_up
        program, apart = make_programs(self.options, name, adds_up, self.mirrors)
        count = len(self.gradient_buckets)
        return [program] * count + [apart] * (len(self.buckets) - count)

    @property
    def shard_unit(self) -> int:
        """What the length of a shard is a multiple of."""
        return shard_unit(self._reduction.programs)

    @property
    def bf16_sums(self) -> bool:
        """Whether bf16 messages are added up in bf16, by the library or the transport."""
        return self.options.dtype == "bf16" and not self._reduction.programs[0].has("reduce")

    def _plan(self, bucket_mb: float) -> list[BucketLayout]:
        return plan_parameters(self.params, self._kinds, self.options.bucket_elements(bucket_mb))

    def _choose(self, group: Group) -> Choice | None:
        """By measured messages, where the options leave a choice. Raises CommError.

        A worker that joins does not know yet what the others' decisions chose. So these do not matter here: all workers
        of a view must come to the same messages.
        """
        if group.size == 1 or self.options.is_definite:
            return None
        from kfuse.comm import probe  # not before it is needed: `import kfuse` is quick

        if not probe.leaves_choice(self.options):
            return None
        sizes = probe.BUCKETS_MB if self.options.bucket_mb is None else (self.options.bucket_mb,)
        buckets = {size: [layout.numel for layout in self._plan(size)] or [1] for size in sizes}
        if group.costs is None:
            group.costs = probe.probe(group, max(buckets[sizes[0]]), probe.AGAIN_S if self.choice else probe.BUDGET_S)
        self.group.costs = group.costs  # a lane of its own
        return probe.choose_program(group.costs, group.size, self.options, buckets)

    @property
    def has_chosen_buckets(self) -> bool:
        """Whether its buckets are of the size that is best in this group, where `comm.bucket_mb` leaves the choice."""
        return self.choice is None or self.choice.bucket_mb == self.bucket_mb
