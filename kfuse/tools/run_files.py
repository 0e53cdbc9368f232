"""Reads a recorded run directory back, for the commands that work on one: `kfuse replay`, `kfuse plan`, `kfuse cbs`.

Its files may be damaged, or be those of another program or another version of kfuse. So each value that a command may
use is checked as it is read. What is wrong raises ConfigError, in one line: the file, the line in it, the name, its
value and what it must be.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from omegaconf import OmegaConf

from kfuse.config.instantiate import describe, fits, is_finite, one_line, show
from kfuse.config.schema import CLASS_GROUPS, SETTINGS, ConfigError
from kfuse.policies.signals import BATCH_MAX, FP32_MIN, OTHER_SIGNALS, Bounds, Signals
from kfuse.statistics.figures import METRICS, StepContext

ANOTHER_VERSION = "another version of kfuse, or another program, has written it"


# -- configuration ----------------------------------------------------------------------------------------------------


def read_yaml(path: Path) -> Any:
    """Returns the file's content as plain values. Raises ConfigError where it cannot be read."""
    try:
        return OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except Exception as error:  # of the system, YAML and OmegaConf, which have no class in common
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        why = one_line(error) if mark is None or not problem else f"line {mark.line + 1}: {problem}"
        raise ConfigError(f"{path}: cannot be read: {why}") from error


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
        raise ConfigError(f"{path}: must be the configuration of a run of `kfuse`: {ANOTHER_VERSION}")
    for group in CLASS_GROUPS:
        node = config.get(group)
        if group in config and not isinstance(node, dict):
            raise _wrong_setting(path, group, node, "settings")
        if group in needed and not isinstance(found := (node or {}).get("_target_"), str):
            raise _wrong_setting(path, f"{group}._target_", found, "the dotted path of a class or function")
    for key, setting in SETTINGS.items():
        section, _, name = key.rpartition(".")
        values = config.get(section, {}) if section else config
        if not isinstance(values, dict):
            raise _wrong_setting(path, section, values, "settings")
        if name in values:
            if not (fits(values[name], setting.kind | None) and setting.allows(values[name])):
                raise _wrong_setting(path, key, values[name], setting.allowed)
        elif key in needed:
            raise ConfigError(f"{path}: {key}: missing: {ANOTHER_VERSION}")
    for section, name in (("batch", "size"), ("workers", "count")):
        low, value, high = (config.get(section, {}).get(key) for key in ("min", name, "max"))
        if None not in (low, value, high) and not low <= value <= high:
            raise _wrong_setting(path, f"{section}.{name}", value, f"{section}.min={low} to {section}.max={high}")
    size, micro = (config.get("batch", {}).get(key) for key in ("size", "micro"))
    if None not in (size, micro) and micro > size:
        raise _wrong_setting(path, "batch.micro", micro, f"at most batch.size={size}")
    return config


def _wrong_setting(path: Path, key: str, value: object, allowed: str) -> ConfigError:
    """The error for a value of config.yaml, with its line as OmegaConf writes it."""
    section, _, name = key.rpartition(".")
    inside = rf"{section}:.*(?:\n[ -].*)*?\n  " if section else ""
    match = re.search(rf"^{inside}{name}:", path.read_text(), re.MULTILINE)
    line = "" if match is None else f"line {match.string.count(chr(10), 0, match.end()) + 1}: "
    return ConfigError(f"{path}: {line}{key}={show(value)}: must be {allowed}")


# -- lines of JSON ----------------------------------------------------------------------------------------------------


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the lines of metrics.jsonl, one at least: steps, samples and epochs ascend. Raises ConfigError.

    Each has all columns. Where it has `signals`, those that are there are of their types.
    """
    path = run_dir / "metrics.jsonl"
    lines: list[dict[str, Any]] = []
    before = {"step": -1, "samples": 0, "epoch": 0}
    for number, line in _records(path):
        if not lines and "signals" not in line:
            raise ConfigError(f"{path}: its lines have no signals: {ANOTHER_VERSION}")
        why = _wrong_line(line, before)
        if why is not None:
            raise ConfigError(f"{path}: line {number}: {why}")
        lines.append(line)
        before = line
    if not lines:
        raise ConfigError(f"{path}: has no step yet")
    return lines


def read_events(run_dir: Path) -> list[dict[str, Any]] | None:
    """Returns the records of events.jsonl, each with its step and kind; None where there is no such file.

    Decisions have values of the right types. Raises ConfigError.
    """
    path = run_dir / "events.jsonl"
    if not path.exists():
        return None
    events = []
    for number, event in _records(path):
        if (why := _wrong_event(event)) is not None:
            raise ConfigError(f"{path}: line {number}: {why}")
        events.append(event)
    return events


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file of JSON lines, numbered from 1. A last line that is not complete yet is left out."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):  # a run under way is writing it
                    return
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    record = None
                if not isinstance(record, dict):
                    raise ConfigError(f"{path}: line {number} is damaged: it must be a JSON object")
                yield number, record
    except FileNotFoundError as error:
        raise ConfigError(f"{path.parent}: must be the directory of a run: it has no {path.name}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error


def _wrong_line(line: Mapping[str, Any], before: Mapping[str, Any]) -> str | None:
    """What is wrong with a line of metrics.jsonl, given the line before; None if nothing is."""
    for name, allowed in _COLUMNS.items():
        if name not in line:
            return f"{name}: missing: {ANOTHER_VERSION}"
        if not allowed.allows(line[name]):
            return f"{name}={show(line[name])}: must be {allowed.words}"
    steps = line["step"] - before["step"]
    if steps < 1:
        return f"step={line['step']}: must be above {before['step']}, that of the line before"
    if line["samples"] - before["samples"] < steps:
        least = before["samples"] + steps
        return f"samples={line['samples']}: must be at least {least}: each step since the line before adds some"
    if not before["epoch"] <= line["epoch"] < line["samples"]:
        return f"epoch={line['epoch']}: must be at least {before['epoch']}, that of the line before, and below samples"
    signals = line.get("signals", {})
    if not isinstance(signals, dict):
        return f"signals={show(signals)}: must be an object"
    return next(filter(None, (_wrong_signal(name, value) for name, value in signals.items())), None)


def _wrong_signal(name: str, value: Any) -> str | None:
    """What is wrong with a value under `signals`; None if nothing is, or if this version has no such signal."""
    if (allowed := _NUMBERS.get(name)) is not None:
        return None if allowed.allows(value) else f"signals.{name}={show(value)}: must be {allowed.words}"
    if name == "bounds":
        names = [each.name for each in fields(Bounds)]
        if not (isinstance(value, dict) and value.keys() == {*names} and fits([*value.values()], list[int])):
            return f"signals.bounds={show(value)}: must have {', '.join(names)}, whole numbers: {ANOTHER_VERSION}"
        try:
            Bounds(**value)
        except ValueError as error:
            return f"signals.bounds: {error}"
    elif name in OTHER_SIGNALS and not (fits(value, _HINTS[name]) and is_finite(value)):
        return f"signals.{name}={show(value)}: must be {describe(_HINTS[name])}"
    return None


def _wrong_event(event: Mapping[str, Any]) -> str | None:
    """What is wrong with a record of events.jsonl; None if nothing is."""
    for name in ("step", "kind"):
        if name not in event:
            return f"{name}: missing: {ANOTHER_VERSION}"
    kind, step = event["kind"], event["step"]
    if not isinstance(kind, str):
        return f"kind={show(kind)}: must be text"
    if not (_STEP.allows(step) or (step is None and kind not in _AT_A_STEP)):
        return f"step={show(step)}: must be {_STEP.words}"
    if kind == "decision":
        for name, hint in _PAIRS.items():
            if name in event and not (fits(event[name], hint) and is_finite(event[name])):
                return f"{name}={show(event[name])}: must be {describe(hint)}"
    return None


# -- what a figure must be --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Range:
    """What a number must be. In place of `fits`, since there are 20 of them in each line."""

    kinds: frozenset[type]
    least: float
    most: float
    words: str

    @classmethod
    def of(cls, name: str, kinds: frozenset[type]) -> _Range:
        """That of the figure of this name. kinds: its types by its annotation, of int, float and None."""
        if name in _NULL_IF_INFINITE:
            kinds |= {NoneType}
        is_whole = float not in kinds
        least = _LEAST.get(name, 0 if is_whole else -math.inf)
        most = _MOST.get(name, 2**63 if is_whole else _LARGEST)
        words = "a whole number" if is_whole else "a number"
        if name in _MOST:
            words += f", {least:.0f} to {most:.0f}"
        elif least in (_TINY, FP32_MIN):
            words += " above 0"
        elif least > -math.inf:
            words += f", at least {least:.0f}"
        words += ", or null" if NoneType in kinds else ""
        return cls(kinds if is_whole else kinds | {int}, least, most, words)

    def allows(self, value: Any) -> bool:
        """Whether it is such a number. NaN and infinity never are."""
        return type(value) in self.kinds and (value is None or self.least <= value <= self.most)


_NULL_IF_INFINITE = ("lr", "step_time_s", "data_wait_s")
"""Figures that each step has, and that are null in the file where they were not finite."""
_TINY = 1e-30
"""Stands for "above 0": what is divided by smaller values may overflow."""
_LARGEST = 1e300
"""Of numbers without a bound of their own: no sum of them overflows."""
_LEAST: dict[str, float] = {
    **dict.fromkeys(("samples", "batch_size", "micro_batches", "workers", "micro_batch", "base_batch_size"), 1),
    "epoch_samples": 1,
    "lr_scale": FP32_MIN,
    **dict.fromkeys(("noise_scale", "noise_scale_high", "step_time_s", "previous_step_time_s"), _TINY),
    **dict.fromkeys(("lr", "noise_scale_low", "grad_norm", "data_wait_s", "previous_data_wait_s", "done"), 0),
}
_MOST: dict[str, float] = {"batch_size": BATCH_MAX, "workers": SETTINGS["workers.max"].most or math.inf, "done": 1}

_HINTS = get_type_hints(StepContext) | get_type_hints(Signals)
_KINDS = {name: frozenset(get_args(hint) or (hint,)) for name, hint in _HINTS.items()}
_COLUMNS = {name: _Range.of(name, _KINDS[name]) for name in METRICS}
_NUMBERS = {name: _Range.of(name, _KINDS[name]) for name in OTHER_SIGNALS if _KINDS[name] <= {int, float, NoneType}}
_STEP = _COLUMNS["step"]

_AT_A_STEP = ("decision", "resumed", "went_back")
"""Events whose step tells which decisions hold."""
_PAIRS: dict[str, Any] = {
    "batch_size": tuple[int, int],
    "lr": tuple[float | None, float | None],
    "sync": tuple[str, str],
}
"""What a decision has before and after, by setting."""
