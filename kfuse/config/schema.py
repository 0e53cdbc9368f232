"""Every setting: its type, default, what is allowed, and a line of help. Groups of classes stay open."""

from __future__ import annotations

import math
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf


class ConfigError(ValueError):
    """A setting cannot be used. The message is one line: the key, its value, and what is allowed."""


def setting(
    default: Any,
    text: str,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A dataclass field with a line of help, and bounds: `least` and `most` are allowed, `above` is not."""
    bounds = {"text": text, "least": least, "above": above, "most": most, "choices": choices}
    return field(default=default, metadata=bounds)


@dataclass
class Batch:
    size: int = setting(32, "samples in an optimizer step, at first", least=1)
    micro: int = setting(8, "samples in a forward and backward pass", least=1)
    min: int = setting(8, "policies never go below it", least=1)
    max: int = setting(256, "policies never go above it", least=1, most=2**24)


@dataclass
class Workers:
    count: int = setting(1, "worker processes, at first", least=1, most=2**20)
    min: int = setting(1, "lost workers are replaced up to it", least=1, most=2**20)
    max: int = setting(2, "policies never go above it", least=1, most=2**20)
    balance: bool = setting(True, "give slower workers fewer micro-batches")
    threads: int | None = setting(None, "CPU threads of a worker; null: the cores, shared out", least=1, most=2**12)


@dataclass
class LR:
    base: float = setting(0.001, "learning rate at the first batch size", above=0)
    scaling: str = setting("sqrt", "how it follows the batch size", choices=("none", "linear", "sqrt", "adascale"))
    warmup_steps: int = setting(0, "steps of linear warmup", least=0)
    decay: str = setting("none", "what follows the warmup", choices=("none", "cosine"))


@dataclass
class Train:
    epochs: int | None = setting(100, "passes over the data; null: by train.steps", least=1)
    steps: int | None = setting(None, "optimizer steps at most; null: by train.epochs", least=1)
    target_accuracy: float | None = setting(None, "stop once an evaluation reaches it", above=0, most=1)
    eval_every: int | None = setting(None, "steps between evaluations; null: once an epoch", least=1)
    precision: str = setting("fp32", "of forward and backward", choices=("fp32", "bf16"))
    clip_norm: float | None = setting(None, "largest norm of the mean gradient", above=0)


@dataclass
class Comm:
    _target_: str | None = setting(None, "a class of your own that reduces buckets, in place of comm.schedule")
    schedule: str = setting("auto", "how gradients are reduced", choices=("auto", "allreduce", "all_to_all", "tree"))
    tree: str = setting("binary", "the shape of comm.schedule=tree", choices=("binary", "star", "host"))
    sync_every: int = setting(1, "steps between synchronisations; above 1: local SGD", least=1, most=2**20)
    dtype: str = setting("fp32", "of gradients on the wire", choices=("fp32", "bf16"))
    bucket_mb: float = setting(25.0, "gradients that travel together, MiB", above=0)
    reproducible: bool = setting(False, "the same bits for any number of workers")
    check_every: int | None = setting(100, "steps between comparisons of all workers' parameters; null: never", least=1)
    timeout_s: float = setting(30.0, "after which a silent worker is given up, seconds", above=0, most=10**6)


@dataclass
class Checkpoint:
    every_steps: int | None = setting(None, "steps between checkpoints; null: none are written", least=1)
    keep: int = setting(3, "how many of the newest stay", least=1)
    resume: str = setting("never", "never, auto (the run directory's newest good one), or a path")


@dataclass
class Elastic:
    replace: bool = setting(True, "start a new worker for each that was lost; else only up to workers.min")
    heartbeat_timeout_s: float = setting(
        10.0, "seconds without a heartbeat, after which a worker is killed", above=1, most=10**6
    )
    boot_timeout_s: float = setting(120.0, "for a new worker to come up, seconds", above=0, most=10**6)
    max_failures: int = setting(5, "workers lost in a row, no step between, after which the job ends", least=1)


@dataclass
class Observe:
    progress: bool = setting(True, "show progress while training")
    tensorboard: bool = setting(True, "write tb/ in the run directory")
    ledger: bool = setting(False, "write which samples each micro-batch used")
    log_level: str = setting(
        "warning",
        "the lowest level of the log lines that workers and the supervisor write",
        choices=("debug", "info", "warning", "error", "off"),
    )


@dataclass
class Config:
    seed: int = setting(0, "of the initial parameters, data order and dropout", least=0, most=2**32 - 1)
    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    policy: dict[str, Any] = field(default_factory=dict)
    batch: Batch = field(default_factory=Batch)
    workers: Workers = field(default_factory=Workers)
    lr: LR = field(default_factory=LR)
    train: Train = field(default_factory=Train)
    comm: Comm = field(default_factory=Comm)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    elastic: Elastic = field(default_factory=Elastic)
    launcher: dict[str, Any] = field(default_factory=dict)
    observe: Observe = field(default_factory=Observe)


CLASS_GROUPS = ("model", "data", "optimizer", "policy", "launcher")


@dataclass(frozen=True)
class Setting:
    """One leaf of the schema: `batch.size` and what it allows."""

    key: str
    kind: type
    optional: bool
    default: Any
    text: str
    least: float | None
    above: float | None
    most: float | None
    choices: tuple[str, ...]

    def allows(self, value: Any) -> bool:
        """Whether a value of the right type is within bounds. NaN and infinity never are."""
        if value is None:
            return self.optional
        if self.choices:
            return value in self.choices
        if self.kind not in (int, float):
            return True
        return (
            math.isfinite(value)
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
        )

    @property
    def allowed(self) -> str:
        """What a value must be, in words: "a whole number, at least 1"."""
        kind = {int: "a whole number, ", float: "a number, "}.get(self.kind, "one of " if self.choices else "")
        return kind + self.range

    @property
    def range(self) -> str:
        """What is allowed, without the kind of number."""
        if self.choices:
            words = ", ".join(self.choices)
        elif self.kind is bool:
            words = "true or false"
        elif self.kind is str:
            words = "text"
        else:
            words = f"above {self.above}" if self.above is not None else f"at least {self.least}"
            if self.most is not None:
                words = f"{words}, at most {self.most}" if self.above is not None else f"{self.least} to {self.most}"
        return words + (", or null" if self.optional else "")


def _leaves(cls: type, prefix: str = "") -> Iterator[Setting]:
    hints = typing.get_type_hints(cls)
    for f in fields(cls):
        hint = hints[f.name]
        if is_dataclass(hint):
            yield from _leaves(typing.cast(type, hint), f"{prefix}{f.name}.")
        elif f.metadata:
            yield _setting(prefix + f.name, f, hint)


def _setting(key: str, f: Field[Any], hint: Any) -> Setting:
    kinds = [arg for arg in typing.get_args(hint) or (hint,) if arg is not type(None)]
    return Setting(key=key, kind=kinds[0], optional=len(typing.get_args(hint)) > 1, default=f.default, **f.metadata)


SETTINGS = {leaf.key: leaf for leaf in _leaves(Config)}


def settings_help() -> str:
    """Each setting's `key=default`, what it is, and what is allowed, in lines of at most 120 characters."""
    defaults = [OmegaConf.to_yaml({"x": leaf.default}).removeprefix("x: ").strip() for leaf in SETTINGS.values()]
    keys = [f"{leaf.key}={default}" for leaf, default in zip(SETTINGS.values(), defaults, strict=True)]
    width = max(map(len, keys))
    lines: list[str] = []
    for key, leaf in zip(keys, SETTINGS.values(), strict=True):
        first, *rest = textwrap.wrap(f"{leaf.text} ({leaf.range})", 120 - width - 4, break_on_hyphens=False)
        lines += [f"  {key:<{width}}  {first}", *(" " * (width + 4) + line for line in rest)]
    return "\n".join(lines)


ConfigStore.instance().store("schema", Config)
OmegaConf.register_new_resolver("kfuse_settings", settings_help, replace=True)
