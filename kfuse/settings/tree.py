"""Every setting: its type, default, bounds and help, once. To add one, add a line here, and use it.

A class below is what one function or command takes: `kf.init` CommSettings, `kf.DataLoader` LoopSettings, `kf.fit`
TrainSettings, `kfuse-run` JobSettings, `kfuse` all of them. At the shell a setting has a section: batch.max for
batch_max, and where Python has the field's usual name without it (`epochs`) the declaration says so (train.epochs).
"""

from __future__ import annotations

import difflib
import operator
import os
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict, Union, get_args, get_origin

from kfuse.settings.declared import CommSettings, Setting, declared

BATCH_MAX, WORKERS_MAX = 2**24, 2**20  # float32 holds every whole number up to 2**24


class ShownSettings(TypedDict, total=False):
    """What is shown while training runs, and where its figures go."""

    observe_progress: Annotated[
        bool | None, Setting(None, "show progress; null: commands do, a script where its output is a terminal")
    ]
    observe_sinks: Annotated[
        list[str],
        Setting(
            ["tensorboard"],
            "where figures go beside metrics.jsonl: to tb/, metrics.csv or metrics.prom (the newest figures) in the "
            "run directory, or to a run of a service (`pip install 'kfuse[wandb]'`)",
            choices=("tensorboard", "csv", "prometheus", "wandb", "mlflow", "trackio"),
        ),
    ]
    observe_ledger: Annotated[bool, Setting(False, "write ledger.jsonl: the samples of each micro-batch")]


class JobSettings(ShownSettings, total=False):
    """How many workers a job has, and what happens when some are lost: the settings of `kfuse-run`."""

    workers_count: Annotated[
        int, Setting(1, "worker processes of the first steps; policies may change it", at_least=1, at_most=WORKERS_MAX)
    ]
    workers_min: Annotated[
        int, Setting(1, "workers; lost ones are replaced up to it in any case", at_least=1, at_most=WORKERS_MAX)
    ]
    workers_max: Annotated[
        int | None,
        Setting(None, "workers, at most as many as GPUs; null: workers.count", at_least=1, at_most=WORKERS_MAX),
    ]
    elastic_replace: Annotated[
        bool, Setting(True, "start a new worker for each lost one; false: only up to workers.min")
    ]
    elastic_heartbeat_timeout_s: Annotated[
        float, Setting(10.0, "seconds without a heartbeat, after which a worker is killed", above=1, at_most=10**6)
    ]
    elastic_boot_timeout_s: Annotated[
        float, Setting(120.0, "seconds within which a new worker must be ready", above=0, at_most=10**6)
    ]
    elastic_max_failures: Annotated[
        int, Setting(5, "workers lost with no step completed in between, after which the job ends", at_least=1)
    ]
    elastic_grace_s: Annotated[
        float,
        Setting(
            20.0,
            "seconds to leave after a notice, to stop after SIGTERM, and for a failed job's last checkpoint",
            above=0,
            at_most=10**6,
        ),
    ]
    elastic_notice_signals: Annotated[
        list[str],
        Setting(
            ["SIGTERM"],
            "signals that a machine is about to be taken away: a worker or an agent that gets one leaves as planned, "
            "the supervisor stops the job",
            choices=("SIGTERM", "SIGUSR1", "SIGUSR2"),
        ),
    ]
    observe_log_level: Annotated[
        str, Setting("warning", "lowest level of log lines", choices=("debug", "info", "warning", "error", "off"))
    ]
    log_dir: Annotated[
        str | os.PathLike[str] | None,
        Setting(None, "folder for worker-N.log, what worker N prints, on its host; null: none", key="observe.log_dir"),
    ]


class LoopSettings(ShownSettings, total=False):
    """The settings of a training: those of `kf.DataLoader`."""

    seed: Annotated[
        int,
        Setting(0, "of data order, augmentation, dropout (`kfuse`: parameters too)", at_least=0, at_most=2**32 - 1),
    ]
    batch_size: Annotated[
        int, Setting(32, "samples of the first optimizer steps; policies may change it", at_least=1, at_most=BATCH_MAX)
    ]
    micro_batch: Annotated[
        int | None,
        Setting(
            None,
            "samples of one forward and backward pass; null: a quarter of batch.size",
            at_least=1,
            key="batch.micro",
        ),
    ]
    micro_batch_max: Annotated[
        int | None,
        Setting(
            None,
            "samples up to which micro-batches grow with the batch; null: they stay",
            at_least=1,
            key="batch.micro_max",
        ),
    ]
    batch_min: Annotated[int | None, Setting(None, "samples; policies never go below; null: batch.micro", at_least=1)]
    batch_max: Annotated[
        int | None,
        Setting(None, "samples; policies never go above; null: 64 times batch.size", at_least=1, at_most=BATCH_MAX),
    ]
    workers_balance: Annotated[bool, Setting(True, "give slower workers fewer micro-batches, so that none waits long")]
    num_workers: Annotated[
        int,
        Setting(
            0,
            "loader processes of each worker; 0: the step's own thread",
            at_least=0,
            at_most=2**10,
            key="data.num_workers",
        ),
    ]
    data_prefetch: Annotated[
        int, Setting(2, "micro-batches that each loader process fetches ahead", at_least=1, at_most=2**5)
    ]
    lr_scaling: Annotated[
        str,
        Setting(
            "sqrt",
            "how the rate follows the batch size; sqrt, by which Adam's betas follow too, is for Adam, linear for SGD",
            choices=("none", "linear", "sqrt", "adascale"),
        ),
    ]
    lr_warmup_steps: Annotated[
        int, Setting(0, "length of the linear warm-up, in steps of the first batch size; 0: none", at_least=0)
    ]
    lr_decay: Annotated[
        str,
        Setting(
            "none",
            "how the rate falls to zero at the end; wsd: in the last part only; constant: as none",
            choices=("none", "cosine", "linear", "wsd", "constant"),
        ),
    ]
    lr_decay_fraction: Annotated[
        float, Setting(0.1, "part of the run in which lr.decay=wsd lowers the rate", above=0, at_most=1)
    ]
    epochs: Annotated[
        int | None,
        Setting(
            None, "passes over the data; null: no limit, but 1 without train.steps", at_least=1, key="train.epochs"
        ),
    ]
    steps: Annotated[
        int | None,
        Setting(
            None,
            "optimizer steps (with lr.scaling=adascale each counts by its gain); null: no limit",
            at_least=1,
            key="train.steps",
        ),
    ]
    clip_norm: Annotated[
        float | None,
        Setting(
            None,
            "largest norm of the mean gradient; null: as the optimizer says (`kfuse`: no limit)",
            above=0,
            key="train.clip_norm",
        ),
    ]
    train_target_accuracy: Annotated[
        float | None,
        Setting(None, "fraction; an evaluation that reaches it ends the run; null: none does", above=0, at_most=1),
    ]
    train_save_model: Annotated[
        bool | None,
        Setting(None, "write model.pt, model.safetensors and best.pt; null: where there is a folder for them"),
    ]
    checkpoint_dir: Annotated[
        str | os.PathLike[str] | None,
        Setting(None, "folder of the checkpoints; null: none are written (`kfuse`: in the run directory)"),
    ]
    checkpoint_every_steps: Annotated[
        int | None,
        Setting(None, "steps between checkpoints; null: one after each epoch (`kfuse`: none are written)", at_least=1),
    ]
    checkpoint_keep: Annotated[int, Setting(3, "how many of the newest are kept, in case one is damaged", at_least=1)]
    checkpoint_resume: Annotated[
        str | os.PathLike[str] | None,
        Setting(
            None,
            "where training goes on from: never, auto (the newest good one) or a path; null: auto in a run directory "
            "that was given, else never",
        ),
    ]
    run_dir: Annotated[
        str | os.PathLike[str] | None,
        Setting(None, "new folder for records, or a resumed run's; null: none. Commands have their own"),
    ]


class TrainSettings(LoopSettings, total=False):
    """The settings of a training whose loop is kfuse's own: those of `kf.fit`."""

    train_precision: Annotated[
        str,
        Setting(
            "fp32",
            "of forward and backward; bf16: autocast over fp32 parameters; bf16-true: bf16 parameters, with fp32 "
            "masters in kfuse's optimizers",
            choices=("fp32", "bf16", "bf16-true"),
        ),
    ]
    heldout_every: Annotated[
        int | None,
        Setting(None, "steps between evaluations; null: once an epoch", at_least=1, key="train.heldout_every"),
    ]
    heldout_batch: Annotated[
        int, Setting(256, "samples of one forward pass of an evaluation", at_least=1, key="train.heldout_batch")
    ]
    statistics_curvature_every: Annotated[
        int | None,
        Setting(
            None,
            "steps between measurements of the curvature along the update: six gradients more for each four "
            "micro-batches; null: never",
            at_least=1,
        ),
    ]


class CommandSettings(TypedDict, total=False):
    """What only `kfuse` needs to be told, as it makes the optimizer and the run directory itself."""

    workers_threads: Annotated[
        int | None,
        Setting(
            None,
            "CPU threads of each worker; null: OMP_NUM_THREADS, else cores / workers.max; 1 with comm.reproducible",
            at_least=1,
            at_most=2**12,
        ),
    ]
    lr_base: Annotated[float, Setting(0.001, "learning rate at the first batch size; the default suits AdamW", above=0)]


# Settings that `kfuse` does not take: its checkpoints lie in its run directory, which Hydra names.
SCRIPTS_ONLY = ("checkpoint_dir", "run_dir")
# The sections, and what their settings are about.
SECTIONS = {
    "batch": "How many samples make a step and a micro-batch.",
    "workers": "Worker processes, one a device.",
    "data": "How data are loaded. The other keys of the group `data` are arguments of its class.",
    "lr": "The learning rate.",
    "train": "How long to train, how to evaluate, and in which precision.",
    "statistics": "What a step measures beside the noise scale.",
    "comm": "How gradients are reduced over the workers.",
    "checkpoint": "When checkpoints are written, and which one a run resumes from.",
    "elastic": "What happens when workers are lost or are not ready in time.",
    "observe": "What a run shows and records.",
}


class ConfigError(ValueError):
    """A setting cannot be used. The message is one line: `KEY=VALUE: must be ...`."""


@dataclass(frozen=True)
class Leaf:
    """A setting in the tree."""

    name: str  # in Python: batch_max
    kind: type  # int, float, bool, str or list[str]; str is also a path's
    optional: bool  # whether none (null, None) is allowed
    setting: Setting

    @property
    def key(self) -> str:
        """Its name at the shell: batch.max."""
        section, _, rest = self.name.partition("_")
        return self.setting.key or (f"{section}.{rest}" if section in SECTIONS else self.name)

    @property
    def default(self) -> Any:
        return self.setting.default

    @property
    def allowed(self) -> str:
        """What a value must be, in words: "a whole number, at least 1"."""
        if self.kind == list[str]:
            return f"a list, [...], of {', '.join(self.setting.choices)}"
        kind = {int: "a whole number", float: "a number", bool: "true or false"}.get(self.kind)
        kind = kind or (None if self.setting.range else "text")
        return ", ".join(filter(None, [kind, self.setting.range])) + (", or null" if self.optional else "")

    def allows(self, value: Any) -> bool:
        try:
            self.checked(value)
        except ConfigError:
            return False
        return True

    def checked(self, value: Any, shell: bool = False) -> Any:
        """Returns the value in the setting's type (1e3 as 1000, a path as text). Raises ConfigError if it is not
        allowed. shell: how the message spells it.
        """
        converted = _convert(self.kind, value) if value is not None else None
        if self.optional if value is None else converted is not None and self.setting.is_in_range(converted):
            return converted
        raise ConfigError(f"{spell(self.key, shell)}={show(value, shell)}: must be {self.allowed}")


def _convert(kind: type, value: Any) -> Any:
    """Returns a plain value in that type; None where it is of another one."""
    if kind is bool or isinstance(value, bool):
        return value if kind is bool and isinstance(value, bool) else None
    if kind == list[str]:
        return [*value] if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value) else None
    if kind is str:
        return os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if kind is float:
        try:
            return float(value) if isinstance(value, int | float) or hasattr(value, "__float__") else None
        except OverflowError:  # an integer beyond the range of floats
            return None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    return operator.index(value) if hasattr(value, "__index__") else None


def by_key(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings by their names at the shell, as the rules take them."""
    return {SETTINGS[name].key if name in SETTINGS else name: value for name, value in values.items()}


def spell(key: str, shell: bool) -> str:
    """Returns a setting's name as its reader writes it: "batch.max" at the shell, "batch_max" in Python."""
    return key if shell else _NAMES.get(key) or key.replace(".", "_")


def show(value: object, shell: bool = True) -> str:
    """Returns a value as its reader writes it: null and true at the shell, None and True in Python."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value] if shell else str(value)
    return str(value)


def leaves(*groups: type) -> dict[str, Leaf]:
    """Returns the settings that these classes declare, by name."""
    found: dict[str, Leaf] = {}
    for group in groups:
        for name, (hint, setting) in declared(group).items():
            kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
            found.setdefault(name, Leaf(name, kinds[0], type(None) in kinds, setting))
    return found


# Every setting, by its name in Python.
SETTINGS = leaves(LoopSettings, TrainSettings, JobSettings, CommSettings, CommandSettings)
_NAMES = {leaf.key: leaf.name for leaf in SETTINGS.values()}
# Those that `kfuse` takes, by key.
AT_SHELL = {leaf.key: leaf for leaf in SETTINGS.values() if leaf.name not in SCRIPTS_ONLY}


def resolved(caller: str, group: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a class's settings, by name: those that a script gives, checked, and the others' defaults.

    caller: for messages, "kf.fit". Raises TypeError for an unknown name, ConfigError for a value that is not allowed.
    """
    known = leaves(group)
    for name in given:
        if name not in known:
            raise TypeError(f"{caller} takes no {name}={did_you_mean(name, known)}")
    return {name: leaf.checked(given[name]) if name in given else leaf.default for name, leaf in known.items()}


def completed(given: Mapping[str, Any], parts: int = 1) -> dict[str, Any]:
    """Returns these settings, by name, with values for those that follow from others where they are None.

    parts: a micro-batch must divide by this number.
    """
    follows: dict[str, Any] = {}
    if "workers_count" in given:
        follows["workers_max"] = given["workers_count"]
    if "batch_size" in given:
        size = given["batch_size"]
        micro = max(1, size // (4 * parts)) * parts if given.get("micro_batch") is None else given["micro_batch"]
        follows |= {"micro_batch": micro, "batch_min": min(micro, size), "batch_max": min(64 * size, BATCH_MAX)}
    if "steps" in given and given["steps"] is None:
        follows["epochs"] = 1
    return {**given, **{name: value for name, value in follows.items() if given.get(name) is None}}


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a nested configuration, by name, checked. Raises ConfigError."""
    found = {}
    for key, leaf in AT_SHELL.items():
        section, _, rest = key.rpartition(".")
        found[leaf.name] = leaf.checked((config[section] if section else config)[rest], shell=True)
    return found


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns " (did you mean X?)" for the X of `known` that `word` is like or the end of; "" if there is none."""
    known = list(known)
    ends = [each for each in known if each.endswith((f"_{word}", f".{word}"))]
    close = ends or difflib.get_close_matches(word, known, n=1) or difflib.get_close_matches(word.lower(), known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""
