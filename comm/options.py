"""`CommOptions`: how gradients are reduced. Imports no torch, as the command line checks settings before it starts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from kfuse.comm import transport_names
from kfuse.comm.sync import Sync

CTA_POLICIES = ("default", "efficiency", "zero")
"""What `nccl_cta_policy` may be, in the order of NCCL's numbers for them (NCCL_CTA_POLICY_* in nccl.h)."""

DEFAULT_BUCKET_MB = 25.0
"""DDP's, too."""


@dataclass(frozen=True)
class CommOptions:
    """How gradients are reduced (the `comm.*` settings). Raises ValueError for what is not allowed."""

    schedule: str = "auto"  # or a name in kfuse.comm.transport_names.NAMES, or the dotted path of a Transport class
    dtype: str = "fp32"  # of gradients in messages: fp32 | bf16; sums that a worker forms are fp32
    state: str = "replicated"  # or sharded: each worker has optimizer state for its shard of each bucket
    redundancy: str = "mirror"  # of sharded state in an elastic job: mirror | snapshot | none
    snapshot_every: int = 50  # steps between snapshots
    bucket_mb: float | None = DEFAULT_BUCKET_MB  # MiB of fp32 gradients in a bucket, at most; None: as measured
    reproducible: bool = False  # the same bits for any number of workers
    tree: str = "binary"  # the shape of schedule `tree`, a name in kfuse.comm.transport_names.TREES
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
        """The name of the transport for `schedule`, None: for the configured one; for `auto` `transport_names.default`.

        Raises ValueError for an unknown name, and for one that these options rule out.
        """
        name = schedule or self.schedule
        transport_names.check(name, self.reproducible, self.sharded)
        return transport_names.default(self.reproducible, self.sharded, self.dtype) if name == "auto" else name

    @property
    def wire_bytes(self) -> int:
        """Bytes an element of gradients in messages."""
        return 4 if self.dtype == "fp32" else 2

    def bucket_elements(self, bucket_mb: float | None = None) -> int:
        """Most elements of a bucket of so many MiB; None: of the configured size, or of the default one."""
        return max(1, int((bucket_mb or self.bucket_mb or DEFAULT_BUCKET_MB) * 2**20 / 4))

    def has_bucket_apart(self, buffers: Sequence[object]) -> bool:
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
