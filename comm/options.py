"""`CommOptions`: how gradients are reduced; and what each transport of kfuse can do. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kfuse.comm.settings import DEFAULTS
from kfuse.comm.sync import Sync


@dataclass(frozen=True)
class Properties:
    """What a transport of kfuse does with a bucket."""

    to_shards: bool
    """Its exchange leaves each worker its shard of the sum, as `comm.state=sharded` needs it; else the whole sum."""
    contributions: bool
    """It brings all contributions, and kfuse adds them up in one order, as `comm.reproducible=true` needs it."""


PROPERTIES = {
    "allreduce": Properties(False, False),
    "all_to_all": Properties(True, True),
    "reduce_scatter": Properties(True, False),
    "tree": Properties(False, False),
    "symmetric": Properties(True, True),
}
TRANSPORT_NAMES = tuple(PROPERTIES)
TREES = ("binary", "star", "host", "latency")
"""The shapes that the transport `tree` knows by name."""


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
    bucket_mb: float = DEFAULTS["comm_bucket_mb"]
    reproducible: bool = DEFAULTS["comm_reproducible"]
    tree: str = DEFAULTS["comm_tree"]
    sync: str = DEFAULTS["comm_sync"]
    outer_lr: float = DEFAULTS["comm_outer_lr"]
    outer_momentum: float = DEFAULTS["comm_outer_momentum"]
    sma_alpha: float | None = DEFAULTS["comm_sma_alpha"]
    sma_momentum: float = DEFAULTS["comm_sma_momentum"]
    check_every: int | None = DEFAULTS["comm_check_every"]
    audit_every: int | None = DEFAULTS["comm_audit_every"]

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
        """Returns the transport's name for `schedule`; None: for the configured one.

        For `auto` that is the default where messages have not been measured. Reproducible sums need every contribution
        at hand, and only all_to_all adds up bf16 messages in fp32.
        """
        name = schedule or self.schedule
        if name != "auto":
            return name
        if self.reproducible or self.dtype == "bf16":
            return "all_to_all"
        return "reduce_scatter" if self.sharded else "allreduce"

    @property
    def wire_bytes(self) -> int:
        """Bytes an element of gradients in messages."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def bucket_elements(self) -> int:
        """Most elements of a bucket."""
        return max(1, int(self.bucket_mb * 2**20 / 4))

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
    def leaves_choice(self) -> bool:
        """Whether measured messages choose the schedule: where that does not change what was promised.

        Reproducible sums and bf16 messages need all_to_all, sharded state its own program; with pair averaging nobody
        waits for another worker.
        """
        fixed = self.reproducible or self.sharded or self.dtype != "fp32" or self.synchronisation.mode == "pair"
        return self.schedule == "auto" and not fixed

    @property
    def sharded(self) -> bool:
        """Whether optimizer state is sharded."""
        return self.state == "sharded"
