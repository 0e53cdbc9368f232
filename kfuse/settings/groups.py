"""The groups of classes of a configuration: a dotted path, `_target_`, and the arguments of that class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kfuse.settings.tree import AT_SHELL

CLASS_GROUPS = ("model", "data", "optimizer", "policy", "launcher")
LOADING = tuple(key.partition(".")[2] for key in AT_SHELL if key.startswith("data."))
"""The keys of the group data that are not arguments of its class."""


def class_arguments(group: str, node: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a group's node without the keys that are not arguments of its class."""
    return {name: value for name, value in node.items() if group != "data" or name not in LOADING}
