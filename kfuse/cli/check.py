"""Checks a composed configuration before training starts or anything is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from kfuse.cli.first import FirstWorker
from kfuse.observe.sinks import missing
from kfuse.settings import rules, shell
from kfuse.settings.instantiate import CLASS_GROUPS, LOADING
from kfuse.settings.tree import AT_SHELL, SECTIONS, ConfigError, by_key, completed, flat

shell.register()


def prepare(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Completes what Hydra has composed of these overrides, in place.

    1) Removes the arguments of a class that the command line replaces with another (`model._target_=my.Net`).
    2) Makes `comm._target_`, a transport's class, the schedule.
    3) Fills in what follows from other settings where it is null, for those who read the configuration.
    """
    _drop_replaced_arguments(cfg, overrides)
    with open_dict(cfg.comm):
        cfg.comm.schedule = cfg.comm.pop("_target_", None) or cfg.comm.schedule
    keys = {leaf.name: key for key, leaf in AT_SHELL.items() if key.startswith(("batch.", "workers."))}
    known = {name: OmegaConf.select(cfg, key) for name, key in keys.items()}
    for name, value in completed(known).items():
        if value != known[name]:
            OmegaConf.update(cfg, keys[name], value)
    if cfg.checkpoint.resume is None:
        cfg.checkpoint.resume = "never"  # `kfuse` itself resumes in a run directory that it was given


def _drop_replaced_arguments(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """An option's arguments belong to the option's own class. Those that the command line gives too are kept."""
    given = {override.key_or_group for override in OverridesParser.create().parse_overrides(list(overrides))}
    for group in CLASS_GROUPS:
        if f"{group}._target_" in given:
            kept = {key.split(".")[1] for key in given if key.startswith(f"{group}.")}
            kept |= {*LOADING} if group == "data" else set()
            with open_dict(cfg):
                cfg[group] = {name: cfg[group][name] for name in cfg[group] if name in kept}


def validate(cfg: DictConfig, first: FirstWorker | None = None) -> bool:
    """Raises ConfigError, which names the key, its value and what it must be, if the configuration cannot run.

    Imports the classes named by `_target_`, loads the data, and builds the model and the policy once, so that
    the errors of all of these come before training starts. Returns whether the launcher's workers are torchrun's.
    first: does this, where it fits.
    """
    try:
        config: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(shell.explain(error)) from error
    _check_keys(config)
    settings = flat(config)
    facts = by_key(settings)
    rules.check(facts, shell=True)
    if why := missing(settings["observe_sinks"]):
        raise ConfigError(f"observe.sinks: {why}")
    _check_resume(settings["checkpoint_resume"])
    if first is not None and first.fits(config):
        first.check(config)
        return False
    from kfuse.cli import classes  # imports torch, which takes seconds: what needs no class was checked before

    return classes.check(config, settings, facts)


def _check_keys(config: Mapping[str, Any]) -> None:
    """Refuses unknown keys, which `+key=value` adds, and missing ones, which `~key` removed."""
    found = {name for name in config if name not in SECTIONS}
    for section in SECTIONS:
        if not isinstance(config.get(section), Mapping):
            raise ConfigError(f"{section}: missing, and needed")
        names = LOADING if section in CLASS_GROUPS else config[section]
        found |= {f"{section}.{name}" for name in names if name in config[section]}
    known = {*AT_SHELL, *CLASS_GROUPS} - {"data"}
    for key in sorted(found - known):
        raise ConfigError(f"{key}: no such key{shell.meant(key)}")
    for key in sorted(known - found):
        raise ConfigError(f"{key}: missing, and needed")


def _check_resume(resume: str) -> None:
    if resume in ("never", "auto"):
        return
    path = Path(resume)
    # A checkpoint, a folder of checkpoints, or a run directory.
    places = ("", "*/", "checkpoints/", "checkpoints/*/")
    if not resume or not any(next(path.glob(f"{at}manifest.json"), None) for at in places):
        raise ConfigError(f"checkpoint.resume={resume}: must be never, auto, or the path of a checkpoint")
