"""The data of a step: its plan, a micro-batch, the state of the step under way, and the result of its reduction."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import TracebackType
from typing import Any, Protocol

from torch import Tensor

from kfuse.comm import transports
from kfuse.comm.sum_tree import LeafStep
from kfuse.comm.sync import Sync
from kfuse.comm.tail import NOTHING_ANNOUNCED, Announcement

REMEDY = (
    "one backward is one micro-batch. For several a step, iterate over a step of kf.DataLoader, or wrap each in "
    "`with opt.micro_batch(samples=len(x), last=...)`; call opt.step() and opt.zero_grad() once after the last. "
    "Several losses of the same samples: add them up and call backward once, or give opt.micro_batch (kf.DataLoader) "
    "several_backwards=True. For ACC backwards of loss / ACC: opt.accumulate(ACC)"
)

CTA_POLICIES = ("default", "efficiency", "zero")
"""What `nccl_cta_policy` may be, in the order of NCCL's numbers for them (NCCL_CTA_POLICY_* in nccl.h)."""


DEFAULT_BUCKET_MB = 25.0
"""DDP's, too."""


@dataclass(frozen=True)
class CommOptions:
    """How gradients are reduced (the `comm.*` settings). Raises ValueError for what is not allowed."""

    schedule: str = "auto"  # or a name in kfuse.comm.transports.NAMES, or the dotted path of a Transport class
    dtype: str = "fp32"  # of gradients in messages: fp32 | bf16; sums that a worker forms are fp32
    state: str = "replicated"  # or sharded: each worker has optimizer state for its shard of each bucket
    redundancy: str = "mirror"  # of sharded state in an elastic job: mirror | snapshot | none
    snapshot_every: int = 50  # steps between snapshots
    bucket_mb: float | None = DEFAULT_BUCKET_MB  # MiB of fp32 gradients in a bucket, at most; None: as measured
    reproducible: bool = False  # the same bits for any number of workers
    tree: str = "binary"  # the shape of schedule `tree`, a name in kfuse.comm.transports.TREES
    sync: str = "ssgd"  # how the workers keep together: see kfuse.comm.sync; kf.fit and kf.DataLoader only
    outer_lr: float = 1.0  # with sync=local:N, of the step from the common model to the mean of the workers'
    outer_momentum: float = 0.0  # Nesterov's, of these steps (DiLoCo: outer_lr 0.7, outer_momentum 0.9); 0.0: none
    sma_alpha: float | None = None  # with sync=sma: how strongly models are drawn together; None: 1 / workers
    sma_momentum: float = 0.9  # of the central model
    check_every: int | None = 100  # steps between comparisons of all ranks' parameters; None: never
    audit_every: int | None = None  # steps between runs of a micro-batch on a second worker, to compare; None: never
    nccl_high_priority: bool = True  # messages go before kernels that wait for a place on the GPU
    nccl_min_ctas: int | None = None  # thread blocks of a message's kernel, at least; None: as NCCL chooses
    nccl_max_ctas: int | None = None  # at most
    nccl_cga_cluster_size: int | None = None  # thread blocks in a cluster
    nccl_cta_policy: str | None = None  # default | efficiency | zero

    @classmethod
    def configured(cls, config: Mapping[str, Any]) -> CommOptions:
        """Those of a configuration of the command line, plain values. Raises ValueError for what does not go together.

        A setting of the section `comm` that is no field here is read by others (`timeout_s`).
        """
        comm, names = config["comm"], {each.name for each in fields(cls)}
        of_elastic = {name: config["elastic"][name] for name in ("redundancy", "snapshot_every")}
        of_comm = {name: value for name, value in comm.items() if name in names}
        return cls(**{**of_comm, "schedule": comm["_target_"] or comm["schedule"], **of_elastic})

    def __post_init__(self) -> None:
        self._check_each()
        self._check_together()

    def _check_each(self) -> None:
        """Raises ValueError for a value that no other setting makes right."""
        if self.state not in ("replicated", "sharded"):
            raise ValueError(f"comm.state={self.state!r}: must be one of replicated, sharded")
        if self.redundancy not in ("mirror", "snapshot", "none"):
            raise ValueError(f"elastic.redundancy={self.redundancy!r}: must be one of mirror, snapshot, none")
        if self.snapshot_every < 1:
            raise ValueError(f"elastic.snapshot_every={self.snapshot_every!r}: must be at least 1")
        if self.dtype not in ("fp32", "bf16"):
            raise ValueError(f"comm.dtype={self.dtype!r}: must be one of fp32, bf16")
        if not 0 < self.outer_lr < math.inf:
            raise ValueError(f"comm.outer_lr={self.outer_lr}: must be above 0")
        if self.sma_alpha is not None and not 0 < self.sma_alpha <= 1:
            raise ValueError(f"comm.sma_alpha={self.sma_alpha}: must be above 0 and at most 1, or None for 1 / workers")
        for name in ("outer_momentum", "sma_momentum"):
            if not 0 <= (momentum := getattr(self, name)) < 1:
                raise ValueError(f"comm.{name}={momentum}: must be at least 0 and below 1")
        for name in ("check_every", "audit_every"):
            if (every := getattr(self, name)) is not None and every < 1:
                raise ValueError(f"comm.{name}={every!r}: must be at least 1, or None for never")
        for name in ("nccl_min_ctas", "nccl_max_ctas"):
            if (ctas := getattr(self, name)) is not None and ctas < 1:
                raise ValueError(f"comm.{name}={ctas!r}: must be at least 1, or None for NCCL's own choice")
        cluster = self.nccl_cga_cluster_size
        if cluster is not None and not 0 <= cluster <= 8:
            raise ValueError(f"comm.nccl_cga_cluster_size={cluster!r}: must be 0 to 8, or None for NCCL's own choice")
        if (policy := self.nccl_cta_policy) not in (None, *CTA_POLICIES):
            raise ValueError(f"comm.nccl_cta_policy={policy!r}: must be one of {', '.join(CTA_POLICIES)}, or None")
        if self.bucket_mb is not None and not self.bucket_mb > 0:
            raise ValueError(f"comm.bucket_mb={self.bucket_mb!r}: must be above 0, or None for a measured choice")

    def _check_together(self) -> None:
        """Raises ValueError for values that are allowed each, but not together.

        The command line makes these options too, before a worker starts, and prints these messages. So none of them
        spells None, which is null there.
        """
        self.transport()  # raises where there is none
        if self.reproducible and self.dtype != "fp32":
            raise ValueError(f"comm.dtype={self.dtype}: must be fp32 with comm.reproducible=true")
        if self.schedule == "symmetric" and self.dtype != "fp32":
            raise ValueError(f"comm.dtype={self.dtype}: must be fp32 with comm.schedule=symmetric")
        if self.synchronisation.mode != "ssgd" and self.reproducible:
            raise ValueError(f"comm.sync={self.sync}: must be ssgd with comm.reproducible=true")
        if self.synchronisation.mode != "ssgd" and self.sharded:
            raise ValueError(f"comm.sync={self.sync}: must be ssgd with comm.state=sharded")
        if self.audit_every is not None and not self.reproducible:
            raise ValueError(f"comm.reproducible=false: must be true with comm.audit_every={self.audit_every}")
        least, most = self.nccl_min_ctas, self.nccl_max_ctas
        if least is not None and most is not None and most < least:
            raise ValueError(f"comm.nccl_max_ctas={most}: must be at least comm.nccl_min_ctas={least}")
        if self.bucket_mb is None and (self.reproducible or self.sharded):
            setting = "comm.reproducible=true" if self.reproducible else "comm.state=sharded"
            raise ValueError(f"comm.bucket_mb: must be a number with {setting}")

    @property
    def synchronisation(self) -> Sync:
        """`sync`, parsed."""
        return Sync.parse(self.sync)

    def transport(self, schedule: str | None = None) -> str:
        """The name of the transport for `schedule`, None: for the configured one; for `auto` `transports.default`.

        Raises ValueError for an unknown name, and for one that these options rule out.
        """
        name = schedule or self.schedule
        transports.check(name, self.reproducible, self.sharded)
        return transports.default(self.reproducible, self.sharded, self.dtype) if name == "auto" else name

    @property
    def wire_bytes(self) -> int:
        """Bytes an element of gradients in messages."""
        return 4 if self.dtype == "fp32" else 2

    def bucket_elements(self, bucket_mb: float | None = None) -> int:
        """Most elements of a bucket of so many MiB; None: of the configured size, or of the default one."""
        return max(1, int((bucket_mb or self.bucket_mb or DEFAULT_BUCKET_MB) * 2**20 / 4))

    def has_bucket_apart(self, buffers: Sequence[Tensor]) -> bool:
        """Whether the last bucket has no gradients: only these buffers, whose changes are averaged, and the tail. They
        need fp32, and all workers need all of them.
        """
        return bool(buffers) or self.dtype != "fp32" or self.sharded

    @property
    def has_outer_step(self) -> bool:
        """Whether averages of local SGD are followed by an outer step; without one they are the new model."""
        return (self.outer_lr, self.outer_momentum) != (1.0, 0.0)

    @property
    def is_definite(self) -> bool:
        """Whether schedule and bucket size are named."""
        return self.schedule != "auto" and self.bucket_mb is not None

    @property
    def sharded(self) -> bool:
        """Whether optimizer state is sharded."""
        return self.state == "sharded"


@dataclass(frozen=True)
class StepPlan:
    """A step as its training loop knows it before the first forward: total samples, each worker's micro-batches."""

    samples: int
    ranges: tuple[range, ...]
    """By rank, the micro-batches that the worker is to run."""
    local: int | None = None
    """This worker's own samples, if each worker is to update with its own mean gradient (local SGD)."""
    announcement: Announcement = NOTHING_ANNOUNCED
    """What this worker would announce; only rank 0's is sent."""
    times: tuple[float, float] = (0.0, 0.0)
    """Seconds that the step before took this worker, and the part of them that it waited for data; 0.0: unknown. Only
    rank 0's are sent."""
    fisher: Tensor | None = None
    """fp32 [2] on the device: trace and largest entry of the diagonal Fisher information by this worker's optimizer
    state; None: not in this step. Only rank 0's is sent."""
    by_weight: bool = False
    """Micro-batches weigh otherwise than by their samples; the sum of the weights is known once the step is reduced."""
    audited: int | None = None
    """The micro-batch of the step whose gradient's digest its worker takes (`AuditedGradient`); None: none."""

    @property
    def micro_batches(self) -> int:
        """M, over all workers."""
        return sum(map(len, self.ranges))


@dataclass(frozen=True)
class Reduced:
    """The result of a step's reduction, on the device. The mean gradient is in the buckets."""

    record: Tensor
    """float64 [RECORD_SLOTS + workers * RANK_SLOTS], the step's figures: see `kfuse.comm.tail.Tail.record`."""
    used: Tensor | None
    """fp32 [parameters]: micro-batches (over all workers) that gave the parameter a gradient. None: this worker's gave
    every parameter one."""
    unused: frozenset[int]
    """Parameters that none of this worker's micro-batches gave a gradient: what the host knows without the device."""
    implicit: bool
    """From bare backwards: no sample counts were given."""
    local: bool
    """Gradients, and so |gbar|^2, are this worker's own."""
    planned: bool
    """A training loop had announced the step."""
    idle: bool
    """This worker had no micro-batch in the step."""


class _Engine(Protocol):
    """What a micro-batch calls in the engine: as it begins, ends, or fails."""

    def open_micro_batch(self, micro_batch: MicroBatch) -> None: ...
    def close_micro_batch(self) -> None: ...
    def abort(self) -> None: ...


class MicroBatch:
    """Context of one micro-batch. Set `loss` (its mean loss, detached) before backward to have it averaged too."""

    def __init__(self, engine: _Engine, weight: float, last: bool, several_backwards: bool = False) -> None:
        """weight: in the mean gradient: its samples, if not told otherwise. last: of this worker's in the step.

        several_backwards: gradients add up in `p.grad` until the micro-batch closes.
        """
        self._engine, self.weight, self.last, self.several_backwards = engine, weight, last, several_backwards
        self.loss: Tensor | float | None = None
        self.figures: Sequence[Tensor | float] = ()
        """Scalars that are averaged like the loss: at most as many as the engine has slots for."""

    def __enter__(self) -> MicroBatch:
        self._engine.open_micro_batch(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self._engine.close_micro_batch()
        else:
            self._engine.abort()


@dataclass
class KeptStep:
    """The last step's reduced gradients, kept until the next step begins. If a worker is lost during the update, the
    survivors finish it from these (`Engine.resume`).
    """

    step: int
    """Its number."""
    now: StepState
    used: Tensor | None
    """As `Reduced.used`."""
    changes: Sequence[Tensor]
    """The averaged buffers' summed changes, in the order of their bucket."""
    total_weight: Tensor | None
    """What these sums are to be divided by; None: they are means."""
    reduced: Reduced | None = None
    """None: not known here, as some worker's sums of squares have not arrived."""
    updated: bool = False
    """The optimizer has updated this worker's part."""
    resumed: bool = False
    """It is being ended in another group: what is updated is not shared."""


WRITE, ADD = LeafStep(0, False, ()), LeafStep(0, True, ())
"""Without the canonical tree: what a worker does with its first micro-batch, and with each further one."""


@dataclass
class StepState:
    """The state of the step under way."""

    plan: StepPlan | None = None
    leaves: Sequence[LeafStep] | None = None
    """With the canonical tree: how this worker sums its micro-batches."""
    expected: int | None = None
    """Micro-batches that this worker has in the plan."""
    audited: int | None = None
    """Which of this worker's micro-batches, from 0, has the digest of its gradient taken."""
    implicit: bool = False
    """A bare backward, outside opt.micro_batch."""
    parts: int = 1
    """Bare backwards in the step, each of a loss divided by their number."""
    current: MicroBatch | None = None
    leaf: LeafStep = WRITE
    scale: float = 1.0
    done: int = 0
    """Micro-batches finished."""
    told: bool = False
    """The tail has what only this rank writes, and the announcement."""
    weight: float = 0.0
    """Sum of their weights."""
    closed: bool = False
    """The last one is finished, or under way with all of its buckets packed."""
    missed: set[int] = field(default_factory=set)
    """Parameters that the current micro-batch gave no gradient."""
    unused: set[int] = field(default_factory=set)
    """Parameters that none of the finished micro-batches gave a gradient."""

    def open(self, micro_batch: MicroBatch, size: int, untaken: bool) -> None:
        """Begins a micro-batch on one of `size` workers. untaken: the optimizer has not taken the last step's result.

        Raises RuntimeError where none may begin now.
        """
        if (untaken or self.closed) and self.parts > 1:
            raise RuntimeError(
                f"opt.accumulate({self.parts}): another backward after the {self.parts} of a step: call opt.step() and "
                "opt.zero_grad() first"
            )
        if untaken or self.closed:
            raise RuntimeError(
                f"another backward before opt.step(): {REMEDY}. Where the earlier one was for another optimizer, as a "
                "GAN's generator's is, call opt.zero_grad() before this one"
            )
        if self.current is not None:
            raise RuntimeError("opt.micro_batch is already open: micro-batches do not nest")
        if self.expected is not None and self.done >= self.expected:
            raise RuntimeError(f"the plan has {self.expected} micro-batches for this worker: one more was begun")
        self.current = micro_batch
        self.leaf = self.leaves[self.done] if self.leaves is not None else ADD if self.done else WRITE
        if self.implicit:
            self.scale = 1.0 / size
        elif self.plan is not None and self.weights_are_known:
            self.scale = micro_batch.weight / (self.plan.local or self.plan.samples)
        else:
            self.scale = float(micro_batch.weight)

    def count(self, last: bool) -> None:
        """The current micro-batch has all of its gradients. Raises RuntimeError if the plan has more than were run."""
        assert self.current is not None
        self.weight += self.current.weight
        self.unused = self.unused & self.missed if self.done else self.missed
        self.missed = set()
        self.done += 1
        self.closed = last
        if last and self.expected not in (None, self.done):
            raise RuntimeError(f"the plan has {self.expected} micro-batches for this worker: {self.done} were run")

    @property
    def begun(self) -> bool:
        """A micro-batch has been run, or is being run."""
        return self.done > 0 or self.current is not None

    @property
    def is_local(self) -> bool:
        """Gradients stay with their worker; only the tail is reduced."""
        return self.plan is not None and self.plan.local is not None

    @property
    def weights_are_known(self) -> bool:
        """Gradients are scaled to their mean while packing, since the sum of the weights is known before."""
        return self.implicit or (self.plan is not None and not self.plan.by_weight)
