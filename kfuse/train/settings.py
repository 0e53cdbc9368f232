"""One training's settings, resolved from those that a script or a command gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kfuse.data.fetching import Loading
from kfuse.membership import Session
from kfuse.policies.signals import Bounds
from kfuse.settings.tree import BATCH_MAX, SETTINGS, WORKERS_MAX, by_key
from kfuse.train.lr_schedule import LRSchedule

_OWN = {"batch_min", "workers_balance", "train_clip_norm", "observe_ledger", "lr_base", "workers_bounds", "loading"}


@dataclass(frozen=True)
class Settings:
    """One training's settings, which `kfuse.settings.tree` explains; those that follow from others have values."""

    seed: int
    batch_size: int
    batch_micro: int
    batch_micro_max: int | None
    batch_min: int
    batch_max: int
    workers_balance: bool
    lr_scaling: str
    lr_warmup_steps: int
    lr_decay: str
    lr_decay_fraction: float
    train_epochs: int | None
    train_steps: int | None
    train_clip_norm: float | None
    train_precision: str
    train_eval_every: int | None
    train_target_accuracy: float | None
    observe_ledger: bool
    lr_base: float | None
    """The configured learning rate, which wins over a checkpoint's; None: group["lr"] is the user's."""
    workers_bounds: tuple[int, int]
    """Policies' requests for workers are clipped to them; the supervisor applies the job's own limits."""
    loading: Loading = field(default_factory=Loading)

    @classmethod
    def of(
        cls,
        values: Mapping[str, Any],
        lr_base: float | None = None,
        workers_bounds: tuple[int, int] = (1, WORKERS_MAX),
        worker_init_fn: Callable[[int], object] | None = None,
    ) -> Settings:
        """values: by name; the others have their defaults."""
        given = {name: leaf.default for name, leaf in SETTINGS.items()} | dict(values)
        size, steps, epochs = given["batch_size"], given["train_steps"], given["train_epochs"]
        micro = given["batch_micro"] or max(1, size // 4)
        given |= {
            "batch_micro": micro,
            "batch_min": given["batch_min"] or min(micro, size),
            "batch_max": given["batch_max"] or min(64 * size, BATCH_MAX),
            "train_epochs": 1 if epochs is None and steps is None else epochs,
            "lr_base": lr_base,
            "workers_bounds": workers_bounds,
            "loading": Loading(given["data_workers"], given["data_prefetch"], worker_init_fn),
        }
        return cls(**{each.name: given[each.name] for each in fields(cls)})

    @property
    def bounds(self) -> Bounds:
        """Returns what policies' requests are clipped to."""
        return Bounds(self.batch_min, self.batch_max, *self.workers_bounds)

    def micro_batch_of(self, batch_size: int, workers: int) -> int:
        """Returns the samples of each micro-batch in a step of `batch_size` samples; the last one may have fewer.

        A multiple of `batch_micro`, at most `batch_micro_max`. A larger batch than the first one has at least as many
        micro-batches, so that the statistics stay as good; and as many on each worker, where whole multiples allow it.
        """
        unit, most = self.batch_micro, self.batch_micro_max or self.batch_micro
        count = max(-(-self.batch_size // unit), -(-batch_size // most))
        count = -(-count // workers) * workers
        size = -(-batch_size // (count * unit)) * unit
        if -(-batch_size // size) < count:  # rounded up, too few are left
            size -= unit
        return max(size, unit)

    def shared(self) -> dict[str, Any]:
        """Returns the settings, by name, that must be equal on all workers, as each plans by them."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in _OWN}

    def schedule(self, samples: int | None) -> LRSchedule:
        """Returns the learning rate's schedule over this training, of `samples` an epoch; None: a stream."""
        length = None if self.train_epochs is None or samples is None else self.train_epochs * samples
        return LRSchedule(
            self.lr_scaling,
            self.lr_warmup_steps,
            self.lr_decay,
            self.batch_size,
            length,
            self.train_steps,
            self.lr_decay_fraction,
        )


def session_facts(session: Session) -> dict[str, Any]:
    """Returns what rules ask of a session."""
    return by_key(session.comm.named()) | {"job": "elastic" if session.elastic else "fixed"}
