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


def read_metrics(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Yields the lines of metrics.jsonl, one at least, each with all columns. Raises ConfigError."""
    path, number = run_dir / "metrics.jsonl", 0
    for number, record in enumerate(read_lines(path), 1):
        if missing := [name for name in METRICS if name not in record]:
            raise ConfigError(f"{path}: line {number}: {missing[0]}: {_MISSING}")
        yield record
    if not number:
        raise ConfigError(f"{path}: has no step yet: must be a run's, with one at least")


def read_lines(path: Path, most: int | None = None) -> Iterator[dict[str, Any]]:
    """Yields the objects of the file's lines, or of the last ones, within `most` bytes; none where there is no file.

    A last line that is being written is left out. Raises ConfigError where it cannot be read, and for a damaged line.
    """
    try:
        with path.open("rb") as file:
            start = 0 if most is None else max(0, file.seek(0, os.SEEK_END) - most)
            file.seek(start)
            lines = file.read().splitlines(keepends=True)[bool(start) :]
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    place = "line, of the last ones," if start else "line"
    for number, line in enumerate(lines, 1):
        if line.endswith(b"\n"):
            yield _object(line, f"{path}: {place} {number}")


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the events of a step; none where events.jsonl is missing. Raises ConfigError."""
    found = read_lines(run_dir / "events.jsonl")
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


def _object(text: bytes, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"{where} is damaged: it must be a JSON object")
    return found
