"""Hydra's and OmegaConf's errors in one line: the key, its value, and what it must be."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from kfuse.settings.instantiate import CLASS_GROUPS, one_line
from kfuse.settings.tree import AT_SHELL, did_you_mean

_KNOWN = [*AT_SHELL, *CLASS_GROUPS]


def explain(error: BaseException) -> str:
    """Returns one line for an error raised while a configuration is composed or read."""
    if isinstance(error, OverrideParseException):
        word = str(error.override)
        return f"{word}: must be key=value, quoted where it holds spaces or ,[]{{}}{did_you_mean(word, _KNOWN)}"
    if isinstance(error, MissingConfigException):
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        options = error.options or []
        among = f": must be one of {', '.join(options)}{did_you_mean(option, options)}"
        return f"{group}={option}{among}" if options else _lines(error)[0]
    if isinstance(error, OmegaConfBaseException):
        return _omegaconf(error, "")
    if isinstance(error, ConfigCompositionException) and isinstance(error.__cause__, OmegaConfBaseException):
        override = re.match(r"Error merging override (.*)", _lines(error)[0])
        return _omegaconf(error.__cause__, override.group(1) if override else "")
    if isinstance(error, OSError):
        where = "another run directory: hydra.run.dir=DIR, for a sweep hydra.sweep.dir=DIR"
        return f"{error.filename}: cannot be written: {error.strerror}; choose {where}"
    return " ".join(_lines(error)) if isinstance(error, HydraException | ValueError) else one_line(error)


def explain_flags(flags: Sequence[str]) -> str:
    """Returns one line for `--epochs 5`, with the key that is spelt alike."""
    name = flags[0].lstrip("-").partition("=")[0].replace("-", "_")
    return f"{flags[0]}: no such flag; must be key=value, without dashes{did_you_mean(name, _KNOWN)}"


def _omegaconf(error: OmegaConfBaseException, override: str) -> str:
    key = str(error.full_key or error.key or "")
    if isinstance(error, MissingMandatoryValue):
        return f"{key}: a value is needed ({key}=...)"
    if isinstance(error, ConfigAttributeError | ConfigKeyError):
        siblings = [str(k) for k in error.parent_node] if isinstance(error.parent_node, DictConfig | Mapping) else []
        parent, _, name = key.rpartition(".")
        beside = [f"{parent}.{each}" if parent else each for each in siblings]
        return f"{key}: no such key{did_you_mean(key, beside) or did_you_mean(name, _KNOWN)}"
    if key in AT_SHELL and override:
        return f"{override}: must be {AT_SHELL[key].allowed}"
    below = [name for name in AT_SHELL if name.startswith(f"{key}.")]
    if below and override:
        return f"{override}: {key} is a section; must be one of its keys: {', '.join(below)}"
    return f"{override or key}: {_lines(error)[0]}"


def _lines(error: BaseException) -> list[str]:
    return [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
