"""`CommOptions`: how gradients are reduced. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kfuse.comm import transport_names
from kfuse.comm.settings import DEFAULTS
from kfuse.comm.sync import Sync

CTA_POLICIES = ("default", "efficiency", "zero")
"""What `nccl_cta_policy` may be, in the order of NCCL's numbers for them (NCCL_CTA_POLICY_* in nccl.h)."""

DEFAULT_BUCKET_MB: float = DEFAULTS["comm_bucket_mb"]


@dataclass(frozen=True)
class CommOptions:
    """The settings of `CommSettings`, which explains them, without their sections' names. `kfuse.settings` checks them.

    A schedule is also the name of a transport, or the dotted path of a Transport class.
    """

    schedule: str = DEFAULTS["comm_schedule"]
    dtype: str = DEFAULTS["comm_dtype"]
    state: str = DEFAULTS["comm_state"]
    redundancy: str = DEFAULTS["elastic_redundancy"]
    snapshot_every: int = DEFAULTS["elastic_snapshot_every"]
    bucket_mb: float | None = DEFAULTS["comm_bucket_mb"]
    reproducible: bool = DEFAULTS["comm_reproducible"]
    tree: str = DEFAULTS["comm_tree"]
    sync: str = DEFAULTS["comm_sync"]
    outer_lr: float = DEFAULTS["comm_outer_lr"]
    outer_momentum: float = DEFAULTS["comm_outer_momentum"]
    sma_alpha: float | None = DEFAULTS["comm_sma_alpha"]
    sma_momentum: float = DEFAULTS["comm_sma_momentum"]
    check_every: int | None = DEFAULTS["comm_check_every"]
    audit_every: int | None = DEFAULTS["comm_audit_every"]
    nccl_high_priority: bool = DEFAULTS["comm_nccl_high_priority"]
    nccl_min_ctas: int | None = DEFAULTS["comm_nccl_min_ctas"]
    nccl_max_ctas: int | None = DEFAULTS["comm_nccl_max_ctas"]
    nccl_cga_cluster_size: int | None = DEFAULTS["comm_nccl_cga_cluster_size"]
    nccl_cta_policy: str | None = DEFAULTS["comm_nccl_cta_policy"]

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> CommOptions:
        """Returns those among `settings`, by name. `comm_timeout_s` is the group's."""
        return cls(**{name.partition("_")[2]: settings[name] for name in DEFAULTS if name != "comm_timeout_s"})

    def named(self) -> dict[str, Any]:
        """Returns them by their names as settings: `comm_sync`, `elastic_redundancy`."""
        return {name: getattr(self, name.partition("_")[2]) for name in DEFAULTS if name != "comm_timeout_s"}

    @property
    def synchronisation(self) -> Sync:
        """`sync`, parsed."""
        return Sync.parse(self.sync)

    def transport(self, schedule: str | None = None) -> str:
        """Returns the transport's name for `schedule`, None: for the configured one; for `auto` the default."""
        name = schedule or self.schedule
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
