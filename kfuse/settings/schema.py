"""The tree of settings as Hydra's structured configuration, and as the text of `kfuse --help`.

The groups of classes (model, data, optimizer, policy, launcher) stay open: a dotted path, `_target_`, and arguments.
"""

from __future__ import annotations

import importlib.resources
import textwrap
from dataclasses import field, make_dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from kfuse.settings.instantiate import CLASS_GROUPS, LOADING
from kfuse.settings.tree import AT_SHELL, SECTIONS, Leaf, show


def _typed(leaf: Leaf) -> tuple[str, Any, Any]:
    return leaf.key.rpartition(".")[2], leaf.kind | None if leaf.optional else leaf.kind, field(default=leaf.default)


def _schema() -> type:
    """Returns a dataclass with a field for each section, each group, and each setting without a section."""
    parts: list[tuple[str, Any, Any]] = [_typed(leaf) for key, leaf in AT_SHELL.items() if "." not in key]
    for section in SECTIONS:
        own = [leaf for key, leaf in AT_SHELL.items() if key.startswith(f"{section}.")]
        if section not in CLASS_GROUPS:
            typed = [_typed(leaf) for leaf in own]
            if section == "comm":  # a transport's class, as in the groups: another spelling of comm.schedule
                typed.append(("_target_", str | None, field(default=None)))
            kind = make_dataclass(section, typed)
            parts.append((section, kind, field(default_factory=kind)))
    for group in CLASS_GROUPS:
        parts.append((group, dict[str, Any], field(default_factory=_loading if group == "data" else dict)))
    return make_dataclass("Config", parts)


def _loading() -> dict[str, Any]:
    return {name: AT_SHELL[f"data.{name}"].default for name in LOADING}


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
    """Makes the schema and the help's text known to Hydra: `configs/config.yaml` names them."""
    ConfigStore.instance().store("schema", _schema())
    OmegaConf.register_new_resolver("kfuse_settings", settings_help, replace=True)
