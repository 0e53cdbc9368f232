"""The command `kfuse replay RUN_DIR [override ...]`: reads what is asked for, and checks it and the run directory."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kfuse.cli.check import prepare
from kfuse.cli.classes import make_policy
from kfuse.policies.signals import BasePolicy
from kfuse.settings.messages import explain
from kfuse.settings.tree import AT_SHELL, ConfigError
from kfuse.tools.replay import report
from kfuse.tools.replay.report import ReplayRequest
from kfuse.tools.replay.run import compared, run
from kfuse.tools.replay.steps import DecidedSettings, Recorded, RecordedSteps, SimulatedSteps, signals_of
from kfuse.tools.run_files import config_path, read_config, read_events, read_metrics
from kfuse.train.lr_schedule import gain

USAGE = """\
kfuse replay RUN_DIR [policy=...] [policy.NAME=VALUE ...]

Prints what a policy would have decided on the run recorded in RUN_DIR, and how many steps and samples it would have
taken to the same point. Without policy=... it is the run's own policy, with other arguments if you give some.
batch.min, batch.max, workers.min and workers.max set other bounds than the run's. Nothing is trained. docs/policies.md
says what is assumed.
Exit status 0; 1 where the policy raises an error; 2 for what is no run directory, or no policy."""

_BOUNDS = ("batch.min", "batch.max", "workers.min", "workers.max")
_OF_A_RUN = ("policy._target_", "lr.scaling", "lr.decay", "comm.sync")
"""What must be in the configuration of the recorded run."""


def main(words: Sequence[str], compose: Callable[[list[str]], DictConfig]) -> int:
    """Replays and prints. Returns the exit status: 1 where the policy fails.

    words: of the command line, after `kfuse replay`. compose: makes a run's configuration from overrides. Raises
    ConfigError for what cannot be replayed.
    """
    try:
        request = _request(words, compose)
    except (HydraException, OmegaConfBaseException) as error:  # of overrides that it cannot read
        raise ConfigError(explain(error)) from error
    console, recorded = report.console(), request.recorded
    source = RecordedSteps(recorded) if request.is_own else SimulatedSteps(recorded, request.gain, request.bounds)
    try:
        result = run(request.policy, source, request.begin, request.bounds, request.sync)
    except (Exception, SystemExit):  # the user's class may raise anything
        traceback.print_exc()
        name = type(request.policy).__name__
        report.say(console, f"the policy {name} has raised an error at step {source.next_step}")
        return 1
    trade_off = recorded.trade_off()
    report.print_report(console, request, result, trade_off)
    if request.events is not None:
        first = recorded.signals[0].step
        report.say(console, compared(result.changes, request.gain, request.events, first))
    elif request.is_own:
        report.say(console, "not compared with the recorded decisions: there is no events.jsonl")
    return 0


def _request(words: Sequence[str], compose: Callable[[list[str]], DictConfig]) -> ReplayRequest:
    """Reads the run directory, and makes the policy. Raises ConfigError, in one line, for what cannot be replayed."""
    if not words:
        raise ConfigError("kfuse replay: must be given the directory of a run: kfuse replay RUN_DIR policy=...")
    run_dir, overrides = Path(words[0]), OverridesParser.create().parse_overrides(list(words[1:]))
    for each in overrides:
        _check_override(each)
    lines = read_metrics(run_dir)
    try:
        recorded = Recorded(signals_of(lines))
    except ValueError as error:
        raise ConfigError(f"{run_dir / 'metrics.jsonl'}: {error}") from error
    config = read_config(run_dir, _OF_A_RUN) if config_path(run_dir).exists() else None  # a script's run has none
    first = recorded.signals[0]
    of_bounds = (each for each in overrides if each.key_or_group in _BOUNDS)
    given: dict[str, Any] = {each.key_or_group.replace(".", "_"): each.value() for each in of_bounds}
    try:
        bounds = replace(first.bounds, **given)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    of_policy = [each for each in overrides if each.key_or_group not in _BOUNDS]
    node = _policy_node(config, of_policy, compose)
    try:
        policy: BasePolicy = make_policy(node)
    except ConfigError as error:
        raise error if of_policy else ConfigError(f"{config_path(run_dir)}: {error}") from error
    # Not workers.count of the configuration: where the run was resumed that is the number it went on with.
    base = first.base_batch_size or first.batch_size
    begin = DecidedSettings(first.batch_size, first.workers, first.lr_scale)
    begin = begin if first.step > 0 else DecidedSettings(base, first.workers)
    option = next((each.value() for each in of_policy if each.key_or_group == "policy"), None)
    name, is_own = str(option or type(policy).__name__), config is not None and node == config["policy"]
    is_own = is_own and bounds == first.bounds
    scaling = "none" if config is None else config["lr"]["scaling"]
    return ReplayRequest(
        run_dir=run_dir,
        policy=policy,
        name=name,
        is_own=is_own,
        recorded=recorded,
        events=read_events(run_dir) if is_own else None,
        begin=begin,
        bounds=bounds,
        gain=lambda batch_size, *means: gain(scaling, batch_size, base, *means),
        sync=None if config is None else config["comm"]["sync"],
        notes=tuple(_notes(recorded, config, policy)),
    )


def _check_override(override: Override) -> None:
    """Raises ConfigError for an override that a replay cannot have."""
    key, why = override.key_or_group, ""
    if key not in (*_BOUNDS, "policy") and not key.startswith("policy."):
        why = f"one of policy, policy.NAME, {', '.join(_BOUNDS)}: nothing is trained"
    elif override.is_delete() or override.is_sweep_override():
        why = "key=value, with one value; a list needs [brackets]"
    elif key == "policy" and not isinstance(override.value(), str):
        why = "the name of a policy; its arguments are policy.NAME=VALUE"
    elif key in _BOUNDS and not AT_SHELL[key].allows(override.value()):
        why = AT_SHELL[key].allowed
    if why:
        raise ConfigError(f"{override.input_line}: must be {why}")


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


def _notes(recorded: Recorded, config: Mapping[str, Any] | None, policy: BasePolicy) -> Iterator[str]:
    """Yields what is not known of the run, and what of it the policy is not right with, in sentences."""
    name = type(policy).__name__
    if config is None:
        yield "a script's run: its lr_scaling is not recorded, so lr follows lr_scale alone"
    if first := recorded.signals[0].step:
        yield f"the run's steps before {first} are in another directory: the policy begins anew there"
    if not recorded.is_whole:
        yield "metrics.jsonl lacks steps: the policy is asked after the recorded ones only"
    for setting, allowed in policy.lr_settings.items():
        if config is not None and (has := config["lr"].get(setting)) not in allowed:
            yield f"{name} is right with lr.{setting}={', '.join(allowed)}; the run has {has}"
    if type(policy).after_step is not BasePolicy.after_step or type(policy).after_epoch is not BasePolicy.after_epoch:
        yield f"{name}: its hooks are not called"
