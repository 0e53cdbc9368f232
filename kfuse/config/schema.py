"""Every setting of the command line: its type, default, bounds and help. Groups of classes stay open."""

from __future__ import annotations

import sys
import textwrap
import typing
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

CLASS_GROUPS = ("model", "data", "optimizer", "policy", "launcher")


class ConfigError(ValueError):
    """A setting cannot be used. The message is one line: the key, its value, and what it must be."""


def setting(default: Any, text: str, **bounds: Any) -> Any:
    """A dataclass field with its help. bounds: `least`, `above`, `most` and `choices` of `Setting`."""
    return field(default=default, metadata={"text": text, **bounds})


@dataclass
class Batch:
    """Samples: how many make a step and a micro-batch."""

    size: int = setting(32, "samples of the first optimizer steps; policies may change it", least=1)
    micro: int = setting(8, "samples of a micro-batch: one forward and backward pass; sets the memory needed", least=1)
    micro_max: int | None = setting(
        None,
        "samples; up to this the micro-batches of a batch that has become larger get larger too: fewer, larger passes; "
        "a multiple of batch.micro; null: they stay as they are",
        least=1,
    )
    min: int = setting(8, "samples; policies never go below", least=1)
    max: int = setting(256, "samples; policies never go above", least=1, most=2**24)


@dataclass
class Workers:
    """Worker processes, one a device."""

    count: int = setting(1, "worker processes of the first steps; policies may change it", least=1, most=2**20)
    min: int = setting(1, "worker processes; lost ones are replaced up to it in any case", least=1, most=2**20)
    max: int = setting(2, "worker processes; policies never go above; at most as many as GPUs", least=1, most=2**20)
    balance: bool = setting(True, "give slower workers fewer micro-batches, so that none waits long")
    threads: int | None = setting(
        None,
        "CPU threads of each worker; null: the cores divided by workers.max, or 1 with comm.reproducible=true",
        least=1,
        most=2**12,
    )


@dataclass
class Data:
    """How data are loaded: keys of the group data that are not arguments of its class."""

    workers: int = setting(
        0,
        "loader processes of each worker, which fetch micro-batches ahead; 0: fetched in the step's own thread",
        least=0,
        most=2**10,
    )
    prefetch: int = setting(2, "micro-batches that each loader process fetches ahead", least=1, most=2**10)


@dataclass
class LR:
    """The learning rate."""

    base: float = setting(0.001, "learning rate at the first batch size; the default suits AdamW", above=0)
    scaling: str = setting(
        "sqrt",
        "how the rate follows the batch size; the default suits Adam-like optimizers, linear suits SGD",
        choices=("none", "linear", "sqrt", "adascale"),
    )
    warmup_steps: int = setting(0, "steps of linear warmup, of the first batch size; 0: none", least=0)
    decay: str = setting(
        "none",
        "how the rate falls after the warmup, to zero at the run's end; wsd: in its last part only; constant: as none",
        choices=("none", "cosine", "linear", "wsd", "constant"),
    )
    decay_fraction: float = setting(0.1, "part of the run in which lr.decay=wsd lowers the rate", above=0, most=1)
    change_warmup_steps: int = setting(
        0,
        "after a change of the batch size that raises the rate: steps of linear warmup from the rate before; counted, "
        "as those of lr.warmup_steps, in steps of the first batch size; 0: none",
        least=0,
    )


@dataclass
class Train:
    """How long to train, how to evaluate, and in which precision."""

    epochs: int | None = setting(100, "passes over the data; null: train.steps alone ends the run", least=1)
    steps: int | None = setting(
        None,
        "optimizer steps at most, with lr.scaling=adascale scale-invariant ones (each counts by its gain: 1 at the "
        "first batch size); null: train.epochs alone ends the run",
        least=1,
    )
    target_accuracy: float | None = setting(
        None, "fraction; an evaluation that reaches it ends the run; null: none does", above=0, most=1
    )
    eval_every: int | None = setting(None, "steps between evaluations; null: once an epoch", least=1)
    precision: str = setting(
        "fp32",
        "arithmetic of forward and backward; bf16: autocast over fp32 parameters; bf16-true: bf16 parameters (but "
        "BatchNorm's), of which the optimizers but torch's keep fp32 masters",
        choices=("fp32", "bf16", "bf16-true"),
    )
    clip_norm: float | None = setting(None, "largest norm of the mean gradient; null: no clipping", above=0)
    save_model: bool = setting(
        True, "write model.pt at the end, with safetensors installed model.safetensors too, and best.pt by evaluation"
    )


@dataclass
class Comm:
    """How gradients are reduced over the workers."""

    _target_: str | None = setting(None, "your own transport class, in place of comm.schedule; null: none")
    schedule: str = setting(
        "auto",
        "how gradients are reduced; auto: allreduce or all_to_all, by measured messages; with comm.reproducible=true "
        "all_to_all, with comm.state=sharded reduce_scatter; symmetric (experimental): GPUs read each other's memory, "
        "under torchrun",
        choices=("auto", "allreduce", "reduce_scatter", "all_to_all", "tree", "symmetric"),
    )
    state: str = setting(
        "replicated",
        "where optimizer state lies; sharded: each worker keeps and updates its part (ZeRO-1), with optimizer=adamw, "
        "sgd or lamb",
        choices=("replicated", "sharded"),
    )
    tree: str = setting("binary", "shape of comm.schedule=tree", choices=("binary", "star", "host", "latency"))
    sync: str = setting(
        "ssgd",
        "how the workers keep together: ssgd (every step's gradients are reduced), local:N (each updates by itself, "
        "models are averaged every N steps: local SGD), sma (each has a model of its own, drawn to a central one), "
        "pair (each averages its model with another one's and waits for nobody; needs a supervisor)",
    )
    outer_lr: float = setting(
        1.0, "with comm.sync=local:N: rate of the outer step to the average; DiLoCo: 0.7", above=0
    )
    outer_momentum: float = setting(
        0.0, "with comm.sync=local:N: Nesterov momentum of outer steps, below 1; DiLoCo: 0.9; 0: none", least=0, most=1
    )
    sma_alpha: float | None = setting(
        None, "with comm.sync=sma: how strongly models are drawn together; null: 1 / workers", above=0, most=1
    )
    sma_momentum: float = setting(0.9, "with comm.sync=sma: momentum of the central model, below 1", least=0, most=1)
    dtype: str = setting(
        "fp32",
        "type of gradients in messages; bf16 halves the bytes, and auto then takes all_to_all, which adds up in fp32",
        choices=("fp32", "bf16"),
    )
    bucket_mb: float | None = setting(
        25.0,
        "MiB of gradients reduced together; the default, DDP's, lets reductions overlap with backward; null: 4, 10 or "
        "25, by measured messages",
        above=0,
    )
    reproducible: bool = setting(False, "the same bits for any number of workers")
    check_every: int | None = setting(100, "steps between comparisons of all workers' parameters; null: never", least=1)
    audit_every: int | None = setting(
        None,
        "steps between audits: a micro-batch is run again on another worker, and the gradients are compared; null: "
        "never; needs comm.reproducible=true",
        least=1,
    )
    nccl_high_priority: bool = setting(True, "on GPUs: messages go before kernels that wait for a place on the GPU")
    nccl_min_ctas: int | None = setting(None, "NCCL's least thread blocks a message; null: its own choice", least=1)
    nccl_max_ctas: int | None = setting(
        None, "NCCL's most thread blocks a message, the part of the GPU that it may take; null: its own choice", least=1
    )
    nccl_cga_cluster_size: int | None = setting(
        None, "NCCL's thread blocks in a cluster; null: its own choice", least=0, most=8
    )
    nccl_cta_policy: str | None = setting(
        None, "NCCL's use of thread blocks; null: its own choice", choices=("default", "efficiency", "zero")
    )
    timeout_s: float = setting(
        30.0, "seconds without an answer, after which a worker counts as lost", above=0, most=10**6
    )


@dataclass
class Checkpoint:
    """When checkpoints are written, and which one a run resumes from."""

    every_steps: int | None = setting(None, "steps between checkpoints; null: none are written", least=1)
    keep: int = setting(3, "how many of the newest are kept; more than one, in case one is damaged", least=1)
    resume: str = setting("never", "never, auto (the run directory's newest good one), or a path")


@dataclass
class Elastic:
    """What happens when workers are lost or are not ready in time."""

    replace: bool = setting(True, "start a new worker for each lost one; false: only up to workers.min")
    heartbeat_timeout_s: float = setting(
        10.0, "seconds without a heartbeat (sent each 0.5 s), after which a worker is killed", above=1, most=10**6
    )
    boot_timeout_s: float = setting(120.0, "seconds within which a new worker must be ready", above=0, most=10**6)
    redundancy: str = setting(
        "mirror",
        "where a lost worker's part of the sharded optimizer state comes from; mirror: the next worker has a copy and "
        "repeats its updates; snapshot: all go back to the last one; none: all go back to the last checkpoint; without "
        "effect with comm.state=replicated, where each worker has all of it",
        choices=("mirror", "snapshot", "none"),
    )
    snapshot_every: int = setting(
        50, "steps between snapshots in the workers' memory, with elastic.redundancy=snapshot", least=1
    )
    max_failures: int = setting(5, "workers lost with no step completed in between, after which the job ends", least=1)


@dataclass
class Observe:
    """What a run shows and records."""

    progress: bool = setting(True, "show progress while training")
    tensorboard: bool = setting(True, "write tb/ in the run directory")
    every: int = setting(1, "steps between lines of metrics.jsonl and tb/; the last step has one in any case", least=1)
    ledger: bool = setting(False, "write ledger.jsonl: the samples of each micro-batch")
    log_level: str = setting(
        "warning",
        "lowest level of kfuse's own log lines, from the supervisor and each worker",
        choices=("debug", "info", "warning", "error", "off"),
    )


@dataclass
class Config:
    """The whole configuration. A group of classes has `_target_`, a dotted path, and the arguments of that class."""

    seed: int = setting(0, "of the initial parameters, data order, augmentation and dropout", least=0, most=2**32 - 1)
    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=lambda: asdict(Data()), metadata={"settings": Data})
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


@dataclass(frozen=True)
class Setting:
    """One setting, for example `batch.size`."""

    key: str
    kind: type
    optional: bool
    """Whether null is allowed."""
    default: Any
    text: str
    """Its help: what it is, its unit, special values."""
    least: float | None = None
    """The smallest value allowed."""
    above: float | None = None
    """In place of `least`: every value above this one is allowed."""
    most: float | None = None
    """The largest value allowed."""
    choices: tuple[str, ...] = ()
    """If not empty: the values allowed."""

    def allows(self, value: Any) -> bool:
        """Whether a value of the right type is within bounds. NaN and infinity never are."""
        if value is None:
            return self.optional
        if self.choices:
            return value in self.choices
        if self.kind not in (int, float):
            return True
        return (
            abs(value) <= sys.float_info.max
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
        """What a value must be, without the kind of number: "at least 1"."""
        if self.choices:
            words = ", ".join(self.choices)
        elif self.kind in (bool, str):
            words = "true or false" if self.kind is bool else "text"
        elif self.above is not None:
            words = f"above {self.above}" + (f", at most {self.most}" if self.most is not None else "")
        else:
            words = f"{self.least} to {self.most}" if self.most is not None else f"at least {self.least}"
        return words + (", or null" if self.optional else "")


def _settings(cls: type, prefix: str = "") -> Iterator[Setting]:
    hints = typing.get_type_hints(cls)
    for f in fields(cls):
        hint = hints[f.name]
        section = f.metadata.get("settings", hint)
        if is_dataclass(section):
            yield from _settings(typing.cast(type, section), f"{prefix}{f.name}.")
        elif f.metadata:
            kinds = [arg for arg in typing.get_args(hint) or (hint,) if arg is not type(None)]
            optional = len(typing.get_args(hint)) > 1
            yield Setting(f"{prefix}{f.name}", kinds[0], optional, f.default, **f.metadata)


SETTINGS = {leaf.key: leaf for leaf in _settings(Config)}
LOADING = tuple(f.name for f in fields(Data))
"""The keys of the group data that are not arguments of its class."""
GROUP_SETTINGS: dict[str, tuple[str, ...]] = {"data": LOADING}
"""By group: these keys."""


def class_arguments(group: str, node: Mapping[str, Any]) -> dict[str, Any]:
    """A group's node without the keys that are not arguments of its class."""
    return {name: value for name, value in node.items() if name not in GROUP_SETTINGS.get(group, ())}


def settings_help() -> str:
    """Returns each setting's `key=default`, help and range, in lines of at most 120 characters."""
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
