"""What policies see (`Signals`), what they may ask for (`Decision`), and their interface (`BasePolicy`)."""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

from kfuse.statistics.figures import FIGURES, METRICS, Measured, StepSettings, optional, required

_LOG = logging.getLogger("kfuse")
_UNDER_WAY: set[int] = set()  # policies whose state is being put together

# The range of learning rates and of factors on them: beyond it float32 holds 0, a few bits, or infinity.
FP32_MIN, FP32_MAX = 2.0**-126, (2 - 2**-23) * 2.0**127
FP32_RANGE = f"{FP32_MIN:.3g} to {FP32_MAX:.3g}"
# Steps from the one that was measured to the first one that a decision on it applies to. Its statistics are read after
# the next step. The decision is announced with the step after that. The announcement is read one step later.
DECISION_LAG = 4


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


@dataclass(frozen=True, kw_only=True)
class Signals(Measured, StepSettings):
    """One finished optimizer step, as policies see it. Identical on every worker; None is "unknown".

    It also has the fields of `Measured` (loss, noise_scale, ...) and of `StepSettings` (epoch, batch_size, ...).
    """

    step: int = field(metadata=FIGURES["step"])
    micro_batch: int = required(
        "samples", "Samples of a micro-batch of the first steps: the unit the batch size changes by"
    )
    throughput: tuple[float | None, ...] = optional(
        "", "By rank, micro-batches a second over the median worker's; below 0.8 one is a straggler", default=()
    )
    corrupt_workers: tuple[int, ...] = optional(
        "", "Ranks of workers that audits found to compute wrongly; see `comm.audit_every`", default=()
    )
    previous_step_time_s: float | None = optional(
        "s", "Wall time of the previous step on the leader, if it had the same batch size and as many workers"
    )
    previous_data_wait_s: float | None = optional("s", "Part of previous_step_time_s that the leader waited for data")
    heldout_accuracy: float | None = optional("", "The latest evaluation's accuracy, in [0, 1]")
    link_latencies: tuple[tuple[float, ...], ...] | None = optional(
        "s", "By rank and rank, time of a short message; as last measured in this view"
    )
    link_throughputs: tuple[tuple[float | None, ...], ...] | None = optional(
        "B/s", "By rank and rank; None from a rank to itself"
    )
    base_batch_size: int | None = optional("samples", "The configured batch size, for which the learning rate is meant")
    epoch_samples: int | None = optional(
        "samples",
        "Samples of an epoch; unknown for a stream, and in a run that was resumed with another number of samples",
    )
    bounds: Bounds = field(
        metadata={"unit": "", "help": "The configured limits: batch_min, batch_max, workers_min, workers_max"}
    )

    @property
    def in_force_at(self) -> int:
        """The first step that a decision on these signals applies to."""
        return self.step + DECISION_LAG

    def beside_columns(self) -> dict[str, Any]:
        """Returns what the columns of metrics.jsonl lack of these signals, but for the links, as plain values."""
        return {name: getattr(self, name) for name in _BESIDE} | {"bounds": vars(self.bounds)}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Signals:
        """Returns the signals of a line of metrics.jsonl, bit for bit. The links are unknown, and the learning rate is
        NaN where it was not finite. Raises ValueError for a line of an earlier version, or of a monitor.
        """
        beside = record.get("signals", {})
        if lacking := [name for name in _BESIDE if name not in beside]:
            why = "a training by this version of kfuse must have written them"
            raise ValueError(f"its lines have no signals {', '.join(lacking)}: {why}")
        values: dict[str, Any] = {each.name: record[each.name] for each in fields(cls) if each.name in METRICS}
        values |= {name: tuple(it) if isinstance(it, list) else it for name, it in beside.items() if name in _BESIDE}
        values["lr"] = math.nan if record["lr"] is None else record["lr"]
        return cls(**values | {"bounds": Bounds(**beside["bounds"])})


# Links are numbers of each pair of workers, too many for each line: an event has them.
_LINKS = ("link_latencies", "link_throughputs")
_BESIDE = [each.name for each in fields(Signals) if each.name not in (*METRICS, *_LINKS)]


@dataclass(frozen=True)
class Decision:
    """What a policy asks for. A field left at None asks for no change.

    Raises TypeError where batch_size, workers or replace is not a whole number, or sync is not a text. Values out of
    range are no error: the run's bounds clip them.
    """

    batch_size: int | None = None
    """Samples of an optimizer step."""
    lr_scale: float | None = None
    """Factor on the learning rate. It replaces the present factor."""
    workers: int | None = None
    """Worker count."""
    sync: str | None = None
    """How the workers keep together: ssgd, local:N, sma, pair or pair:N,M, as `comm.sync`."""
    topology: str | None = None
    """How buckets are reduced: allreduce, all_to_all or tree."""
    tree: str | Sequence[int] | None = None
    """Shape of the topology `tree`: binary, star, host, latency, or each rank's parent, the root's being itself."""
    replace: int | None = None
    """Rank of a worker that a new one replaces."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "workers", "replace"):
            value = getattr(self, name)
            if value is None:
                continue
            try:
                object.__setattr__(self, name, operator.index(value))
            except TypeError:
                raise TypeError(f"Decision {name}={value!r}: must be a whole number or None") from None
        if self.lr_scale is not None:
            object.__setattr__(self, "lr_scale", float(self.lr_scale))
        if self.tree is not None and not isinstance(self.tree, str):
            object.__setattr__(self, "tree", tuple(self.tree))
        if not isinstance(self.sync, str | None):
            raise TypeError(f"Decision sync={self.sync!r}: must be one of ssgd, local:N, sma, pair, or None")

    @property
    def is_empty(self) -> bool:
        return all(getattr(self, field.name) is None for field in fields(self))

    def merged(self, other: Decision) -> Decision:
        """Returns both decisions as one. Where both set a field, `other` is used."""
        asked = {field.name: getattr(other, field.name) for field in fields(other)}
        return replace(self, **{name: value for name, value in asked.items() if value is not None})

    def changes(self, signals: Signals) -> Decision | None:
        """Returns the fields that the signals do not show, compared as they will be clipped; None if there are none."""
        nearest, _ = self.clipped(signals.bounds)
        scale, now = nearest.lr_scale, signals.lr_scale
        change = replace(
            self,
            batch_size=None if signals.batch_size in (self.batch_size, nearest.batch_size) else self.batch_size,
            workers=None if signals.workers in (self.workers, nearest.workers) else self.workers,
            # It travels as fp32.
            lr_scale=None if scale is not None and math.isclose(scale, now, rel_tol=1e-6) else self.lr_scale,
        )
        return None if change.is_empty else change

    def clipped(self, bounds: Bounds) -> tuple[Decision, list[str]]:
        """Returns the nearest decision within `bounds`, and a note for each field that changed.

        An lr_scale that fp32 cannot hold, or that is not positive, is dropped: no nearest value is meant.
        """
        changed, notes = dict[str, Any](), list[str]()
        for name, limit in (("batch_size", "batch"), ("workers", "workers")):
            value, low, high = getattr(self, name), getattr(bounds, f"{limit}_min"), getattr(bounds, f"{limit}_max")
            if value is not None and not low <= value <= high:
                changed[name] = min(max(value, low), high)
                notes.append(f"{name} {value} clipped to {changed[name]}: must be {low} to {high}")
        if self.lr_scale is not None and not FP32_MIN <= self.lr_scale <= FP32_MAX:
            notes.append(f"lr_scale {self.lr_scale} dropped: it must be {FP32_RANGE}, fp32's range")
            changed["lr_scale"] = None
        return replace(self, **changed), notes


class BasePolicy:
    """A policy adapts training while it runs: KungFu's hooks (Mai et al., OSDI 2020) and `decide`.

    The hooks run on every worker at the same steps, and may use kfuse's module-level functions (`kf.allreduce`,
    `kf.resize`, ...). `decide` depends on nothing but the signals so far, and has no side effects outside the policy.
    """

    modes: tuple[str, ...] = ()
    """The values of `sync` that it asks for. Those that other settings rule out are refused before training."""
    lr_settings: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    """The settings of the learning rate that it is right with; others are refused before training. Maps `scaling`
    (lr.scaling) and `decay` (lr.decay) to the accepted values; a name that is missing accepts every value."""
    owned_fields: tuple[str, ...] = ()
    """The fields of `Decision` that later policies of a ComposePolicy must leave alone, also while this one asks for
    nothing: one that decides only now and then needs them."""
    is_plan: bool = False
    """Its `owned_fields` follow a plan of the user's, and grow also while training waits for its data."""

    def with_parts(self) -> list[BasePolicy]:
        """Returns this policy, and those that it asks."""
        return [self]

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
        """Returns what to begin with. Called once, on rank 0, before the first step of a run that resumes no other."""
        return None

    def decide(self, signals: Signals) -> Decision | None:
        """Returns what to change after a finished step; None for nothing.

        It may keep state in attributes. It may be called again for the same step (a step is repeated after a failure),
        and must then return the same decision. A change takes some steps to appear in the signals; a policy may ask for
        it again meanwhile.
        """
        return None

    def state_dict(self) -> dict[str, Any]:
        """Returns what a joining worker or a resumed run needs of this policy.

        These are the attributes that are plain values (None, bool, int, float, str; lists, tuples, dicts of those), and
        the states of those that are policies: of an attribute `asks`, a GNSPolicy, as "asks.GNSPolicy". Override it in
        a policy that keeps its state in others (a list of policies), or makes policies while it runs.
        """
        state: dict[str, Any] = {}
        if id(self) in _UNDER_WAY:  # a policy that this one asks refers back to it
            return state
        _UNDER_WAY.add(id(self))
        try:
            for name, value in vars(self).items():
                if isinstance(value, BasePolicy):
                    state[f"{name}.{type(value).__name__}"] = value.state_dict()
                    continue
                with contextlib.suppress(TypeError):
                    state[name] = _plain(value)
        finally:
            _UNDER_WAY.discard(id(self))
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the attributes that `state_dict` returned, here or in another process.

        Of a policy that is made later here, or is another one, the state is left out with a warning.
        """
        for key, value in state.items():
            name, _, kind = key.partition(".")
            if not kind:
                setattr(self, name, _plain(value))
                continue
            found = getattr(self, name, None)
            if isinstance(found, BasePolicy) and type(found).__name__ == kind:
                found.load_state_dict(value)
            else:
                what, here = f"{type(self).__name__}.{name}", type(found).__name__
                _LOG.warning("state of %s (%s there, %s here) is not taken over: make it in __init__", what, kind, here)


class NoPolicy(BasePolicy):
    """Leaves batch size, learning rate and worker count as configured."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Does nothing: a checkpoint of another policy's training has that one's state."""


class ConfiguredPolicy(BasePolicy):
    """A policy whose arguments are settings, which it never changes. Raises ValueError for those out of range.

    Settings are not state, since a resumed run has its own; of one that is a policy the state is kept. Attributes that
    `BasePolicy` declares (`modes`, ...) follow from them, and are left out too. Others are state.
    """

    def state_dict(self) -> dict[str, Any]:
        classes = [each for each in type(self).__mro__ if issubclass(each, ConfiguredPolicy)]
        settings = {name for each in classes for name in inspect.signature(each).parameters} | vars(BasePolicy).keys()
        return {name: value for name, value in super().state_dict().items() if name not in settings}


def checked_decision(returned: object, method: str) -> Decision | None:
    """Returns what a policy's `method` has returned, None if it is empty. Raises TypeError where it is no decision."""
    if not isinstance(returned, Decision | None):
        kind = type(returned).__name__
        raise TypeError(f"{method} returned a value of type {kind}: it must be a kf.Decision or None")
    return None if returned is None or returned.is_empty else returned


def check_whole(key: str, value: object, least: int) -> None:
    """Raises ValueError, which names `key`, unless the value is a whole number, at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{key}={value!r}: must be a whole number, at least {least}")


def check_number(key: str, value: object, above: float = 0.0) -> None:
    """Raises ValueError, which names `key`, unless the value is a finite number above this one."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not above < value < math.inf:
        raise ValueError(f"{key}={value!r}: must be a finite number above {above:g}")


def _plain(value: Any) -> Any:
    """Returns a copy of `value` in builtin types only. Raises TypeError where that cannot be."""
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
