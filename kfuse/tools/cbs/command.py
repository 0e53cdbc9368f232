"""`kfuse cbs run=RUN_DIR`: the critical batch size over a run, measured by branches from its checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_type_hints

from omegaconf import OmegaConf
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from kfuse.observe import write_whole
from kfuse.observe.display import figure
from kfuse.settings.instantiate import describe, fits, one_line
from kfuse.settings.tree import ConfigError, did_you_mean, show
from kfuse.tools.cbs.branches import BranchError, Run, Start
from kfuse.tools.cbs.estimate import CriticalBatch, Plan, Trace, calibration, measure

USAGE = """\
kfuse cbs run=RUN_DIR [key=value ...]

Measures the critical batch size B*: from checkpoints of a run of kfuse, branches train on at k times the batch size
and f(k) times the learning rate. B* is the largest batch whose loss stays within a tolerance of the smallest one's.
B* over the noise scale is the calibration that policy=gns takes as policy.factor. Results: RUN_DIR/cbs/cbs.json.
Run it where the run was started. Stopped or killed, it goes on where it was.

  run=DIR                     the run's directory; it needs checkpoints: checkpoint.every_steps=N checkpoint.keep=M
  steps=null                  checkpoints to measure at, by step: [200,400]; null: all that are there
  factors=[1,2,4,8,16,32]     values of k, ascending; the first is the reference
  repetitions=5               of each branch, with other data orders (2 to 31)
  samples=null                samples of each branch; null: 16 steps of the largest batch
  tolerance=0.01              how far a loss may be above the reference's, as a part of it
  window=0.25                 part of a branch, at its end, whose mean loss counts
  lr_scaling=null             f(k): sqrt, linear or none; null: linear for SGD, else sqrt
  workers=null                worker processes of a branch; null: workers.count of the run

Exit status 0; 1 where a branch fails; 2 for wrong arguments; 130 after Ctrl-C."""


_OF_RUN: dict[str, Any] = {
    "run": str,
    "steps": list[int] | None,
    "lr_scaling": Literal["sqrt", "linear", "none"] | None,
    "workers": int | None,
}
_OF_PLAN = {name: hint for name, hint in get_type_hints(Plan).items() if name not in ("batch_size", "branch_samples")}


def main(words: Sequence[str]) -> int:
    """Runs the command; returns the exit status. Raises ConfigError for wrong arguments, KeyboardInterrupt."""
    given = _parse(words)
    run = Run(Path(given["run"]).expanduser(), given.get("lr_scaling"), given.get("workers"))
    console = Console(highlight=False)
    plans = _plans(run, given, console)
    try:
        points = [_measure(run, step, plan, console) for step, plan in plans.items()]
    except KeyboardInterrupt:
        console.print("kfuse cbs: stopped; finished branches are kept, and the same command goes on from there")
        raise
    except BranchError as error:
        console.print(f"kfuse cbs: {error}", markup=False, soft_wrap=True)
        return 1
    c = calibration([found for _, found in points])
    checkpoints = [{"step": step, "lr": lr} | each.as_dict() for step, (lr, each) in zip(plans, points, strict=True)]
    result = {"run": str(run.path), "lr_scaling": run.lr_scaling, "c": c, "checkpoints": checkpoints}
    text = json.dumps(result, indent=1, allow_nan=False) + "\n"
    write_whole(run.path / "cbs" / "cbs.json", lambda to: to.write_text(text))
    if c is None:
        console.print("c is unknown: at no checkpoint are both B* and the noise scale known", soft_wrap=True)
    else:
        console.print(f"c = {c:.3g} (geometric mean): policy=gns policy.factor={c:.3g}", soft_wrap=True)
    return 0


def _parse(words: Sequence[str]) -> dict[str, Any]:
    """Reads the command's words. Raises ConfigError, which names the key."""
    hints, values = {**_OF_RUN, **_OF_PLAN}, dict[str, Any]()
    for word in words:
        name, _, text = word.partition("=")
        if name not in hints or name in values:
            allowed = ", ".join(f"{each}=" for each in hints)
            raise ConfigError(f"kfuse cbs {word}: must be one of {allowed}, each once{did_you_mean(name, hints)}")
        try:
            read: Any = OmegaConf.to_container(OmegaConf.create(f"{name}: {text}"))
        except Exception as error:  # of YAML
            raise ConfigError(f"{word}: {one_line(error)}") from error
        values[name] = text if name == "run" else read[name]  # a path may look like a number
        if not fits(values[name], hints[name]):
            raise ConfigError(f"{word}: must be {describe(hints[name])}")
    if not values.get("run"):
        raise ConfigError("run=: must be the directory of a run of `kfuse`")
    return values


def _plans(run: Run, given: dict[str, Any], console: Console) -> dict[int, Plan]:
    """Returns the plan of each checkpoint to measure at, by step. Raises ConfigError before anything is trained."""
    steps = sorted(set(given.get("steps") or run.checkpoints))
    if missing := [step for step in steps if step not in run.checkpoints]:
        raise ConfigError(f"steps={show(missing)}: no such checkpoint; there are {show([*run.checkpoints])}")
    found = {}
    for step in steps:
        start = Start(run, step)
        plan = Plan(start.batch_size, **{name: given[name] for name in _OF_PLAN.keys() & given.keys()})
        start.check(plan)
        if start.lr > 0:
            found[step] = plan
        else:
            console.print(f"step {step}: left out, the learning rate is 0 there")
    if not found:
        raise ConfigError(f"run={run.path}: the learning rate is 0 at all of its checkpoints")
    return found


def _measure(run: Run, step: int, plan: Plan, console: Console) -> tuple[float, CriticalBatch]:
    """Trains the branches from one checkpoint, and prints what they show. Returns that and the learning rate."""
    start = Start(run, step)
    with console.status("") as status:

        def branch(k: float, repetition: int) -> Trace:
            status.update(f"step {step}: batch {plan.batch(k)}, repetition {repetition + 1} of {plan.repetitions}")
            return start.train(plan, k, repetition)

        try:
            found = measure(branch, plan)
        except ValueError as error:
            raise BranchError(f"step {step}: {error}") from error
    print_point(step, start.lr, found, console)
    return start.lr, found


def print_point(step: int, lr: float, found: CriticalBatch, console: Console) -> None:
    """Prints a table of the branches of one checkpoint: how far each loss is above the reference's."""
    plan = found.plan
    console.print(
        f"step {step}: batch size {plan.batch_size}, learning rate {lr:.4g}, branches of "
        f"{plan.branch_samples} samples, {plan.repetitions} repetitions; tolerated: {100 * plan.tolerance:g} %",
        soft_wrap=True,
    )
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    for column in ("k", "batch", "loss", "excess %", "95 % interval"):
        table.add_column(column, justify="right", no_wrap=True)
    for k, losses, (mean, low, high) in zip(found.factors, found.losses, found.excess(), strict=True):
        cells = [f"{k:g}", str(plan.batch(k)), "diverged"]
        if all(map(math.isfinite, losses)):
            cells[2:] = [f"{sum(losses) / len(losses):.4g}"]
            if math.isfinite(mean):  # else the reference's loss is 0
                cells += [f"{100 * mean:+.2f}", f"{100 * low:+.2f} to {100 * high:+.2f}"]
        table.add_row(*cells)
    console.print(table)
    interval = f"({figure(found.low)} to {'unknown' if found.high is None else figure(found.high)})"
    text = f"  B* is above {figure(found.low)} samples {interval}: try larger factors"
    if found.critical is not None:
        text = f"  B* = {figure(found.critical)} samples {interval}"
    if found.noise_scale is not None:
        text += "; noise scale {} ({} to {})".format(*map(figure, found.noise_scale))
    if found.ratio is not None:
        text += f"; c = {found.ratio:.3g}"
    console.print(f"{text}\n", soft_wrap=True)
