"""Reads a recorded run directory back, for all tools that take one.

Its files may be cut off, or those of another version. What is missing, or a setting that may not have its value, raises
ConfigError, in one line: the file, where in it, the name. Values that this version has written are not checked again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from kfuse.settings.instantiate import one_line
from kfuse.settings.tree import AT_SHELL, ConfigError, show
from kfuse.statistics.figures import METRICS

_MISSING = "missing: another version of kfuse, or another program, has written it"


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

    needed: the keys (`batch.size`, `policy._target_`) that must be there, settings with a value that they may have.
    Raises ConfigError.
    """
    path = config_path(run_dir)
    config: dict[str, Any] = read_yaml(path)
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: must be the settings of a run")
    for key in needed:
        value: Any = config
        for name in key.split("."):
            if not isinstance(value, dict) or name not in value:
                raise ConfigError(f"{path}: {key}: {_MISSING}")
            value = value[name]
        if key in AT_SHELL and not AT_SHELL[key].allows(value):
            raise ConfigError(f"{path}: {key}={show(value)}: must be {AT_SHELL[key].allowed}")
    return config


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the lines of metrics.jsonl, one at least, each with all columns. Raises ConfigError."""
    return list(each_step(run_dir))


def each_step(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Yields what `read_metrics` returns, a line at a time."""
    path, found = run_dir / "metrics.jsonl", False
    try:
        for number, record in _records(path):
            if missing := [name for name in METRICS if name not in record]:
                raise ConfigError(f"{path}: line {number}: {missing[0]}: {_MISSING}")
            if wrong := [name for name in METRICS if not isinstance(record[name], int | float | None)]:
                raise ConfigError(f"{path}: line {number}: {wrong[0]}={record[wrong[0]]!r}: must be a number or null")
            found = True
            yield record
    except OSError as error:
        raise ConfigError(f"{run_dir}: must be the directory of a run: {path.name}: {error.strerror}") from error
    if not found:
        raise ConfigError(f"{path}: has no step yet")


def latest_lines(path: Path, most: int = 2**18) -> list[dict[str, Any]] | None:
    """Returns the objects of the file's last lines, within `most` bytes; None where there is no file.

    Raises ConfigError where it cannot be read, and for a damaged line.
    """
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - most)
            file.seek(start)
            lines = file.read().splitlines(keepends=True)[bool(start) :]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    return [_object(line, f"{path}: one of its last lines") for line in lines if line.endswith(b"\n")]


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the events of a step; none where events.jsonl is missing. Raises ConfigError."""
    path = run_dir / "events.jsonl"
    try:
        found = [record for _, record in _records(path)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    return [each for each in found if isinstance(each.get("kind"), str) and isinstance(each.get("step"), int)]


def read_summary(run_dir: Path, name: str = "summary.json") -> dict[str, Any]:
    """Returns the summary, or another such file; {} where there is none, as in a run under way. Raises ConfigError."""
    path = run_dir / name
    try:
        return _object(path.read_bytes(), str(path))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the number and the object of each line. Raises OSError, and ConfigError for a damaged line."""
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):  # a run under way is writing it
            break
        yield number, _object(line, f"{path}: line {number}")


def _object(text: bytes, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"{where} is damaged: it must be a JSON object")
    return found
