"""Checks a composed configuration before a worker starts or anything is written."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from kfuse.config import instantiate
from kfuse.config.instantiate import show
from kfuse.config.messages import explain
from kfuse.config.schema import CLASS_GROUPS, LOADING, SETTINGS, ConfigError

_SECTIONS = sorted({key.split(".")[0] for key in SETTINGS if "." in key} - {*CLASS_GROUPS})
# The data sets that supply an argument of a model, and the models that take it.
_SUPPLIED_BY = {
    "vocab_size": "data=text",
    "block_size": "data=text",
    "input_shape": "data=digits|cifar10|image_folder",
    "num_classes": "data=digits|cifar10|image_folder",
}
_TAKEN_BY = {"vocab_size": "model=gpt", "input_shape": "model=mlp|convnet"}
_OURS = f"{', '.join(f'data.{name}' for name in LOADING)} are settings of the training loop"
_SET_ELSEWHERE = {"params": "the model's", "lr": "lr.base", "clip_norm": "train.clip_norm"}


def drop_replaced_arguments(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Removes the arguments of a class that the command line replaces with another (`model._target_=my.Net`).

    An option's arguments belong to the option's own class. Those that the command line gives too are kept.
    """
    given = {override.key_or_group for override in OverridesParser.create().parse_overrides(list(overrides))}
    for group in CLASS_GROUPS:
        if f"{group}._target_" in given:
            kept = {key.split(".")[1] for key in given if key.startswith(f"{group}.")}
            kept |= {*LOADING} if group == "data" else set()
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
    _check_combinations(values)
    _check_resume(values["checkpoint"]["resume"])
    _check_transport(values["comm"]["_target_"])
    _check_optimizer(values["optimizer"], values["lr"]["base"])
    if not hasattr(policy := _make("policy", values["policy"]), "decide"):
        raise _wrong_result("policy", values["policy"], policy, "kfuse.BasePolicy")
    launcher = _make("launcher", values["launcher"])
    fixed, gpus = getattr(launcher, "workers", None), getattr(launcher, "gpus", 0)
    if fixed not in (None, values["workers"]["count"]):
        raise ConfigError(f"workers.count={values['workers']['count']}: must be {fixed}, as many as torchrun started")
    if 0 < gpus < values["workers"]["count"]:
        raise ConfigError(
            f"workers.count={values['workers']['count']}: must be at most {gpus}, the number of GPUs that this process "
            "sees, as each worker needs one of its own"
        )
    spec, samples = _check_data(values["data"], values["train"])
    _check_model(values["model"], spec)
    _check_decay(values, samples)


def _check_keys(values: Mapping[str, Any]) -> None:
    """Refuses unknown keys, which `+key=value` adds, and missing ones, which `~key` removed."""
    found = {name for name in values if name not in _SECTIONS}
    for section in _SECTIONS:
        if not isinstance(values.get(section), Mapping):
            raise ConfigError(f"{section}: missing, and needed")
        found |= {f"{section}.{name}" for name in values[section]}
    found |= {f"data.{name}" for name in LOADING if isinstance(values["data"], Mapping) and name in values["data"]}
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
    if train["epochs"] is None and train["steps"] is None:
        raise ConfigError("train.epochs=null, train.steps=null: at least one of them must be a number")
    for name, allowed, text in (
        ("schedule", ("auto", "all_to_all"), "one of auto, all_to_all"),
        ("sync_every", (1,), "1"),
        ("dtype", ("fp32",), "fp32"),
    ):
        if comm["reproducible"] and comm[name] not in allowed:
            raise ConfigError(f"comm.{name}={comm[name]}: must be {text} with comm.reproducible=true")
    if comm["audit_every"] is not None and not comm["reproducible"]:
        raise ConfigError(f"comm.audit_every={comm['audit_every']}: must be null without comm.reproducible=true")
    if comm["slots_on_host"] and not comm["reproducible"]:
        raise ConfigError("comm.slots_on_host=true: must be false with comm.reproducible=false")


def _check_resume(resume: str) -> None:
    if resume in ("never", "auto"):
        return
    path = Path(resume)
    if not resume or not path.exists():
        raise ConfigError(f"checkpoint.resume={resume}: must be never, auto, or a path; there is no such path")
    # A checkpoint, a folder of checkpoints, or a run directory.
    if not any(next(path.glob(f"{at}manifest.json"), None) for at in ("", "*/", "checkpoints/", "checkpoints/*/")):
        raise ConfigError(f"checkpoint.resume={resume}: no checkpoint there, nor in its folder checkpoints")


def _check_transport(path: str | None) -> None:
    if path is None:
        return
    try:
        factory = instantiate.locate(path)
    except ValueError as error:
        raise ConfigError(f"comm.{error}") from error
    missing = ", ".join(name for name in ("plan", "launch", "poll", "wait") if not hasattr(factory, name))
    if missing:
        raise ConfigError(f"comm._target_={path}: must be a kfuse.comm.transports.Transport, which also has {missing}")


def _check_class(
    group: str, node: Any, supplied: Collection[str] = (), first: Collection[str] = (), always: Collection[str] = ()
) -> Any:
    """Returns the class or function that the group's `_target_` names, once its arguments are known to be right."""
    if not isinstance(node, Mapping) or node.get("_target_") is None:
        raise ConfigError(f"{group}._target_: must be the dotted path of a class or function")
    try:
        return instantiate.check_arguments(node, supplied, first, always)
    except ValueError as error:
        # Messages that start with an argument's name become the key.
        dot = str(error).split("=", 1)[0] in node
        missing = error.names if isinstance(error, instantiate.MissingArguments) else ()
        fitting = dict.fromkeys(_SUPPLIED_BY[name] for name in missing if name in _SUPPLIED_BY)
        hint = ""
        if fitting:
            takers = [_TAKEN_BY[name] for name in supplied if name in _TAKEN_BY]
            hint = f"; it fits {', '.join(fitting)}" + "".join(f"; these data fit {model}" for model in takers)
        raise ConfigError(f"{group}{'.' if dot else ': '}{error}{hint}") from error


def _make(group: str, node: Any, supplied: Mapping[str, Any] | None = None) -> Any:
    """Returns what the group's `_target_` makes of its arguments."""
    _check_class(group, node, supplied or {})
    try:
        return instantiate.build(node, **(supplied or {}))
    except Exception as error:  # a user's class may raise anything
        raise _failed(group, node, error) from error


def _failed(group: str, node: Mapping[str, Any], error: Exception) -> ConfigError:
    """The error of a call. It names the argument that the message is about, if that can be found."""
    message = " ".join(str(error).split()) if isinstance(error, ValueError) else instantiate.one_line(error)
    given = instantiate.arguments(node)
    if message.startswith((f"{group}.", f"{group}=")):
        return ConfigError(message)
    if message.split("=", 1)[0] in given:
        return ConfigError(f"{group}.{message}")
    for name, value in given.items():
        names_value = isinstance(value, str) and value and value in message
        if names_value or re.search(rf"\b{re.escape(name)}\b", message):
            return ConfigError(f"{group}.{name}={show(value)}: {message}")
    call = ", ".join(f"{name}={show(value)}" for name, value in given.items())
    return ConfigError(f"{group}: {node['_target_']}({call}): {message}")


def _wrong_result(group: str, node: Mapping[str, Any], made: Any, needed: str) -> ConfigError:
    return ConfigError(f"{group}._target_={node['_target_']}: must make a {needed}, not a {type(made).__name__}")


def _check_data(node: Any, train: Mapping[str, Any]) -> tuple[Mapping[str, Any], int | None]:
    """Loads the data; returns the arguments that they supply to a model, and the number of training samples.

    That is None for a stream. train: the section of the configuration.
    """
    loaders, node = node["workers"], {name: value for name, value in node.items() if name not in LOADING}
    for name in instantiate.parameters(_check_class("data", node)) or ():
        if name in LOADING:
            raise ConfigError(f"data._target_={node['_target_']}: its argument {name} must have another name: {_OURS}")
    split = _make("data", node)
    if not all(hasattr(split, name) for name in ("train", "heldout", "spec")):
        raise _wrong_result("data", node, split, "kfuse.data.DataSplit")
    # By its path: kfuse.config imports no other part of kfuse.
    number_of_samples = instantiate.locate("kfuse.data.given.number_of_samples")
    lengths = {}
    for part in ("train", "heldout"):
        try:
            lengths[part] = number_of_samples(getattr(split, part), part == "heldout", loaders)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"data._target_={node['_target_']}: {part}: {' '.join(str(error).split())}") from error
        if lengths[part] == 0:
            raise ConfigError(f"data._target_={node['_target_']}: {part} has no samples")
    if lengths["train"] is None and (train["epochs"] is not None or train["steps"] is None):
        raise ConfigError(
            f"train.epochs={show(train['epochs'])}, train.steps={show(train['steps'])}: must be null and a number, as "
            f"data._target_={node['_target_']} trains on a stream, which has no epochs"
        )
    return split.spec, lengths["train"]


def _check_model(node: Any, spec: Mapping[str, Any]) -> None:
    import torch  # after the cheap checks: it takes a second

    path = None
    with contextlib.suppress(ValueError):  # of a class that is not there: `_check_class` says so
        node, path = instantiate.initial_weights(node)
    if not isinstance(path, str | None) or path == "":
        raise ConfigError(f"model.init={show(path)}: must be the path of model.pt or model.safetensors, or null")
    _check_class("model", node, spec)
    model = None
    with contextlib.suppress(Exception), torch.device("meta"):  # takes no memory; but not every model can be made so
        model = instantiate.build(node, **spec)
    if model is None:
        model = _make("model", node, spec)
    if not isinstance(model, torch.nn.Module):
        raise _wrong_result("model", node, model, "torch.nn.Module")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"model._target_={node['_target_']}: has no parameters to train")
    if path is not None:
        read_weights = instantiate.locate("kfuse.checkpoint.saved_model.read_weights")
        mismatch = instantiate.locate("kfuse.checkpoint.saved_model.mismatch")
        try:
            why = mismatch(model, read_weights(path))
        except ValueError as error:
            raise ConfigError(f"model.init={error}") from error
        if why:
            raise ConfigError(f"model.init={path}: {why}")


def _check_optimizer(node: Any, lr: float) -> None:
    """Tries the arguments with one parameter, on the torch optimizer that the class is or is derived from."""
    import torch

    for name, where in _SET_ELSEWHERE.items():
        if isinstance(node, Mapping) and name in node:
            raise ConfigError(f"optimizer.{name}={show(node[name])}: not set here but by {where}")
    factory = _check_class("optimizer", node, first=("params",), always=("lr",))
    path = f"optimizer._target_={node['_target_']}"
    if not (isinstance(factory, type) and issubclass(factory, torch.optim.Optimizer)):
        raise ConfigError(f"{path}: must be the class of a torch.optim.Optimizer")
    if issubclass(factory, torch.optim.LBFGS | torch.optim.SparseAdam):
        lbfgs = issubclass(factory, torch.optim.LBFGS)
        why = "evaluates the loss several times a step" if lbfgs else "takes sparse gradients only"
        raise ConfigError(f"{path}: must step once on dense gradients; this one {why}")
    weight = torch.nn.Parameter(torch.zeros(1, 1))
    # Not torch's own add_param_group: its decorator imports torch's compiler, which takes seconds.
    decorated = torch.optim.Optimizer.add_param_group  # against compiling it: a first call imports torch's compiler
    quick = {"add_param_group": getattr(decorated, "__wrapped__", decorated)}
    base = next(base for base in factory.__mro__ if base.__module__.startswith("torch.optim."))
    try:
        if base is not torch.optim.Optimizer:
            type(base.__name__, (base,), quick)(params=[weight], lr=lr, **_known_to(base, node))
        if check := getattr(factory, "check_arguments", None):
            check(lr=lr, **_known_to(check, node))
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


def _known_to(factory: Any, node: Mapping[str, Any]) -> dict[str, Any]:
    """The node's arguments that are in the signature of `factory`."""
    known = inspect.signature(factory).parameters
    return {name: value for name, value in instantiate.arguments(node).items() if name in known}


def _check_decay(values: Mapping[str, Any], samples: int | None) -> None:
    """A decay needs steps after the warmup. The run's length is counted in steps of the first batch size."""
    decay_refusal = instantiate.locate("kfuse.train.lr_schedule.decay_refusal")  # here, as it imports torch
    lr, train = values["lr"], values["train"]
    lengths = [train["steps"], train["epochs"] and train["epochs"] * samples / values["batch"]["size"]]
    total = min(length for length in lengths if length is not None)
    if decay_refusal(lr["decay"], lr["warmup_steps"], total, lr["decay_fraction"]):
        room = f"{1 - lr['decay_fraction']:g} of " if lr["decay"] == "wsd" else ""
        raise ConfigError(
            f"lr.warmup_steps={lr['warmup_steps']}: must be below {room}the run's {total:.0f} steps with "
            f"lr.decay={lr['decay']}"
        )
