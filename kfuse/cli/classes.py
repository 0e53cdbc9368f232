"""Checks the classes that a configuration names: those of its groups, with their arguments, are built once."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from kfuse.checkpoint.manager import load_weights
from kfuse.data import DataSplit
from kfuse.data.sources import number_of_samples
from kfuse.elastic.launchers import TorchrunLauncher
from kfuse.optim.updates import without_compiler
from kfuse.policies import BasePolicy
from kfuse.settings import instantiate, rules
from kfuse.settings.instantiate import class_arguments
from kfuse.settings.tree import ConfigError, completed, show
from kfuse.train.learning_rate import LRSchedule

_SET_ELSEWHERE = {"params": "the model's", "lr": "lr.base", "clip_norm": "train.clip_norm"}
_TOGETHER = "data=text and hf go with model=gpt and hf, data of images with mlp and convnet, csv with mlp"
_ANY_NUMBER = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
_OF_TRANSPORT, _OF_LAUNCHER = ("plan", "launch", "wait"), ("open", "start", "close")


def check(config: Mapping[str, Any], settings: Mapping[str, Any], facts: dict[str, Any]) -> bool:
    """Checks the classes of a configuration, and what rules say of them. Returns whether torchrun starts the workers.

    settings: by name. facts: what is known by the settings.
    """
    if "." in (schedule := settings["comm_schedule"]):
        try:
            transport = instantiate.locate(schedule)
        except ValueError as error:
            raise ConfigError(f"comm.schedule={str(error).removeprefix('_target_=')}") from error
        _check_methods(f"comm.schedule={schedule}", transport, "kfuse.comm.transports.Transport", _OF_TRANSPORT)
    optimizer = _check_optimizer(config["optimizer"], settings["lr_base"])
    policy = make_policy(config["policy"])
    launcher = _make("launcher", config["launcher"])
    fixed = isinstance(launcher, TorchrunLauncher)
    if not fixed:
        named = f"launcher._target_={config['launcher']['_target_']}"
        _check_methods(named, launcher, "kfuse.elastic.launchers.Launcher", _OF_LAUNCHER)
    facts |= rules.policy_facts(policy) | rules.optimizer_facts(optimizer)
    facts |= {"job": "fixed" if fixed else "elastic", "job.gpus": getattr(launcher, "gpus", 0) or None}
    facts |= {"job.workers": launcher.rendezvous.size} if fixed else {}
    rules.check(facts, shell=True)
    spec, samples = _check_data(config["data"])
    facts |= {"data": "stream" if samples is None else "data set"}
    rules.check(facts, shell=True)
    model = _check_model(config["model"], spec)
    if check_model := getattr(optimizer, "check_model", None):
        try:
            check_model(model)
        except ValueError as error:
            raise ConfigError(f"optimizer._target_={config['optimizer']['_target_']}: {error}") from error
    own: Any = completed(settings)
    run = LRSchedule.of(own, samples)
    facts |= rules.run_facts(run.total, settings["lr_decay"], settings["lr_decay_fraction"])
    rules.check(facts, shell=True)
    return fixed


def _check_class(group: str, node: Any, *first: Any, supplied: Collection[str] = ()) -> Any:
    """Returns the class or function that the group's `_target_` names, once its arguments are known to be right."""
    if not isinstance(node, Mapping) or node.get("_target_") is None:
        raise ConfigError(f"{group}._target_: must be the dotted path of a class or function")
    try:
        return instantiate.check_arguments(node, *first, supplied=supplied)
    except ValueError as error:
        raise ConfigError(_of_argument(group, node, str(error)) or f"{group}: {error}") from error


def _make(group: str, node: Any, /, **supplied: Any) -> Any:
    """Returns what the group's `_target_` makes of its arguments, of which some may be such nodes too."""
    _check_class(group, node, supplied=supplied)
    parts = {name: _make(f"{group}.{name}", value) for name, value in node.items() if instantiate.is_node(value)}
    try:
        return instantiate.build({**node, **parts}, **supplied)
    except Exception as error:  # a user's class may raise anything
        raise _failed(group, node, error) from error


def _failed(group: str, node: Mapping[str, Any], error: Exception) -> ConfigError:
    """Returns the error of a call, with the arguments where the message does not begin with one."""
    message = " ".join(str(error).split()) if isinstance(error, ValueError) else instantiate.one_line(error)
    call = ", ".join(f"{name}={show(value)}" for name, value in instantiate.arguments(node).items())
    return ConfigError(_of_argument(group, node, message) or f"{group}: {node['_target_']}({call}): {message}")


def _of_argument(group: str, node: Mapping[str, Any], message: str) -> str | None:
    """Returns a message that begins with an argument, `every=0: ...` or `policy.every=0: ...`, with the group's key."""
    own = message.removeprefix(f"{group}.").removeprefix(f"{group.partition('.')[0]}.")
    return f"{group}.{own}" if own.partition("=")[0].partition("[")[0] in node else None


def _wrong_result(group: str, node: Mapping[str, Any], made: Any, needed: str) -> ConfigError:
    return ConfigError(f"{group}._target_={node['_target_']}: must make a {needed}, not a {type(made).__name__}")


def _check_methods(named: str, given: Any, protocol: str, methods: Sequence[str]) -> None:
    """Raises ConfigError where a class of the user's own, or what it made, lacks one of these methods."""
    for method in methods:
        if not callable(getattr(given, method, None)):
            raise ConfigError(f"{named}: must have the methods of {protocol}; it has no {method}")


def make_policy(node: Any) -> BasePolicy:
    """Returns the policy that the group's values configure. Raises ConfigError where they make none."""
    policy = _make("policy", node)
    if not isinstance(policy, BasePolicy):
        raise _wrong_result("policy", node, policy, "kfuse.BasePolicy")
    return policy


def _check_data(node: Any) -> tuple[Mapping[str, Any], int | None]:
    """Loads the data; returns the arguments that they supply to a model, and the number of training samples.

    That is None for a stream.
    """
    loaders, node = node["num_workers"], class_arguments("data", node)
    split = _make("data", node)
    if not isinstance(split, DataSplit):
        raise _wrong_result("data", node, split, "kfuse.data.DataSplit")
    lengths = {}
    for part in ("train", "heldout"):
        try:
            lengths[part] = number_of_samples(getattr(split, part), part == "heldout", loaders)
            if lengths[part] == 0:
                raise ValueError("has no samples")
        except (TypeError, ValueError) as error:
            raise ConfigError(f"data._target_={node['_target_']}: {part}: {' '.join(str(error).split())}") from error
    return split.spec, lengths["train"]


def _check_model(node: Any, spec: Mapping[str, Any]) -> torch.nn.Module:
    """Returns the model, made with the arguments that the data supply, and compared with the weights of model.init."""
    path, known = None, instantiate.parameters(dict)
    with contextlib.suppress(ValueError):  # of a class that is not there: `_check_class` says so
        node, path = instantiate.initial_weights(node)
        known = instantiate.parameters(instantiate.locate(node.get("_target_")))
    if not isinstance(path, str | None) or path == "":
        raise ConfigError(f"model.init={show(path)}: must be the path of model.pt or model.safetensors, or null")
    needed = [each for each in known.values() if each.default is each.empty and each.kind not in _ANY_NUMBER]
    if lacking := [each.name for each in needed if each.name not in {*node, *spec}]:
        told = f"needs {', '.join(lacking)}, and these data tell {', '.join(spec) or 'nothing'}"
        raise ConfigError(f"model: {node['_target_']} {told}: {_TOGETHER}")
    _check_class("model", node, supplied=spec)
    model = None
    with contextlib.suppress(Exception), torch.device("meta"):  # takes no memory; but not every model can be made so
        model = instantiate.build(node, **spec)
    if model is None:
        model = _make("model", node, **spec)
    if not isinstance(model, torch.nn.Module):
        raise _wrong_result("model", node, model, "torch.nn.Module")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"model._target_={node['_target_']}: has no parameters to train")
    if path is not None:
        try:
            load_weights(model, path, assign=True)
        except ValueError as error:
            raise ConfigError(f"model.init={error}") from error
    return model


def _check_optimizer(node: Any, lr: float) -> type[torch.optim.Optimizer]:
    """Returns the optimizer's class, once its arguments are known to be right.

    They are tried with one parameter, on the torch optimizer that the class is or is derived from.
    """
    for name, where in _SET_ELSEWHERE.items():
        if isinstance(node, Mapping) and name in node:
            raise ConfigError(f"optimizer.{name}={show(node[name])}: not set here but by {where}")
    weight = torch.nn.Parameter(torch.zeros(1, 1))
    factory = _check_class("optimizer", node and {"lr": lr, **node}, [weight])
    unfit = torch.optim.LBFGS | torch.optim.SparseAdam
    if not (isinstance(factory, type) and issubclass(factory, torch.optim.Optimizer)) or issubclass(factory, unfit):
        needed = "the class of a torch.optim.Optimizer that steps once, on dense gradients"
        raise ConfigError(f"optimizer._target_={node['_target_']}: must be {needed}")
    quick = {"add_param_group": without_compiler(torch.optim.Optimizer.add_param_group)}
    base = next(base for base in factory.__mro__ if base.__module__.startswith("torch.optim."))
    try:
        if base is not torch.optim.Optimizer:
            type(base.__name__, (base,), quick)(params=[weight], lr=lr, **_known_to(base, node))
        if check := getattr(factory, "check_arguments", None):
            check(lr=lr, **_known_to(check, node))
    except Exception as error:
        raise _failed("optimizer", node, error) from error
    return factory


def _known_to(factory: Any, node: Mapping[str, Any]) -> dict[str, Any]:
    """The node's arguments that are in the signature of `factory`."""
    known = inspect.signature(factory).parameters
    return {name: value for name, value in instantiate.arguments(node).items() if name in known}
