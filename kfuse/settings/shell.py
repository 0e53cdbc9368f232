"""The settings at the shell: Hydra's structured configuration, `kfuse --help-all`, and errors in one line.

The groups of classes (model, data, optimizer, policy, launcher) stay open: a dotted path, `_target_`, and arguments.
"""

from __future__ import annotations

import importlib.resources
import re
import textwrap
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import field, make_dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from kfuse.settings.instantiate import CLASS_GROUPS, LOADING, one_line
from kfuse.settings.tree import AT_SHELL, SECTIONS, SETTINGS, Leaf, did_you_mean, show

_KNOWN = [*AT_SHELL, *CLASS_GROUPS]


def _typed(leaf: Leaf) -> tuple[str, Any, Any]:
    kind = leaf.kind | None if leaf.optional else leaf.kind
    return leaf.key.rpartition(".")[2], kind, field(default_factory=lambda: copy(leaf.default))


def _schema() -> type:
    """Returns a dataclass with a field for each section, each group, and each setting without a section."""
    parts: list[tuple[str, Any, Any]] = [_typed(leaf) for key, leaf in AT_SHELL.items() if "." not in key]
    for section in SECTIONS:
        if section not in CLASS_GROUPS:
            typed = [_typed(leaf) for key, leaf in AT_SHELL.items() if key.startswith(f"{section}.")]
            if section == "comm":  # a transport's class, as in the groups: another spelling of comm.schedule
                typed.append(("_target_", str | None, field(default=None)))
            kind = make_dataclass(section, typed)
            parts.append((section, kind, field(default_factory=kind)))
    loading = {name: AT_SHELL[f"data.{name}"].default for name in LOADING}
    for group in CLASS_GROUPS:
        parts.append((group, dict[str, Any], field(default_factory=loading.copy if group == "data" else dict)))
    return make_dataclass("Config", parts)


def settings_help() -> str:
    """Returns each setting's `key=default`, help and range, in lines of at most 120 characters.

    Defaults are those of `kfuse`: a few differ from a script's, and stand in configs/config.yaml.
    """
    text = importlib.resources.files("kfuse.configs").joinpath("config.yaml").read_text()
    chosen = OmegaConf.create(text)
    keys = []
    for key, leaf in AT_SHELL.items():
        default = OmegaConf.select(chosen, key)
        keys.append(f"{key}={show(leaf.default if default is None else default)}")
    width = max(map(len, keys))
    lines: list[str] = []
    for key, leaf in zip(keys, AT_SHELL.values(), strict=True):
        about = f"{leaf.setting.help} ({leaf.allowed})"
        first, *rest = textwrap.wrap(about, 120 - width - 4, break_on_hyphens=False)
        lines += [f"  {key:<{width}}  {first}", *(" " * (width + 4) + line for line in rest)]
    return "\n".join(lines)


def register() -> None:
    """Makes the schema known to Hydra: `configs/config.yaml` names it."""
    ConfigStore.instance().store("schema", _schema())


# -- errors -----------------------------------------------------------------------------------------------------------


def explain(error: BaseException) -> str:
    """Returns one line for an error raised while a configuration is composed or read."""
    if isinstance(error, OverrideParseException):
        word = str(error.override)
        return f"{word}: must be key=value, quoted where it holds spaces or ,[]{{}}{meant(word)}"
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
    return f"{flags[0]}: no such flag; must be key=value, without dashes{meant(name)}"


def meant(name: str) -> str:
    """Returns " (did you mean X?)": the key of the setting of that name in Python, a section's keys, or the likest."""
    keys = [SETTINGS[name].key] if name in SETTINGS else [key for key in AT_SHELL if key.startswith(f"{name}.")]
    return f" (did you mean {', '.join(keys)}?)" if keys else did_you_mean(name, _KNOWN)


def _omegaconf(error: OmegaConfBaseException, override: str) -> str:
    key = str(error.full_key or error.key or "")
    if isinstance(error, MissingMandatoryValue):
        return f"{key}: a value is needed ({key}=...)"
    if isinstance(error, ConfigAttributeError | ConfigKeyError):
        siblings = [str(k) for k in error.parent_node] if isinstance(error.parent_node, DictConfig | Mapping) else []
        parent, _, name = key.rpartition(".")
        beside = [f"{parent}.{each}" for each in siblings]
        own = f"; an argument of your own class: ++{key}=VALUE" if parent in CLASS_GROUPS else ""
        return f"{key}: no such key{(parent and did_you_mean(key, beside)) or meant(name)}{own}"
    if key in AT_SHELL and override:
        return f"{override}: must be {AT_SHELL[key].allowed}"
    below = [name for name in AT_SHELL if name.startswith(f"{key}.")]
    if below and override:
        return f"{override}: {key} is a section; must be one of its keys: {', '.join(below)}"
    return f"{override or key}: {_lines(error)[0]}"


def _lines(error: BaseException) -> list[str]:
    return [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
