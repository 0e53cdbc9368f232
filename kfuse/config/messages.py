"""Hydra's and OmegaConf's errors in one line: the key, its value, and what it must be."""

from __future__ import annotations

import difflib
import importlib.resources
import re
from collections.abc import Mapping, Sequence

from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from kfuse.config.instantiate import did_you_mean, one_line
from kfuse.config.schema import CLASS_GROUPS, SETTINGS

# What other tools call a setting, or a setting with its value.
_ALIASES = {
    "learning_rate": "lr.base",
    "lr": "lr.base",
    "scheduler": "lr.decay",
    "lr_scheduler": "lr.decay",
    "warmup": "lr.warmup_steps",
    "batch": "batch.size",
    "bs": "batch.size",
    "b": "batch.size",
    "micro_batch": "batch.micro",
    "micro_batch_size": "batch.micro",
    "workers": "workers.count",
    "num_workers": "data.workers",
    "j": "data.workers",
    "max_workers": "workers.max",
    "min_workers": "workers.min",
    "nproc": "workers.count",
    "nproc_per_node": "workers.count",
    "gpus": "workers.count",
    "devices": "workers.count",
    "max_steps": "train.steps",
    "iterations": "train.steps",
    "eval_interval": "train.eval_every",
    "eval_steps": "train.eval_every",
    "log_interval": "observe.every",
    "log_every": "observe.every",
    "logging_steps": "observe.every",
    "clip": "train.clip_norm",
    "grad_clip": "train.clip_norm",
    "max_grad_norm": "train.clip_norm",
    "bf16": "train.precision=bf16",
    "fp16": "train.precision=bf16",
    "amp": "train.precision=bf16",
    "deterministic": "comm.reproducible",
    "resume": "checkpoint.resume",
    "checkpoint": "checkpoint.resume",
    "ckpt": "checkpoint.resume",
    "save_every": "checkpoint.every_steps",
    "output_dir": "hydra.run.dir",
    "out_dir": "hydra.run.dir",
    "out": "hydra.run.dir",
    "o": "hydra.run.dir",
    "log_dir": "hydra.run.dir",
    "logdir": "hydra.run.dir",
    "run_dir": "hydra.run.dir",
    "quiet": "observe.progress=false",
    "q": "observe.progress=false",
    "verbose": "observe.log_level=info",
    "v": "observe.log_level=info",
    "arch": "model",
    "dataset": "data",
    "optim": "optimizer",
    "opt": "optimizer",
}
# A command in place of an override.
_COMMANDS = dict.fromkeys(("help", "usage", "?"), "kfuse --help") | dict.fromkeys(("version", "V"), "kfuse --version")


def explain(error: BaseException) -> str:
    """Returns one line for an error raised while a configuration is composed or read."""
    if isinstance(error, OverrideParseException):
        word = str(error.override)
        meant = _COMMANDS.get(word) or (f"{_meant(word)}=..." if word.isidentifier() and _meant(word) else "")
        return f"{word}: must be key=value, quoted where it holds spaces or ,[]{{}}" + _hint(meant)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        if not error.options:
            return _lines(error)[0]
        return f"{group}={option}: must be one of {', '.join(error.options)}{did_you_mean(option, error.options)}"
    if isinstance(error, OmegaConfBaseException):
        return _omegaconf(error, "")
    if isinstance(error, ConfigCompositionException):
        first = _lines(error)[0]
        if isinstance(error.__cause__, OmegaConfBaseException):
            override = re.match(r"Error merging override (.*)", first)
            return _omegaconf(error.__cause__, override.group(1) if override else "")
        if ambiguous := re.match(r"Ambiguous value for argument '(.*)'", first):
            return f"{ambiguous.group(1)}: must be one value; a list needs [brackets], a sweep -m"
        if twice := re.match(r"Multiple values for ([^. ]+)", first):
            group = twice.group(1)
            return f"{group}: has a value already; must be {group}=OPTION, without a plus"
        return " ".join(_lines(error))
    if isinstance(error, OSError):
        where = "another run directory: hydra.run.dir=DIR, for a sweep hydra.sweep.dir=DIR"
        return f"{error.filename}: cannot be written: {error.strerror}; choose {where}"
    if isinstance(error, HydraException | ValueError):
        return " ".join(_lines(error))
    return one_line(error)


def explain_flags(flags: Sequence[tuple[str, str | None]]) -> str:
    """Returns one line for `--epochs 5 --lr=0.1`, with the overrides that may be meant.

    flags: each with the next word of the command line, None for the last one.
    """
    meant = [_override(flag, after) for flag, after in flags]
    return f"{flags[0][0]}: no such flag; must be key=value, without dashes{_hint(' '.join(filter(None, meant)))}"


def _hint(meant: str | None) -> str:
    return f" (did you mean {meant}?)" if meant else ""


def _override(flag: str, after: str | None) -> str | None:
    """The override that a flag may stand for, with the flag's value: "train.epochs=5". None if none is known."""
    name, equals, value = flag.lstrip("-").partition("=")
    if not equals and after is not None and not after.startswith("-") and "=" not in after:
        value = after
    off = _meant(name.removeprefix("no-")) if name.startswith("no-") else None
    key = off or _COMMANDS.get(name) or _meant(name)
    if key is None or name in _COMMANDS or "=" in key.split()[-1]:
        return key
    setting = SETTINGS.get(key)
    if setting is not None and setting.kind is bool and (off or not value):
        value = "false" if off else "true"
    if setting is not None and setting.kind in (int, float) and value and not value.lstrip("-.")[:1].isdigit():
        return None  # spelt alike, and another thing: `--device cuda`
    return f"{key}={value or '...'}"


def _meant(word: str) -> str | None:
    """The setting that other tools call `word`, or that is spelt like it: "train.epochs". None if none is known."""
    if word in SETTINGS:
        return word
    word = word.replace("-", "_")
    known = {key.replace(".", "_"): key for key in SETTINGS} | {group: group for group in (*CLASS_GROUPS, "comm")}
    # The last part of a key alone, unless two keys share it (batch.min, workers.min).
    last = [key.rpartition(".")[2] for key in SETTINGS]
    known |= {name: key for name, key in zip(last, SETTINGS, strict=True) if last.count(name) == 1}
    known = _class_arguments() | known | _ALIASES
    close = [word] if word in known else difflib.get_close_matches(word, known, n=1, cutoff=0.75)
    return known[close[0]] if close else None


def _class_arguments() -> dict[str, str]:
    """The arguments of the groups' options, by their names: "weight_decay" is "optimizer.weight_decay".

    One that the group's default option does not have comes with an option that does.
    """
    configs = importlib.resources.files("kfuse.configs")
    chosen: dict[str, str] = {}
    for entry in OmegaConf.create(configs.joinpath("config.yaml").read_text()).defaults:
        chosen |= entry if isinstance(entry, DictConfig) else {}
    known: dict[str, str] = {}
    for group in ("policy", "data", "model", "optimizer"):
        options = [file.name.removesuffix(".yaml") for file in configs.joinpath(group).iterdir()]
        for option in sorted(options, key=lambda option: (option == chosen[group], option)):  # the default option last
            first = "" if option == chosen[group] else f"{group}={option} "
            for name in map(str, OmegaConf.create(configs.joinpath(group, f"{option}.yaml").read_text())):
                if name not in ("_target_", "defaults"):
                    known[name] = known[f"{group}_{name}"] = f"{first}{group}.{name}"
    return known


def _omegaconf(error: OmegaConfBaseException, override: str) -> str:
    key = str(error.full_key or error.key or "")
    reason = _lines(error)[0]
    if isinstance(error, MissingMandatoryValue):
        return f"{key}: a value is needed ({key}=...)"
    if isinstance(error, ConfigAttributeError | ConfigKeyError):
        return _unknown_key(error, key)
    if key in SETTINGS and override:
        return f"{override}: must be {SETTINGS[key].allowed}"
    below = [name for name in SETTINGS if name.startswith(f"{key}.")]
    if below and override:
        meant = f"{_ALIASES[key]}={override.partition('=')[2]}" if key in _ALIASES else None
        return f"{override}: {key} is a section; set its keys: {', '.join(below)}{_hint(meant)}"
    return f"{override or key}: {reason}"


def _unknown_key(error: OmegaConfBaseException, key: str) -> str:
    parent, _, name = key.rpartition(".")
    siblings = [str(k) for k in error.parent_node] if isinstance(error.parent_node, DictConfig | Mapping) else []
    if parent:
        suggestion = did_you_mean(name, siblings).replace("mean ", f"mean {parent}.") or did_you_mean(key, SETTINGS)
        return f"{key}: no such key{suggestion}; keys of {parent}: {', '.join(siblings)}"
    # A key given without its section (`size=8`) is as common as a misspelt one.
    at_home = [k for k in SETTINGS if k.rpartition(".")[2] == name]
    meant = at_home[0] if at_home else _meant(name)
    return f"{key}: no such key{_hint(meant) or did_you_mean(key, [*siblings, *SETTINGS])}"


def _lines(error: BaseException) -> list[str]:
    return [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
