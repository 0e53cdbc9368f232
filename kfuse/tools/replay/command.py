"""The command `kfuse replay RUN_DIR [override ...]`: what is asked for, what is checked, and what is printed."""

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
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kfuse.cli.check import prepare
from kfuse.cli.classes import make_policy
from kfuse.observe.recorder import table
from kfuse.policies.signals import BasePolicy, Bounds, Signals
from kfuse.settings.shell import explain
from kfuse.settings.tree import AT_SHELL, ConfigError
from kfuse.tools.replay.run import Change, Replay, run
from kfuse.tools.replay.steps import Recorded, RecordedSteps, SimulatedSteps
from kfuse.tools.run_files import config_path, read_config, read_metrics

USAGE = """\
kfuse replay RUN_DIR [policy=...] [policy.NAME=VALUE ...]

Prints what a policy would have decided on the run recorded in RUN_DIR, and how many steps and samples it would have
taken to the same point. Without policy=... it is the run's own policy, with other arguments if you give some.
batch.min, batch.max, workers.min and workers.max set other bounds than the run's. Nothing is trained. docs/adapt.md
says what is assumed.
Exit status 0; 1 where the policy raises an error; 2 for what is no run directory, or no policy."""

_BOUNDS = ("batch.min", "batch.max", "workers.min", "workers.max")
# What must be in the configuration of the recorded run.
_OF_A_RUN = ("policy._target_", "lr.scaling", "lr.decay", "comm.sync")


def main(words: Sequence[str], compose: Callable[[list[str]], DictConfig]) -> int:
    """Replays and prints. Returns the exit status: 1 where the policy fails.

    words: of the command line, after `kfuse replay`. compose: makes a run's configuration from overrides. Raises
    ConfigError, in one line, for what cannot be replayed.
    """
    if not words:
        raise ConfigError("kfuse replay: must be given the directory of a run: kfuse replay RUN_DIR policy=...")
    run_dir = Path(words[0])
    console = Console(width=max(Console().width, _WIDTH), markup=False, highlight=False, soft_wrap=True)
    try:
        overrides = OverridesParser.create().parse_overrides(list(words[1:]))
        for each in overrides:
            _check_override(each)
        recorded, config = _recorded(run_dir)
        bounds = _bounds(recorded, overrides)
        node = _policy_node(config, [each for each in overrides if each.key_or_group not in _BOUNDS], compose)
    except (HydraException, OmegaConfBaseException) as error:  # of overrides that it cannot read
        raise ConfigError(explain(error)) from error
    policy = make_policy(node)
    is_own = config is not None and node == config["policy"] and bounds == recorded.signals[0].bounds
    name = type(policy).__name__
    source = RecordedSteps(recorded) if is_own else SimulatedSteps(recorded, bounds)
    try:
        result = run(policy, source)
    except (Exception, SystemExit):  # the user's class may raise anything
        traceback.print_exc()
        console.print(f"the policy {name} has raised an error at step {source.next_step}")
        return 1
    kind = "the run's own policy, on the recorded steps" if is_own else "another policy, on steps of its own"
    for text in (f"{name} on {run_dir}: {kind}", *_notes(recorded, config, policy)):
        console.print(text)
    _report(console, recorded, result, None if is_own else name)
    return 0


def _recorded(run_dir: Path) -> tuple[Recorded, dict[str, Any] | None]:
    """Returns the run, and its configuration, which a script's run does not have. Raises ConfigError."""
    lines = [*read_metrics(run_dir)]
    config = read_config(run_dir, _OF_A_RUN) if config_path(run_dir).exists() else None
    known = {} if config is None else {"scaling": config["lr"]["scaling"]}
    known |= {} if config is None else {name: config["comm"][name] for name in ("sync", "reproducible")}
    try:
        return Recorded([*map(Signals.of_record, lines)], **known), config
    except ValueError as error:
        raise ConfigError(f"{run_dir / 'metrics.jsonl'}: {error}") from error


def _bounds(recorded: Recorded, overrides: Sequence[Override]) -> Bounds:
    of_bounds = (each for each in overrides if each.key_or_group in _BOUNDS)
    given: dict[str, Any] = {each.key_or_group.replace(".", "_"): each.value() for each in of_bounds}
    try:
        return replace(recorded.signals[0].bounds, **given)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _check_override(override: Override) -> None:
    key, why = override.key_or_group, ""
    if key not in (*_BOUNDS, "policy") and not key.startswith("policy."):
        why = f"one of policy, policy.NAME, {', '.join(_BOUNDS)}: nothing is trained"
    elif override.is_delete() or override.is_sweep_override():
        why = "key=value, with one value; a list needs [brackets]"
    elif key == "policy" and not isinstance(override.value(), str):
        why = "the name of a policy; its arguments are policy.NAME=VALUE"
    elif key in _BOUNDS:
        AT_SHELL[key].checked(override.value(), shell=True)
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
    if any(steps > 1 for steps, _ in recorded.counts()):
        yield "metrics.jsonl lacks steps: the policy is asked after the recorded ones only"
    for setting, allowed in policy.lr_settings.items():
        if config is not None and (has := config["lr"].get(setting)) not in allowed:
            yield f"{name} is right with lr.{setting}={', '.join(allowed)}; the run has {has}"


_WIDTH = 110  # characters of the tables: a narrower terminal wraps them


def _report(console: Console, recorded: Recorded, result: Replay, predicted: str | None) -> None:
    """Prints the decisions, and steps and samples of the recorded run and of the replay.

    predicted: the policy's name; None for the run's own, whose steps are those of the run.
    """
    if result.changes:
        console.print(_changes(result.changes), soft_wrap=False)
    else:
        console.print("It decides nothing.")
    if result.input_bound:
        console.print(f"Growth that it asks for after {result.input_bound} steps is dropped: data wait is too long.")
    trade_off, (steps, samples) = recorded.trade_off(), map(sum, zip(*recorded.counts(), strict=True))
    totals = table("", "steps", "vs recorded", "samples", "vs recorded")
    totals.add_row("recorded", str(steps), "1.00", str(samples), "1.00")
    if predicted and not result.cut_off and (trade_off is not None or result.steps == steps):
        ratios = f"{result.steps / steps:.2f}", f"{result.samples / samples:.2f}"
        totals.add_row(f"{predicted}, predicted", str(result.steps), ratios[0], str(result.samples), ratios[1])
    console.print(totals, soft_wrap=False)
    if trade_off is None:
        console.print("The noise scale was never known: steps and samples of another policy cannot be predicted.")
    else:
        console.print(
            f"To the same point: at least {trade_off.least_steps:.0f} steps (with very large batches), and at least "
            f"{trade_off.least_samples:.0f} samples (with very small ones); twice of both at the critical batch size, "
            f"{trade_off.critical_batch:.0f}",
        )
    if result.cut_off:
        console.print(f"Cut off after {result.steps} steps: the recorded run's end would take many more.")


def _changes(changes: Sequence[Change]) -> Table:
    """Returns a line for each decision: when it applies, what it changes, and what the policy saw."""
    shown = table("step", "samples", "batch size", "workers", "lr factor", "noise scale then", texts=0)
    shown.add_column("also")
    for each in changes:
        now, then = each.before, each.after
        rates = [f"{factor:.4g}" for factor in each.rates]
        pairs = [(now.batch_size, then.batch_size), (now.workers, then.workers), rates]
        seen, noise = each.seen, "unknown"
        if seen is not None and seen.noise_scale_low is not None:
            noise = f"at least {seen.noise_scale_low:.3g}"
            if seen.noise_scale is not None and seen.noise_scale_high is not None:
                noise = f"{seen.noise_scale:.3g} ({seen.noise_scale_low:.3g} to {seen.noise_scale_high:.3g})"
        shown.add_row(
            str(each.step),
            str(each.samples),
            *("" if before == after else f"{before} -> {after}" for before, after in pairs),
            noise,
            Text("; ".join([*(f"{name} {value}" for name, value in each.others.items()), *each.notes])),
        )
    return shown
