"""What `kfuse replay` is asked for: reads its command line and the run directory, and checks both."""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from kfuse.cli.check import prepare
from kfuse.cli.classes import make_policy
from kfuse.policies.signals import BasePolicy, Bounds
from kfuse.settings.tree import AT_SHELL, ConfigError
from kfuse.tools.replay.recorded import Recorded, signals_of
from kfuse.tools.replay.simulated import DecidedSettings, Gain
from kfuse.tools.run_files import config_path, read_config, read_events, read_metrics
from kfuse.train.lr_schedule import gain

_BOUNDS = ("batch.min", "batch.max", "workers.min", "workers.max")
_OF_A_RUN = ("policy", "lr.scaling", "lr.decay", "comm.sync")
"""What must be in the configuration of the recorded run."""
_HOOKS = ("before_train", "before_epoch", "before_step", "after_step", "after_epoch", "after_train")


@dataclass(frozen=True)
class ReplayRequest:
    """A replay, checked and ready to run."""

    run_dir: Path
    policy: BasePolicy
    name: str
    """Its option of `policy=`; the class's name for a class that has none."""
    is_own: bool
    """The policy is the run's own, so it follows the recorded steps."""
    recorded: Recorded
    events: Sequence[Mapping[str, Any]] | None
    """The run's records of events.jsonl, where the policy is its own; None where there are none."""
    begin: DecidedSettings
    """What the run was configured with."""
    bounds: Bounds
    gain: Gain
    """The learning rate's factor, by `lr.scaling` of the run."""
    rates_follow_at_once: bool
    """A change of the batch size changes the learning rate at once: there is no warm-up after it."""
    sync: str | None
    plot: Path | None
    """Where to draw; None: nowhere."""
    notes: tuple[str, ...]
    """What is not known of the run, in sentences."""


def read_request(words: Sequence[str], compose: Callable[[list[str]], DictConfig]) -> ReplayRequest:
    """Reads the run directory, and makes the policy. Raises ConfigError, in one line, for what cannot be replayed.

    words: of the command line, after `kfuse replay`. compose: makes a run's configuration from overrides.
    """
    run_dir, overrides, asked_plot = _split(words)
    lines = read_metrics(run_dir)
    try:
        recorded = Recorded(signals_of(lines), [line["step_time_s"] for line in lines])
    except ValueError as error:
        raise ConfigError(f"{run_dir / 'metrics.jsonl'}: {error}") from error
    config = read_config(run_dir, _OF_A_RUN) if config_path(run_dir).exists() else None  # a script's run has none
    bounds = _bounds(recorded.signals[0].bounds, overrides)
    of_policy = [each for each in overrides if each.key_or_group not in _BOUNDS]
    node = _policy_node(config, of_policy, compose)
    try:
        policy: BasePolicy = make_policy(node)
    except ConfigError as error:
        raise error if of_policy else ConfigError(f"{config_path(run_dir)}: {error}") from error
    hooks = [name for name in _HOOKS if getattr(type(policy), name, None) is not getattr(BasePolicy, name)]
    if hooks and getattr(type(policy), "decide", None) is BasePolicy.decide:
        raise ConfigError(
            f"policy: {type(policy).__name__} acts in {', '.join(hooks)}, which need the training under way: to be "
            "replayed it must decide in decide(signals)"
        )
    begin = _beginning(run_dir, recorded, bounds)
    name = _name(node)
    plot, plot_notes = _plot_path(run_dir, name, asked_plot)
    is_recorded = bounds == recorded.signals[0].bounds
    is_own = config is not None and is_recorded and node == config["policy"]
    return ReplayRequest(
        run_dir=run_dir,
        policy=policy,
        name=name,
        is_own=is_own,
        recorded=recorded,
        events=read_events(run_dir) if is_own else None,
        begin=begin,
        bounds=bounds,
        gain=_gain("none" if config is None else config["lr"]["scaling"], _base(recorded)),
        rates_follow_at_once=config is None or not config["lr"].get("change_warmup_steps"),
        sync=None if config is None else config["comm"]["sync"],
        plot=plot,
        notes=(*_notes(recorded, config, policy, hooks), *plot_notes),
    )


def _split(words: Sequence[str]) -> tuple[Path, list[Override], str | None]:
    """Returns the run directory, the overrides, and the value of `plot=`; None without one. Raises ConfigError."""
    if not words:
        raise ConfigError("kfuse replay: must be given the directory of a run: kfuse replay RUN_DIR policy=...")
    plots = [word.partition("=")[2] for word in words[1:] if word.startswith("plot=")]
    if len(plots) > 1:
        raise ConfigError(f"plot={plots[-1]}: must be given once")
    overrides = OverridesParser.create().parse_overrides([word for word in words[1:] if not word.startswith("plot=")])
    places = set[tuple[str, str | None]]()
    for each in overrides:
        # `policy@policy.first=gns` and `policy=compose` have the same key, and set two places.
        if (place := (each.key_or_group, each.package)) in places:
            raise ConfigError(f"{each.input_line}: must be given once")
        places.add(place)
        if why := _wrong_override(each):
            raise ConfigError(f"{each.input_line}: {why}")
    return Path(words[0]), overrides, plots[0] if plots else None


def _wrong_override(override: Override) -> str | None:
    """Returns what is wrong with an override that a replay cannot have; None if nothing is."""
    key = override.key_or_group
    if key not in (*_BOUNDS, "policy") and not key.startswith("policy."):
        return f"must be one of policy, policy.NAME, {', '.join(_BOUNDS)} or plot: nothing is trained"
    if override.is_delete():
        return "must be key=value: nothing can be removed"
    if override.is_sweep_override():
        return "must be one value; a list needs [brackets]"
    if key == "policy" and not isinstance(override.value(), str):
        return "must be the name of a policy; its arguments are policy.NAME=VALUE"
    setting = AT_SHELL.get(key)
    if setting is not None and not setting.allows(override.value()):
        return f"must be {setting.allowed}"
    return None


def _policy_node(
    config: Mapping[str, Any] | None, of_policy: Sequence[Override], compose: Callable[[list[str]], DictConfig]
) -> dict[str, Any]:
    """Returns the policy's class and arguments: of the overrides, else of the run with the overrides' arguments.

    Raises ConfigError where neither names a policy.
    """
    if {"policy", "policy._target_"} & {each.key_or_group for each in of_policy}:
        words = [str(each.input_line) for each in of_policy]
        cfg = compose(words)
        prepare(cfg, words)
        node: Any = OmegaConf.to_container(cfg.policy, resolve=True)
        return dict(node)
    if config is None:
        raise ConfigError("policy: must be given: the run is a script's, whose own policy is not recorded")
    own = OmegaConf.create(config["policy"])
    for each in of_policy:
        OmegaConf.update(own, each.key_or_group.removeprefix("policy."), each.value())
    return OmegaConf.to_container(own)  # type: ignore[return-value]


def _name(node: Mapping[str, Any]) -> str:
    """Returns the option of kfuse's configs/policy that has this policy's class; the class's name where none has."""
    target = str(node["_target_"])
    for file in importlib.resources.files("kfuse.configs").joinpath("policy").iterdir():
        option: Any = OmegaConf.create(file.read_text())
        if option["_target_"] == target:
            return file.name.removesuffix(".yaml")
    return target.rpartition(".")[2]


def _bounds(recorded: Bounds, overrides: Sequence[Override]) -> Bounds:
    """Returns the run's bounds, with those of the command line in their place. Raises ConfigError for what are none."""
    given = (each for each in overrides if each.key_or_group in _BOUNDS)
    values: dict[str, Any] = {each.key_or_group.replace(".", "_"): each.value() for each in given}
    try:
        return replace(recorded, **values)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _beginning(run_dir: Path, recorded: Recorded, bounds: Bounds) -> DecidedSettings:
    """Returns what the run began with. Raises ConfigError where the bounds do not include it.

    Not workers.count of the configuration: where the run was resumed that is the number it went on with.
    """
    first = recorded.signals[0]
    if first.step > 0:
        begin = DecidedSettings(first.batch_size, first.workers, first.lr_scale)
    else:
        begin = DecidedSettings(_base(recorded), first.workers)
    for name, value in (("batch", begin.batch_size), ("workers", begin.workers)):
        low, high = getattr(bounds, f"{name}_min"), getattr(bounds, f"{name}_max")
        if not low <= value <= high:
            allowed = f"must include the {value} that the run began with"
            raise ConfigError(f"{run_dir}: {name}.min={low}, {name}.max={high}: {allowed}")
    return begin


def _notes(
    recorded: Recorded, config: Mapping[str, Any] | None, policy: BasePolicy, hooks: Sequence[str]
) -> Iterator[str]:
    """Yields what is not known of the run, and what of it the policy is not right with, in sentences."""
    if config is None:
        yield "a script's run: its lr_scaling is not recorded, so lr follows lr_scale alone"
    if first := recorded.signals[0].step:
        yield f"the run's steps before {first} are in another directory: the policy begins anew there"
    if not recorded.is_whole:
        yield "metrics.jsonl lacks steps (observe.every): the policy is asked after the recorded ones only"
    name = type(policy).__name__
    for setting, allowed in policy.lr_settings().items():
        if config is not None and (has := config["lr"].get(setting)) not in allowed:
            yield f"{name} is right with lr.{setting}={', '.join(allowed)}; the run has {has}"
    if hooks:
        yield f"{name}: its hooks are not called: {', '.join(hooks)}"


def _base(recorded: Recorded) -> int:
    """Returns the batch size that learning rates refer to."""
    return recorded.signals[0].base_batch_size or recorded.signals[0].batch_size


def _gain(scaling: str, base: int) -> Gain:
    return lambda batch_size, *means: gain(scaling, batch_size, base, *means)


def _plot_path(run_dir: Path, name: str, asked: str | None) -> tuple[Path | None, tuple[str, ...]]:
    """Where to draw, and what is to be said of it. asked: the value of `plot=`; None: without one.

    Raises ConfigError for a path that cannot be, and where it is asked for without matplotlib.
    """
    if asked == "null":
        return None, ()
    if find_spec("matplotlib") is None:
        if asked is not None:
            raise ConfigError(f"plot={asked}: needs matplotlib: pip install matplotlib")
        return None, ("no plot is drawn, which needs matplotlib: pip install matplotlib",)
    if asked is None:
        return run_dir / f"replay_{name}.png", ()
    path = Path(asked)
    if not path.name or path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"plot={asked}: must be a file in a directory that is there, or null")
    return path, ()
