"""What happens to a composed configuration before it is checked."""

from __future__ import annotations

from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, open_dict

from kfuse.config.schema import CLASS_GROUPS


def drop_replaced(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Removes the arguments of a class that the command line replaces: `model._target_=my.Net`.

    They belong to the option's own class, so those stay that the command line gives too, and no others.
    """
    given = {override.key_or_group for override in OverridesParser.create().parse_overrides(list(overrides))}
    for group in CLASS_GROUPS:
        if f"{group}._target_" in given:
            kept = {key.split(".")[1] for key in given if key.startswith(f"{group}.")}
            with open_dict(cfg):
                cfg[group] = {name: cfg[group][name] for name in cfg[group] if name in kept}
