"""How gradients are reduced: the options of an engine, and the names of transports and trees."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

# Behind what is said of a worker that did not come in time.
BUSY = "if it was only busy, as with an evaluation: a longer comm.timeout_s, in a script kf.init(comm_timeout_s=...)"

TRANSPORT_NAMES = ("allreduce", "all_to_all", "reduce_scatter", "tree", "symmetric")
TO_SHARDS = ("all_to_all", "reduce_scatter", "symmetric")  # leave each worker its shard of the sum: for sharded state
CONTRIBUTIONS = ("all_to_all", "symmetric")  # bring all contributions, to be added up in one order: reproducible sums
TREES = ("binary", "star", "host", "latency")  # the shapes that the transport `tree` knows by name
MODES = ("ssgd", "sma", "pair")  # of comm.sync, those that a word names
_FORMS = "local:{0}|pair:{0},{0}".format("0*([1-9][0-9]{0,5})")  # the patterns of `local:N`, `pair:N,M`


@dataclass(frozen=True)
class Sync:
    """How the workers keep together, and how many steps lie between synchronisations: with `local:N` and `pair:N,M` N,
    else 1. `kfuse.settings.declared.CommSettings` says what each mode does.
    """

    mode: str = "ssgd"  # "local", or one of `MODES`
    every: int = 1
    far: int | None = None  # M of `pair:N,M`

    @staticmethod
    def parse(text: object) -> Sync:
        """Returns what a text ("ssgd", "local:8", "pair:1,8") stands for. Raises ValueError for anything else."""
        if text in MODES:
            return Sync(str(text))
        if found := re.fullmatch(_FORMS, str(text)):
            local, near, far = (int(each or 0) for each in found.groups())
            if local:
                return Sync("local", local)
            if near <= far:
                return Sync("pair", near, far)
        known = f"{', '.join(MODES)}, local:N with N from 1 to 999999, pair:N,M with N from 1 to M, M up to 999999"
        raise ValueError(f"comm.sync={text}: must be one of {known}")

    def __str__(self) -> str:
        """The text that `parse` takes."""
        if self.far is not None:
            return f"{self.mode}:{self.every},{self.far}"
        return f"{self.mode}:{self.every}" if self.mode == "local" else self.mode


@dataclass(frozen=True)
class CommOptions:
    """How gradients are reduced, with the defaults. `kfuse.settings.declared.CommSettings` explains and checks them.

    A schedule is also the name of a transport, or the dotted path of a Transport class.
    """

    schedule: str = "auto"
    dtype: str = "fp32"
    state: str = "replicated"
    redundancy: str = "mirror"
    bucket_mb: float = 25.0
    reproducible: bool = False
    tree: str = "binary"
    sync: str = "ssgd"
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    sma_alpha: float | None = None
    sma_momentum: float = 0.9
    check_every: int | None = 100
    audit_every: int | None = None
    audit_on_corruption: str = "report"

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> CommOptions:
        """Returns those among `settings`, which have them by their names there: see `named`."""
        return cls(**{name.partition("_")[2]: settings[name] for name in cls().named()})

    def named(self) -> dict[str, Any]:
        """Returns them by their names as settings: `comm_sync`, `elastic_redundancy`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {f"{'elastic' if name == 'redundancy' else 'comm'}_{name}": value for name, value in values.items()}

    @property
    def synchronisation(self) -> Sync:
        return Sync.parse(self.sync)

    def transport(self, schedule: str | None = None) -> str:
        """Returns the transport's name for `schedule`, or the configured one; for `auto` that is its default.

        Reproducible sums need every contribution at hand, and only all_to_all adds up rounded messages in fp32.
        """
        name = schedule or self.schedule
        if name != "auto":
            return name
        if self.reproducible or self.dtype != "fp32":
            return "all_to_all"
        return "reduce_scatter" if self.sharded else "allreduce"

    @property
    def bucket_elements(self) -> int:
        """Most elements of a bucket."""
        return max(1, int(self.bucket_mb * 2**20 / 4))

    @property
    def leaves_choice(self) -> bool:
        """Whether measured messages choose the schedule: where that does not change what was promised."""
        fixed = self.reproducible or self.sharded or self.dtype != "fp32" or self.synchronisation.mode == "pair"
        return self.schedule == "auto" and not fixed

    @cached_property
    def sharded(self) -> bool:
        """Whether each worker has a part of the optimizer's state. Steps ask again and again."""
        return self.state == "sharded"
