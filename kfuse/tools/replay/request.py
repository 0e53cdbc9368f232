"""What `kfuse replay` is asked for: reads its command line and the run directory, and checks both."""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from kfuse.config.check import drop_replaced_arguments
from kfuse.config.classes import make_policy
from kfuse.config.instantiate import fits
from kfuse.config.schema import SETTINGS, ConfigError
from kfuse.policies.signals import BasePolicy, Bounds
from kfuse.tools.replay.recorded import Recorded, signals_of
from kfuse.tools.replay.simulated import DecidedSettings, Gain
from kfuse.tools.run_files import config_path, read_config, read_events, read_metrics

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
    """As `lr.scaling` of the run."""
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
    recorded = _read(run_dir)
    config = read_config(run_dir, _OF_A_RUN) if config_path(run_dir).exists() else None  # a script's run has none
    given, of_policy = _read_overrides(overrides)
    node = _policy_node(config, of_policy, given, compose)
    policy = _make_policy(node, None if of_policy else config_path(run_dir))
    recorded_bounds = recorded.signals[0].bounds
    bounds = _bounds(recorded_bounds, given)
    begin, gain, notes = _beginning(run_dir, recorded, config, bounds)
    name = _name(node)
    plot, plot_notes = _plot_path(run_dir, name, asked_plot)
    is_own = config is not None and bounds == recorded_bounds and node == config["policy"]
    return ReplayRequest(
        run_dir=run_dir,
        policy=policy,
        name=name,
        is_own=is_own,
        recorded=recorded,
        events=read_events(run_dir) if is_own else None,
        begin=begin,
        bounds=bounds,
        gain=gain,
        rates_follow_at_once=config is None or not config["lr"].get("change_warmup_steps"),
        sync=None if config is None else config["comm"]["sync"],
        plot=plot,
        notes=(*notes, *_policy_notes(policy, config), *plot_notes),
    )


def _split(words: Sequence[str]) -> tuple[Path, list[str], str | None]:
    """The run directory, the overrides, and the value of `plot=`; None without one. Raises ConfigError."""
    if not words:
        raise ConfigError("kfuse replay: must be given the directory of a run: kfuse replay RUN_DIR policy=...")
    plots = [word.partition("=")[2] for word in words[1:] if word.startswith("plot=")]
    if len(plots) > 1:
        raise ConfigError(f"plot={plots[-1]}: must be given once")
    overrides = [word for word in words[1:] if not word.startswith("plot=")]
    return Path(words[0]), overrides, plots[0] if plots else None


def _read_overrides(words: list[str]) -> tuple[dict[str, Override], list[str]]:
    """The overrides by key, and the words of those that are the policy's. Raises ConfigError."""
    parsed = OverridesParser.create().parse_overrides(words)
    for number, override in enumerate(parsed):
        _check_override(override)
        if any(_place(override) == _place(earlier) for earlier in parsed[:number]):
            raise ConfigError(f"{override.input_line}: must be given once")
    of_policy = [str(each.input_line) for each in parsed if each.key_or_group not in _BOUNDS]
    return {override.key_or_group: override for override in parsed}, of_policy


def _check_override(override: Override) -> None:
    """Raises ConfigError for an override that a replay cannot have."""
    key, line = override.key_or_group, override.input_line
    if key not in (*_BOUNDS, "policy") and not key.startswith("policy."):
        allowed = f"policy, policy.NAME, {', '.join(_BOUNDS)} or plot"
        raise ConfigError(f"{line}: must be one of {allowed}: nothing is trained")
    if override.is_delete():
        raise ConfigError(f"{line}: must be key=value: nothing can be removed")
    if override.is_sweep_override():
        raise ConfigError(f"{line}: must be one value; a list needs [brackets]")
    if key == "policy" and not isinstance(override.value(), str):
        raise ConfigError(f"{line}: must be the name of a policy; its arguments are policy.NAME=VALUE")
    setting = SETTINGS.get(key)
    if setting is not None and not (fits(override.value(), setting.kind | None) and setting.allows(override.value())):
        raise ConfigError(f"{line}: must be {setting.allowed}")


def _place(override: Override) -> tuple[str, str | None]:
    """What it sets: `policy@policy.first=gns` and `policy=compose` have the same key, and are of two places."""
    return override.key_or_group, override.package


def _read(run_dir: Path) -> Recorded:
    """The recorded steps. Raises ConfigError where they cannot be replayed."""
    lines = read_metrics(run_dir)
    try:
        return Recorded(signals_of(lines), [line["step_time_s"] for line in lines])
    except ValueError as error:
        raise ConfigError(f"{run_dir / 'metrics.jsonl'}: {error}") from error


def _policy_node(
    config: Mapping[str, Any] | None,
    of_policy: list[str],
    given: Mapping[str, Any],
    compose: Callable[[list[str]], DictConfig],
) -> dict[str, Any]:
    """The arguments of the policy, and its class. Raises ConfigError where the overrides name none."""
    if "policy" in given or "policy._target_" in given:
        cfg = compose(of_policy)
        drop_replaced_arguments(cfg, of_policy)
        node: Any = OmegaConf.to_container(cfg.policy, resolve=True)
        return dict(node)
    if config is None:
        raise ConfigError("policy: must be given: the run is a script's, whose own policy is not recorded")
    node = OmegaConf.create(config["policy"])
    for key, override in given.items():
        if key.startswith("policy.") and key not in SETTINGS:
            OmegaConf.update(node, key.removeprefix("policy."), override.value())
    return OmegaConf.to_container(node)  # type: ignore[return-value]


def _make_policy(node: Mapping[str, Any], config_file: Path | None) -> BasePolicy:
    """The policy. config_file: where its arguments come from; None: the command line. Raises ConfigError."""
    try:
        policy: BasePolicy = make_policy(node)
    except ConfigError as error:
        raise error if config_file is None else ConfigError(f"{config_file}: {error}") from error
    _refuse_hooks(policy)
    return policy


def _policy_notes(policy: BasePolicy, config: Mapping[str, Any] | None) -> list[str]:
    """Which settings of the run the policy is not right with, and which of its methods are not called."""
    name, notes = type(policy).__name__, list[str]()
    for setting, allowed in policy.lr_settings().items():
        if config is not None and config["lr"].get(setting) not in allowed:
            needs = f"lr.{setting}={', '.join(allowed)}"
            notes.append(f"{name} is right with {needs}; the run has {config['lr'].get(setting)}")
    if hooks := _hooks(policy):
        notes.append(f"{name}: its hooks are not called: {', '.join(hooks)}")
    return notes


def _name(node: Mapping[str, Any]) -> str:
    """The option of kfuse's configs/policy that has this policy's class; the class's name where none has."""
    target = str(node["_target_"])
    for file in importlib.resources.files("kfuse.configs").joinpath("policy").iterdir():
        option: Any = OmegaConf.create(file.read_text())
        if option["_target_"] == target:
            return file.name.removesuffix(".yaml")
    return target.rpartition(".")[2]


def _hooks(policy: BasePolicy) -> list[str]:
    """The hooks that the policy's class has."""
    return [name for name in _HOOKS if getattr(type(policy), name, None) is not getattr(BasePolicy, name)]


def _refuse_hooks(policy: BasePolicy) -> None:
    """Raises ConfigError for a policy that decides in its hooks only: they need the training."""
    if getattr(type(policy), "decide", None) is BasePolicy.decide and (hooks := _hooks(policy)):
        raise ConfigError(
            f"policy: {type(policy).__name__} acts in {', '.join(hooks)}, which need the training under way: to be "
            "replayed it must decide in decide(signals)"
        )


def _bounds(recorded: Bounds, given: Mapping[str, Any]) -> Bounds:
    """The run's bounds, with those of the command line in their place. Raises ConfigError for what are none."""
    changed = {}
    for key in _BOUNDS:
        if key in given:
            changed[key.replace(".", "_")] = given[key].value()
    try:
        return Bounds(**{**vars(recorded), **changed})
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _beginning(
    run_dir: Path, recorded: Recorded, config: Mapping[str, Any] | None, bounds: Bounds
) -> tuple[DecidedSettings, Gain, list[str]]:
    """What the run began with, the learning rate's factor by batch size, and what is not known of the run.

    Raises ConfigError where the bounds do not include what the run began with.
    """
    from kfuse.train.lr_schedule import Scaling, gain

    scaling: Scaling = "none"
    first, notes = recorded.signals[0], []
    base = first.base_batch_size or first.batch_size
    if config is None:
        notes.append("a script's run: its lr_scaling is not recorded, so lr follows lr_scale alone")
    else:
        scaling = config["lr"]["scaling"]
    # Not workers.count of the configuration: where the run was resumed that is the number it went on with.
    begin = DecidedSettings(base, first.workers)
    if first.step > 0:
        begin = DecidedSettings(first.batch_size, first.workers, first.lr_scale)
        notes.append(f"the run's steps before {first.step} are in another directory: the policy begins anew there")
    if not recorded.is_whole:
        notes.append("metrics.jsonl lacks steps (observe.every): the policy is asked after the recorded ones only")
    for name, value in (("batch", begin.batch_size), ("workers", begin.workers)):
        low, high = getattr(bounds, f"{name}_min"), getattr(bounds, f"{name}_max")
        if not low <= value <= high:
            allowed = f"must include the {value} that the run began with"
            raise ConfigError(f"{run_dir}: {name}.min={low}, {name}.max={high}: {allowed}")

    def factor(batch_size: int, mean_grad_sq: float | None, mean_grad_variance: float | None) -> float:
        return gain(scaling, batch_size, base, mean_grad_sq, mean_grad_variance)

    return begin, factor, notes


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
