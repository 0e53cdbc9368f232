"""Checks a composed configuration before a worker starts or anything is written."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from kfuse.comm.sync import Sync
from kfuse.config import instantiate
from kfuse.config.classes import check_data, check_model, check_optimizer, check_transport, make, make_policy
from kfuse.config.instantiate import show
from kfuse.config.messages import explain
from kfuse.config.schema import CLASS_GROUPS, GROUP_SETTINGS, SETTINGS, ConfigError

_SECTIONS = sorted({key.split(".")[0] for key in SETTINGS if "." in key} - {*CLASS_GROUPS})


def drop_replaced_arguments(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Removes the arguments of a class that the command line replaces with another (`model._target_=my.Net`).

    An option's arguments belong to the option's own class. Those that the command line gives too are kept.
    """
    given = {override.key_or_group for override in OverridesParser.create().parse_overrides(list(overrides))}
    for group in CLASS_GROUPS:
        if f"{group}._target_" in given:
            kept = {key.split(".")[1] for key in given if key.startswith(f"{group}.")}
            kept |= {*GROUP_SETTINGS.get(group, ())}
            with open_dict(cfg):
                cfg[group] = {name: cfg[group][name] for name in cfg[group] if name in kept}


def expand_home(cfg: DictConfig | ListConfig) -> None:
    """Replaces a `~` that starts a text value, alone or before a slash, by the home directory.

    For values from option files: in those of the command line a `~` without quotes is no value to Hydra.
    """
    for key in range(len(cfg)) if isinstance(cfg, ListConfig) else list(cfg):
        if OmegaConf.is_interpolation(cfg, key) or OmegaConf.is_missing(cfg, key):
            continue
        value = cfg[key]
        if isinstance(value, DictConfig | ListConfig):
            expand_home(value)
        elif isinstance(value, str) and value.split("/")[0] == "~":
            cfg[key] = os.path.expanduser(value)


def validate(cfg: DictConfig) -> None:
    """Raises ConfigError, which names the key, its value and what it must be, if the configuration cannot run.

    Imports the classes named by `_target_`, loads the data, and builds the model and the policy once, so that
    the errors of all of these come before a worker starts.
    """
    try:
        values: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from error
    _check_keys(values)
    for setting in SETTINGS.values():
        section, _, name = setting.key.rpartition(".")
        value = (values[section] if section else values)[name]
        # The type too: the groups of classes, where data.workers is, take values of any type.
        if not (instantiate.fits(value, setting.kind | None) and setting.allows(value)):
            raise ConfigError(f"{setting.key}={show(value)}: must be {setting.allowed}")
    check_transport(values["comm"]["_target_"])
    _check_combinations(values)
    _check_resume(values["checkpoint"]["resume"])
    check_optimizer(values["optimizer"], values["lr"]["base"], values["comm"]["state"] == "sharded")
    policy = make_policy(values["policy"])
    _check_policy(policy, values)
    _check_launcher(make("launcher", values["launcher"]), policy, values)
    spec, samples = check_data(values["data"], values["train"])
    check_model(values["model"], spec)
    _check_decay(values, samples)


def _check_keys(values: Mapping[str, Any]) -> None:
    """Refuses unknown keys, which `+key=value` adds, and missing ones, which `~key` removed."""
    found = {name for name in values if name not in _SECTIONS}
    for section in _SECTIONS:
        if not isinstance(values.get(section), Mapping):
            raise ConfigError(f"{section}: missing, and needed")
        found |= {f"{section}.{name}" for name in values[section]}
    for group, names in GROUP_SETTINGS.items():
        found |= {f"{group}.{name}" for name in names if isinstance(values[group], Mapping) and name in values[group]}
    known = {*SETTINGS, *CLASS_GROUPS}
    for key in sorted(found - known):
        raise ConfigError(f"{key}: no such key{instantiate.did_you_mean(key, known)}")
    for key in sorted(known - found):
        raise ConfigError(f"{key}: missing, and needed")


def _check_combinations(values: Mapping[str, Any]) -> None:
    """Refuses values that are allowed each, but not together."""
    batch, workers, train, comm = (values[name] for name in ("batch", "workers", "train", "comm"))
    for section, name, at_first in (("batch", "size", batch), ("workers", "count", workers)):
        low, value, high = at_first["min"], at_first[name], at_first["max"]
        if low > high:
            raise ConfigError(f"{section}.min={low}: must be at most {section}.max={high}")
        if not low <= value <= high:
            raise ConfigError(f"{section}.{name}={value}: must be {section}.min={low} to {section}.max={high}")
    if batch["micro"] > batch["size"]:
        raise ConfigError(f"batch.micro={batch['micro']}: must be at most batch.size={batch['size']}")
    if batch["micro_max"] is not None and batch["micro_max"] % batch["micro"]:
        raise ConfigError(f"batch.micro_max={batch['micro_max']}: must be a multiple of batch.micro={batch['micro']}")
    if train["epochs"] is None and train["steps"] is None:
        raise ConfigError("train.epochs=null, train.steps=null: at least one of them must be a number")
    if comm["_target_"] is not None and comm["state"] == "sharded":
        raise ConfigError(f"comm._target_={comm['_target_']}: must be null with comm.state=sharded")
    from kfuse.comm.options import CommOptions  # after the cheap checks, as it imports torch

    try:
        CommOptions.configured(values)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _check_resume(resume: str) -> None:
    if resume in ("never", "auto"):
        return
    path = Path(resume)
    if not resume or not path.exists():
        raise ConfigError(f"checkpoint.resume={resume}: must be never, auto, or a path; there is no such path")
    # A checkpoint, a folder of checkpoints, or a run directory.
    if not any(next(path.glob(f"{at}manifest.json"), None) for at in ("", "*/", "checkpoints/", "checkpoints/*/")):
        raise ConfigError(f"checkpoint.resume={resume}: no checkpoint there, nor in its folder checkpoints")


def _check_policy(policy: Any, values: Mapping[str, Any]) -> None:
    """Refuses a policy, an optimizer and settings that do not go together, as a script's training does."""
    from kfuse.train import refusals  # here, as it imports torch

    lr, comm, node = (values[section] for section in ("lr", "comm", "optimizer"))
    optimizer: Any = instantiate.locate(node["_target_"])
    spelling = refusals.command_line(values["policy"]["_target_"], node["_target_"])
    try:
        refusals.refuse_modes(
            policy, lambda mode: _check_combinations({**values, "comm": {**comm, "sync": mode}}), spelling
        )
        refusals.refuse_fisher(policy, optimizer, comm["state"] == "sharded", spelling)
        refusals.refuse_rates(policy, lr["scaling"], lr["decay"], None, spelling)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _check_launcher(launcher: Any, policy: Any, values: Mapping[str, Any]) -> None:
    """Refuses what the launcher's workers cannot do. policy: may ask for modes of synchronisation."""
    from kfuse.train import refusals  # here, as it imports torch

    count, fixed, gpus = values["workers"]["count"], getattr(launcher, "workers", None), getattr(launcher, "gpus", 0)
    if fixed not in (None, count):
        raise ConfigError(f"workers.count={count}: must be {fixed}, as many as torchrun started")
    if fixed is not None:
        _refuse_pair(values["comm"]["sync"])
        spelling = refusals.command_line(values["policy"]["_target_"], values["optimizer"]["_target_"])
        try:
            refusals.refuse_modes(policy, _refuse_pair, spelling)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    if 0 < gpus < count:
        raise ConfigError(
            f"workers.count={count}: must be at most {gpus}, the number of GPUs that this process sees, as each worker "
            "needs one of its own"
        )


def _refuse_pair(sync: str) -> None:
    """Raises ConfigError for the mode `pair`, which torchrun's workers cannot have."""
    if Sync.parse(sync).mode == "pair":
        raise ConfigError(
            "comm.sync=pair: must be one of ssgd, local:N, sma with launcher=torchrun, which has no supervisor to pass "
            "on decisions between workers at different steps"
        )


def _check_decay(values: Mapping[str, Any], samples: int | None) -> None:
    """A decay needs steps after the warmup. The run's length is counted in steps of the first batch size."""
    from kfuse.train.refusals import refuse_decay

    lr, train = values["lr"], values["train"]
    lengths = [train["steps"], train["epochs"] and train["epochs"] * samples / values["batch"]["size"]]
    total = min(length for length in lengths if length is not None)
    try:
        refuse_decay(lr["decay"], lr["warmup_steps"], total, lr["decay_fraction"], prefix="lr.")
    except ValueError as error:
        raise ConfigError(str(error)) from error
