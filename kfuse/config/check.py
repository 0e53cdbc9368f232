"""Whether a composed configuration can be run, before anything starts or is written."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kfuse.config import instantiate
from kfuse.config.messages import explain
from kfuse.config.schema import CLASS_GROUPS, SETTINGS, ConfigError
from kfuse.undecorated import undecorated

_SECTIONS = sorted({key.split(".")[0] for key in SETTINGS if "." in key})
_DATA_OPTIONS = {
    "vocab_size": "data=text",
    "block_size": "data=text",
    "input_shape": "data=digits|cifar10|image_folder",
    "num_classes": "data=digits|cifar10|image_folder",
}
_SET_ELSEWHERE = {"params": "the model's", "lr": "lr.base", "clip_norm": "train.clip_norm"}


def validate(cfg: DictConfig) -> None:
    """Raises ConfigError, naming the key, its value and what is allowed, for a configuration that cannot run.

    Imports the classes named by `_target_`, loads the data, and builds the model and the policy once, so that
    the errors of all of these come before a worker starts.
    """
    try:
        values: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from error
    _check_keys(values)
    for setting in SETTINGS.values():
        value = _get(values, setting.key)
        if not setting.allows(value):
            raise ConfigError(f"{setting.key}={instantiate.show(value)}: must be {setting.allowed}")
    _check_together(values)
    resume = values["checkpoint"]["resume"]
    if resume not in ("never", "auto"):
        path = Path(resume).expanduser()
        if not resume or not path.exists():
            raise ConfigError(f"checkpoint.resume={resume}: must be never, auto, or a path; there is no such path")
        if not any(
            next(path.glob(f"{where}manifest.json"), None) for where in ("", "*/", "checkpoints/", "checkpoints/*/")
        ):
            raise ConfigError(f"checkpoint.resume={resume}: no checkpoint there, nor in its folder checkpoints")
    _check_transport(values["comm"]["_target_"])
    _check_optimizer(values["optimizer"], values["lr"]["base"])
    _check_policy(values["policy"])
    _check_launcher(values["launcher"], values["workers"]["count"])
    split, samples = _check_data(values["data"])
    _check_model(values["model"], split.spec)
    _check_decay(values, samples)


def _get(values: Mapping[str, Any], key: str) -> Any:
    node: Any = values
    for name in key.split("."):
        node = node[name]
    return node


def _check_keys(values: Mapping[str, Any]) -> None:
    """Unknown keys, which `+key=value` lets in, and absent ones, which `~key` leaves."""
    found = {name for name in values if name not in _SECTIONS}
    for section in _SECTIONS:
        if not isinstance(values.get(section), Mapping):
            raise ConfigError(f"{section}: missing, and needed")
        found |= {f"{section}.{name}" for name in values[section]}
    known = {*SETTINGS, *CLASS_GROUPS}
    for key in sorted(found - known):
        raise ConfigError(f"{key}: no such key{instantiate.did_you_mean(key, known)}")
    for key in sorted(known - found):
        raise ConfigError(f"{key}: missing, and needed")


def _check_together(values: Mapping[str, Any]) -> None:
    """What no setting can tell alone."""
    batch, workers, train, comm = (values[name] for name in ("batch", "workers", "train", "comm"))
    for section, name, at_first in (("batch", "size", batch), ("workers", "count", workers)):
        low, value, high = at_first["min"], at_first[name], at_first["max"]
        if low > high:
            raise ConfigError(f"{section}.min={low}: must be at most {section}.max={high}")
        if not low <= value <= high:
            raise ConfigError(f"{section}.{name}={value}: must be {section}.min={low} to {section}.max={high}")
    if batch["micro"] > batch["size"]:
        raise ConfigError(f"batch.micro={batch['micro']}: must be at most batch.size={batch['size']}")
    if train["epochs"] is None and train["steps"] is None:
        raise ConfigError("train.epochs=null, train.steps=null: at least one of them must be a number")
    if comm["reproducible"] and comm["schedule"] not in ("auto", "all_to_all"):
        raise ConfigError(
            f"comm.schedule={comm['schedule']}: must be one of auto, all_to_all with comm.reproducible=true"
        )
    if comm["reproducible"] and comm["sync_every"] > 1:
        raise ConfigError(f"comm.sync_every={comm['sync_every']}: must be 1 with comm.reproducible=true")
    if comm["reproducible"] and comm["dtype"] != "fp32":
        raise ConfigError(f"comm.dtype={comm['dtype']}: must be fp32 with comm.reproducible=true")


def _check_class(
    group: str, node: Any, supplied: Collection[str] = (), first: Collection[str] = (), always: Collection[str] = ()
) -> Any:
    """Returns what the group's `_target_` names, its arguments being right."""
    if not isinstance(node, Mapping) or node.get("_target_") is None:
        raise ConfigError(f"{group}._target_: must be the dotted path of a class or function")
    try:
        return instantiate.check_arguments(node, supplied, first, always)
    except ValueError as error:
        # Messages that start with an argument's name become the key.
        dot = str(error).split("=", 1)[0] in node
        raise ConfigError(f"{group}{'.' if dot else ': '}{error}") from error


def _check_transport(path: str | None) -> None:
    if path is None:
        return
    try:
        factory = instantiate.locate(path)
    except ValueError as error:
        raise ConfigError(f"comm.{error}") from error
    missing = [name for name in ("plan", "launch", "poll", "wait") if not hasattr(factory, name)]
    if missing:
        has = ", ".join(missing)
        raise ConfigError(f"comm._target_={path}: must be a kfuse.comm.transports.Transport, which also has {has}")


def _failed(group: str, node: Mapping[str, Any], error: Exception) -> ConfigError:
    """The error of a call, put down to the argument that it speaks of."""
    message = " ".join(str(error).split()) if isinstance(error, ValueError) else instantiate.one_line(error)
    given = instantiate.arguments(node)
    if message.startswith((f"{group}.", f"{group}=")):
        return ConfigError(message)
    if message.split("=", 1)[0] in given:
        return ConfigError(f"{group}.{message}")
    for name, value in given.items():
        says_value = isinstance(value, str) and value and (value in message or os.path.expanduser(value) in message)
        if says_value or re.search(rf"\b{re.escape(name)}\b", message):
            return ConfigError(f"{group}.{name}={instantiate.show(value)}: {message}")
    call = ", ".join(f"{name}={instantiate.show(value)}" for name, value in given.items())
    return ConfigError(f"{group}: {node['_target_']}({call}): {message}")


def _check_launcher(node: Any, count: int) -> None:
    _check_class("launcher", node)
    try:
        launcher = instantiate.build(node)
    except Exception as error:  # a user's constructor may raise anything
        raise _failed("launcher", node, error) from error
    fixed = getattr(launcher, "workers", None)
    if fixed not in (None, count):
        raise ConfigError(f"workers.count={count}: must be {fixed}, as many as torchrun started")


def _check_data(node: Any) -> tuple[Any, int]:
    """Loads the data; returns the split, and how many samples there are to train on."""
    _check_class("data", node)
    try:
        split = instantiate.build(node)
    except Exception as error:  # a user's loader may raise anything
        raise _failed("data", node, error) from error
    if not all(hasattr(split, name) for name in ("train", "heldout", "spec")):
        raise ConfigError(
            f"data._target_={node['_target_']}: must return a kfuse.data.DataSplit, not a {type(split).__name__}"
        )
    as_dataset = instantiate.locate("kfuse.data.as_dataset")  # by its path: configuration and data stand apart
    lengths = {}
    for part in ("train", "heldout"):
        try:
            lengths[part] = len(as_dataset(getattr(split, part)))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"data._target_={node['_target_']}: {part}: {' '.join(str(error).split())}") from error
        if lengths[part] == 0:
            raise ConfigError(f"data._target_={node['_target_']}: {part} has no samples")
    return split, lengths["train"]


def _check_model(node: Any, spec: Mapping[str, Any]) -> None:
    import torch  # after the cheap checks: it takes a second

    try:
        _check_class("model", node, spec)
    except ConfigError as error:
        missing = error.__cause__.names if isinstance(error.__cause__, instantiate.MissingArguments) else ()
        if options := dict.fromkeys(_DATA_OPTIONS[name] for name in missing if name in _DATA_OPTIONS):
            raise ConfigError(f"{error}; it fits {', '.join(options)}") from error
        raise
    try:
        try:
            with torch.device("meta"):  # no memory, no initialisation; but not every model can
                model = instantiate.build(node, **spec)
        except Exception:
            model = instantiate.build(node, **spec)
    except Exception as error:  # a user's constructor may raise anything
        raise _failed("model", node, error) from error
    if not isinstance(model, torch.nn.Module):
        kind = type(model).__name__
        raise ConfigError(f"model._target_={node['_target_']}: must make a torch.nn.Module, not a {kind}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"model._target_={node['_target_']}: has no parameters to train")


def _check_policy(node: Any) -> None:
    _check_class("policy", node)
    try:
        policy = instantiate.build(node)
    except Exception as error:  # a user's constructor may raise anything
        raise _failed("policy", node, error) from error
    if not hasattr(policy, "decide"):
        raise ConfigError(
            f"policy._target_={node['_target_']}: must make a kfuse.BasePolicy, not a {type(policy).__name__}"
        )


def _check_optimizer(node: Any, lr: float) -> None:
    """Tries the arguments on the torch optimizer that the class is, or is derived from, and one parameter."""
    import torch

    for name, where in _SET_ELSEWHERE.items():
        if isinstance(node, Mapping) and name in node:
            raise ConfigError(f"optimizer.{name}={instantiate.show(node[name])}: not set here but by {where}")
    factory = _check_class("optimizer", node, first=("params",), always=("lr",))
    if not (isinstance(factory, type) and issubclass(factory, torch.optim.Optimizer)):
        raise ConfigError(f"optimizer._target_={node['_target_']}: must be the class of a torch.optim.Optimizer")
    if issubclass(factory, torch.optim.LBFGS | torch.optim.SparseAdam):
        lbfgs = issubclass(factory, torch.optim.LBFGS)
        why = "evaluates the loss several times a step" if lbfgs else "takes sparse gradients only"
        raise ConfigError(f"optimizer._target_={node['_target_']}: must step once on dense gradients; this one {why}")
    quick = {"add_param_group": undecorated(torch.optim.Optimizer.add_param_group)}
    weight = torch.nn.Parameter(torch.zeros(1, 1))
    for base in factory.__mro__:
        if base.__module__.startswith("torch.optim.") and base is not torch.optim.Optimizer:
            known = inspect.signature(base).parameters
            given = {name: value for name, value in instantiate.arguments(node).items() if name in known}
            try:
                type(base.__name__, (base,), quick)(params=[weight], lr=lr, **given)
            except Exception as error:
                raise _failed("optimizer", node, error) from error
            break
    if check := getattr(factory, "check_arguments", None):
        known = inspect.signature(check).parameters
        try:
            check(lr=lr, **{name: value for name, value in instantiate.arguments(node).items() if name in known})
        except Exception as error:
            raise _failed("optimizer", node, error) from error
    # A class of the user's own may hand on **kwargs that its base refuses. Ours are not built in this process.
    if not any(base.__module__.startswith("kfuse.") for base in factory.__mro__):
        try:
            instantiate.build(node, [weight], always={"lr": lr})
        except TypeError as error:
            raise _failed("optimizer", node, error) from error
        except Exception:
            return  # it may need more than this one weight


def _check_decay(values: Mapping[str, Any], samples: int) -> None:
    """A cosine needs steps after the warmup; the run's length is counted in steps of the first batch size."""
    lr, train = values["lr"], values["train"]
    lengths = [train["steps"], train["epochs"] and train["epochs"] * samples / values["batch"]["size"]]
    total = min(length for length in lengths if length is not None)
    if lr["decay"] == "cosine" and lr["warmup_steps"] >= total:
        raise ConfigError(
            f"lr.warmup_steps={lr['warmup_steps']}: must be below the run's {total:.0f} steps with lr.decay=cosine"
        )
