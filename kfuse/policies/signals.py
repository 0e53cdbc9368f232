"""What policies see (`Signals`), what they may ask for (`Decision`), and their interface (`BasePolicy`)."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from kfuse.statistics.figures import FIGURES, Measured, StepSettings

SYNC_MAX = 2**20
"""Largest number of steps between synchronisations. Announcements are float32, which holds it exactly."""
BATCH_MAX = 2**24
"""Largest batch size, in samples: float32 holds every whole number up to it."""
DECISION_LAG = 4
"""Steps from the one that was measured to the first one that a decision on it applies to. Its statistics are read after
the next step. The decision is announced with the step after that. The announcement is read one step later."""


@dataclass(frozen=True)
class Bounds:
    """The configured limits, inclusive: batch sizes in samples, workers in processes."""

    batch_min: int
    batch_max: int
    workers_min: int
    workers_max: int

    def __post_init__(self) -> None:
        for name in ("batch", "workers"):
            low, high = getattr(self, f"{name}_min"), getattr(self, f"{name}_max")
            if not 1 <= low <= high:
                raise ValueError(f"{name}.min={low}, {name}.max={high}: must be 1 <= min <= max")
        if self.batch_max > BATCH_MAX:
            raise ValueError(f"batch.max={self.batch_max}: must be at most {BATCH_MAX}")


def _about(unit: str, help: str) -> dict[str, str]:
    """The description of a field of `Signals`, like those of FIGURES."""
    return {"unit": unit, "help": help}


@dataclass(frozen=True, kw_only=True)
class Signals(Measured, StepSettings):
    """One finished optimizer step, as policies see it. Identical on every worker; None is "unknown".

    It also has the fields of `Measured` (loss, noise_scale, ...) and of `StepSettings` (epoch, batch_size, ...).
    """

    step: int = field(metadata=FIGURES["step"])
    micro_batch: int = field(metadata=_about("samples", "Samples per micro-batch: the unit the batch size changes by"))
    throughput: tuple[float | None, ...] = field(
        default=(),
        metadata=_about("", "By rank, micro-batches a second over the median worker's; below 0.8 one is a straggler"),
    )
    corrupt_workers: tuple[int, ...] = field(
        default=(), metadata=_about("", "Ranks of workers that audits found to compute wrongly; see `comm.audit_every`")
    )
    eval_accuracy: float | None = field(
        default=None, metadata=_about("", "The latest evaluation's accuracy, in [0, 1]")
    )
    bounds: Bounds = field(metadata=_about("", "The configured limits: batch_min, batch_max, workers_min, workers_max"))

    @property
    def in_force_at(self) -> int:
        """The first step that a decision on these signals applies to."""
        return self.step + DECISION_LAG


@dataclass(frozen=True)
class Decision:
    """What a policy asks for. A field left at None asks for no change.

    Raises TypeError where batch_size, workers, sync or replace is not a whole number. Values out of range are no
    error: `clipped` handles them, since the bounds belong to the run and not to the policy.
    """

    batch_size: int | None = None
    """Samples of an optimizer step."""
    lr_scale: float | None = None
    """Factor on the learning rate. It replaces the present factor."""
    workers: int | None = None
    """Worker count."""
    sync: int | None = None
    """Steps between synchronisations. 1: every step's gradients are reduced. More: local SGD (Stich 2019)."""
    topology: str | None = None
    """How buckets are reduced: allreduce, all_to_all or tree."""
    replace: int | None = None
    """Rank of a worker that a new one replaces."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "workers", "sync", "replace"):
            value = getattr(self, name)
            if value is None:
                continue
            try:
                object.__setattr__(self, name, operator.index(value))
            except TypeError:
                raise TypeError(f"Decision {name}={value!r}: must be a whole number or None") from None
        if self.lr_scale is not None:
            object.__setattr__(self, "lr_scale", float(self.lr_scale))

    @property
    def is_empty(self) -> bool:
        """Whether nothing at all is asked for."""
        return all(getattr(self, field.name) is None for field in fields(self))

    def merged(self, other: Decision) -> Decision:
        """Returns both decisions as one. Where both set a field, `other` is used."""
        asked = {field.name: getattr(other, field.name) for field in fields(other)}
        return replace(self, **{name: value for name, value in asked.items() if value is not None})

    def clipped(self, bounds: Bounds) -> tuple[Decision, list[str]]:
        """Returns the nearest decision within `bounds`, and a note for each field that changed.

        An lr_scale that is not finite and positive has no nearest allowed value: it is dropped.
        """
        notes: list[str] = []
        batch_size = _clip("batch_size", self.batch_size, bounds.batch_min, bounds.batch_max, notes)
        workers = _clip("workers", self.workers, bounds.workers_min, bounds.workers_max, notes)
        sync = _clip("sync", self.sync, 1, SYNC_MAX, notes)
        lr_scale = self.lr_scale
        if lr_scale is not None and not (math.isfinite(lr_scale) and lr_scale > 0):
            notes.append(f"lr_scale {lr_scale} dropped: it must be finite and positive")
            lr_scale = None
        return replace(self, batch_size=batch_size, workers=workers, sync=sync, lr_scale=lr_scale), notes


class BasePolicy:
    """A rule that adapts training while it runs: KungFu's hooks (Mai et al., OSDI 2020) and a pure function.

    Override any hook, `decide`, or both. The hooks run on every worker at the same steps, and may use kfuse's
    module-level functions (`kf.allreduce`, `kf.resize`, ...). `decide` is a function of the signals and the policy's
    attributes only, without side effects. So a policy can be replayed offline, and a step that is repeated after a
    failure gets the same decision.
    """

    def before_train(self) -> None:
        """Called once, before the first step."""

    def before_epoch(self) -> None:
        """Called before the first step of each epoch."""

    def before_step(self) -> None:
        """Called before each optimizer step."""

    def after_step(self) -> None:
        """Called after each optimizer step."""

    def after_epoch(self) -> None:
        """Called after the last step of each epoch."""

    def after_train(self) -> None:
        """Called once, after the last step."""

    def initial(self) -> Decision | None:
        """Returns what to begin with. Called once, on rank 0, before the first step of a run that resumes no other.

        Batch size, learning-rate factor and synchronisation apply from the first step on. More workers join when
        they are ready.
        """
        return None

    def decide(self, signals: Signals) -> Decision | None:
        """Returns what to change after a finished step; None for nothing.

        A change takes some steps to appear in the signals, for example because a new worker must start. A policy may
        ask for the same change again meanwhile.
        """
        return None

    def state_dict(self) -> dict[str, Any]:
        """Returns what a joining worker or a resumed run needs of this policy.

        That is a copy of the instance attributes that are plain values (None, bool, int, float, str, and lists, tuples
        and dicts of those). Override it in a policy that keeps its state in attributes of other types.
        """
        state = {}
        for name, value in vars(self).items():
            try:
                state[name] = _plain(value)
            except TypeError:
                continue
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the attributes that `state_dict` returned, here or in another process."""
        for name, value in state.items():
            setattr(self, name, _plain(value))


class NoPolicy(BasePolicy):
    """Leaves batch size, learning rate and worker count as configured."""


def check_whole(key: str, value: object, least: int) -> None:
    """Raises ValueError, which names `key`, unless the value is a whole number, at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{key}={value!r}: must be a whole number, at least {least}")


def check_positive(key: str, value: object) -> None:
    """Raises ValueError, which names `key`, unless the value is a finite number above 0."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not (math.isfinite(value) and value > 0):
        raise ValueError(f"{key}={value!r}: must be a finite number above 0")


def _clip(name: str, value: int | None, low: int, high: int, notes: list[str]) -> int | None:
    if value is None or low <= value <= high:
        return value
    nearest = min(max(value, low), high)
    notes.append(f"{name} {value} clipped to {nearest}: must be {low} to {high}")
    return nearest


def _plain(value: Any) -> Any:
    """A copy of `value` in builtin types only. Raises TypeError where that cannot be."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):  # a subclass (numpy.float64 is a float) becomes its builtin
        if isinstance(value, kind):
            return kind(value)
    if type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    if type(value) is dict:
        return {_plain(key): _plain(item) for key, item in value.items()}
    raise TypeError(f"{type(value).__name__} is not a plain value")
