"""Reads a recorded run directory back, for `kfuse replay`, `kfuse plan` and `kfuse cbs`.

Its files may be damaged, or another program's. So each value that a command may use is checked as it is read. What is
wrong raises ConfigError, in one line: the file, where in it, the name, its value and what it must be.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from omegaconf import OmegaConf

from kfuse.policies.signals import BATCH_MAX, FP32_MIN, OTHER_SIGNALS, Bounds, Signals
from kfuse.settings.instantiate import CLASS_GROUPS, describe, fits, is_finite, one_line
from kfuse.settings.tree import AT_SHELL, WORKERS_MAX, ConfigError, show
from kfuse.statistics.figures import METRICS, StepContext

MISSING = "missing: another version of kfuse, or another program, has written it"


def read_yaml(path: Path) -> Any:
    """Returns the file's content as plain values. Raises ConfigError where it cannot be read."""
    try:
        return OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except Exception as error:  # of the system, YAML and OmegaConf, which have no class in common
        raise ConfigError(f"{path}: cannot be read: {one_line(error)}") from error


def config_path(run_dir: Path) -> Path:
    """Returns where the command line records a run's configuration."""
    return run_dir / ".hydra" / "config.yaml"


def read_config(run_dir: Path, needed: Collection[str]) -> dict[str, Any]:
    """Returns the configuration that the command line has recorded, as plain values.

    Every setting that is there has a value that it may have. Settings of other versions are left in it.

    needed: the settings (`batch.size`) and groups of classes (`policy`) that must be there. Raises ConfigError.
    """
    path = config_path(run_dir)
    config = read_yaml(path)
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: must be the configuration of a run of `kfuse`")
    sections = {*CLASS_GROUPS, *(key.rpartition(".")[0] for key in AT_SHELL)} - {""}
    for section in sections & config.keys():
        if not isinstance(config[section], dict):
            raise ConfigError(f"{path}: {section}={show(config[section])}: must be settings")
    for group in {*CLASS_GROUPS} & {*needed}:
        if not isinstance(target := config.get(group, {}).get("_target_"), str):
            raise ConfigError(f"{path}: {group}._target_={show(target)}: must be the dotted path of a class")
    for key, setting in AT_SHELL.items():
        section, _, name = key.rpartition(".")
        values = config.get(section, {}) if section else config
        if name not in values:
            if key in needed:
                raise ConfigError(f"{path}: {key}: {MISSING}")
        elif not setting.allows(values[name]):
            raise ConfigError(f"{path}: {key}={show(values[name])}: must be {setting.allowed}")
        elif section == "batch" and values[name] is None and name != "micro_max":
            raise ConfigError(f"{path}: {key}=null: must be a number, as `kfuse` records it")
    return config


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the lines of metrics.jsonl, one at least: steps, samples and epochs ascend. Raises ConfigError.

    Each has all columns. The first has `signals`; where others do, those that are there are of their types.
    """
    before = {"step": -1, "samples": 0, "epoch": 0}

    def check(line: dict[str, Any]) -> None:
        needed = METRICS if before["step"] >= 0 else [*METRICS, "signals"]
        if missing := [name for name in needed if name not in line]:
            raise ValueError(f"{missing[0]}: {MISSING}")
        for name in METRICS:
            _check_figure(name, line[name])
        steps = line["step"] - before["step"]
        if steps < 1:
            raise ValueError(f"step={line['step']}: must be above {before['step']}, that of the line before")
        for name, least in (("samples", before["samples"] + steps), ("epoch", before["epoch"])):
            if line[name] < least:
                raise ValueError(f"{name}={line[name]}: must be at least {least}, after the line before")
        if line["epoch"] >= line["samples"]:
            raise ValueError(f"epoch={line['epoch']}: must be below samples")
        signals = line.get("signals", {})
        if not isinstance(signals, dict):
            raise ValueError(f"signals={show(signals)}: must be an object")
        for name in signals.keys() & {*OTHER_SIGNALS}:
            (_check_bounds if name == "bounds" else _check_figure)(name, signals[name])
        before.update((name, line[name]) for name in before)

    lines = _records(run_dir / "metrics.jsonl", check)
    if not lines:
        raise ConfigError(f"{run_dir / 'metrics.jsonl'}: has no step yet")
    return lines


def read_events(run_dir: Path) -> list[dict[str, Any]] | None:
    """Returns the records of events.jsonl, each with its step and kind; None where there is no such file.

    Decisions have values of the right types. Raises ConfigError.
    """
    path = run_dir / "events.jsonl"
    return _records(path, _check_event) if path.exists() else None


def _records(path: Path, check: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    """Returns the objects of a file of JSON lines, checked. A last line that is not complete yet is left out."""
    found = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):  # a run under way is writing it
                    break
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    record = None
                if not isinstance(record, dict):
                    raise ConfigError(f"{path}: line {number} is damaged: it must be a JSON object")
                try:
                    check(record)
                except ValueError as error:
                    raise ConfigError(f"{path}: line {number}: {error}") from error
                found.append(record)
    except OSError as error:
        what = f"{path.parent}: must be the directory of a run: {path.name}"
        raise ConfigError(f"{what}: {error.strerror or error}") from error
    return found


def _check_event(event: Mapping[str, Any]) -> None:
    """Raises ValueError for a record of events.jsonl with values that a command cannot use."""
    if missing := [name for name in ("step", "kind") if name not in event]:
        raise ValueError(f"{missing[0]}: {MISSING}")
    kind, step = event["kind"], event["step"]
    if not isinstance(kind, str):
        raise ValueError(f"kind={show(kind)}: must be text")
    if step is not None or kind in ("decision", "resumed", "went_back"):  # their steps tell which decisions hold
        _check_figure("step", step)
    pairs = {"batch_size": tuple[int, int], "lr": tuple[float | None, float | None], "sync": tuple[str, str]}
    for name, hint in pairs.items() if kind == "decision" else ():
        if name in event and not (fits(event[name], hint) and is_finite(event[name])):
            raise ValueError(f"{name}={show(event[name])}: must be {describe(hint)}")


def _check_bounds(name: str, value: Any) -> None:
    names = [each.name for each in fields(Bounds)]
    if not (isinstance(value, dict) and value.keys() == {*names} and fits([*value.values()], list[int])):
        raise ValueError(f"signals.{name}={show(value)}: must have {', '.join(names)}, whole numbers")
    Bounds(**value)


# -- what a figure must be --------------------------------------------------------------------------------------------

_LARGEST = 1e300
"""No sum of numbers up to it overflows."""
_TINY = 1e-30
"""Stands for "above 0": what is divided by smaller values may overflow."""
_RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("samples", "micro_batches", "micro_batch", "base_batch_size", "epoch_samples"), (1, 2**63)),
    **dict.fromkeys(("noise_scale", "noise_scale_high", "step_time_s", "previous_step_time_s"), (_TINY, _LARGEST)),
    **dict.fromkeys(("lr", "noise_scale_low", "grad_norm", "data_wait_s", "previous_data_wait_s"), (0, _LARGEST)),
    "batch_size": (1, BATCH_MAX),
    "workers": (1, WORKERS_MAX),
    "lr_scale": (FP32_MIN, _LARGEST),
    "done": (0, 1),
}
_HINTS: dict[str, Any] = {"step": int} | get_type_hints(StepContext) | get_type_hints(Signals)
# Figures that each step has, and that are null in the file where they were not finite.
_HINTS |= {name: _HINTS[name] | None for name in ("lr", "step_time_s", "data_wait_s")}
_KINDS = {name: {*(get_args(hint) or (hint,))} for name, hint in _HINTS.items()}
_KINDS = {name: kinds | {int} if float in kinds else kinds for name, kinds in _KINDS.items()}


def _check_figure(name: str, value: Any) -> None:
    """Raises ValueError for what is no value of a figure of a step."""
    hint, kinds = _HINTS[name], _KINDS[name]
    least, most = _RANGES.get(name, (-_LARGEST, _LARGEST) if float in kinds else (0, 2**63))
    if value is None or type(value) in (int, float):  # the quick way: there are 20 of them in each line
        right = type(value) in kinds and (value is None or least <= value <= most)
    else:
        right = fits(value, hint) and is_finite(value)
    if not right:
        bounds = f", {least:g} to {most:g}" if name in _RANGES else ""
        name = name if name in METRICS else f"signals.{name}"
        raise ValueError(f"{name}={show(value)}: must be {describe(hint)}{bounds}")
