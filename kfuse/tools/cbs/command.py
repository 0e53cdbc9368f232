"""`kfuse cbs run=RUN_DIR`: the critical batch size over a run, measured by branches from its checkpoints.

This process resumes each checkpoint as the run itself would, and measures there as `kf.critical_batch` does.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_type_hints

from omegaconf import OmegaConf
from rich.console import Console

from kfuse import session
from kfuse.checkpoint.format import CheckpointError, load, steps_in
from kfuse.observe import write_json
from kfuse.observe.recorder import figure, table
from kfuse.settings.declared import CommSettings
from kfuse.settings.instantiate import CLASS_GROUPS, describe, fits, one_line
from kfuse.settings.rules import RULES
from kfuse.settings.tree import AT_SHELL, ConfigError, completed, did_you_mean, flat, show
from kfuse.tools.cbs.estimate import Branch, CriticalBatch, Plan, Trace, calibration, measure
from kfuse.tools.cbs.in_script import branches
from kfuse.tools.run_files import config_path, read_config
from kfuse.train.build import build_trainer, set_threads
from kfuse.train.learning_rate import gain

USAGE = """\
kfuse cbs run=RUN_DIR [key=value ...]

Measures the critical batch size B*: from checkpoints of a run of kfuse, branches train on at k times the batch size
and f(k) times the learning rate. B* is the largest batch whose loss stays within a tolerance of the smallest one's.
B* over the noise scale is the calibration that policy=gns takes as policy.factor. Results: RUN_DIR/cbs/cbs.json.
Run it where the run was started. Stopped or killed, it goes on where it was. It trains with one worker; with several by
torchrun --nproc-per-node=N -m kfuse cbs run=RUN_DIR ...

  run=DIR                     the run's directory; it needs checkpoints: checkpoint.every_steps=N checkpoint.keep=M
  steps=null                  checkpoints to measure at, by step: [200,400]; null: all that are there
  factors=[1,2,4,8,16,32]     values of k, ascending; the first is the reference
  repetitions=5               of each branch, with other data orders (at least 2)
  samples=null                samples of each branch; null: 16 steps of the largest batch
  tolerance=0.01              how far a loss may be above the reference's, as a part of it
  window=0.25                 part of a branch, at its end, whose mean loss counts
  lr_scaling=null             f(k): sqrt, linear or none; null: linear for SGD, else sqrt
  curvature_every=null        steps of the reference between measurements of the curvature's noise scale; null: none

Exit status 0; 1 where a branch fails; 2 for wrong arguments; 130 after Ctrl-C."""


_OF_RUN: dict[str, Any] = {
    "run": str,
    "steps": list[int] | None,
    "lr_scaling": Literal["sqrt", "linear", "none"] | None,
    "curvature_every": int | None,
}
_OF_PLAN = {name: hint for name, hint in get_type_hints(Plan).items() if name not in ("batch_size", "branch_samples")}


def main(words: Sequence[str]) -> int:
    """Runs the command; returns the exit status. Raises ConfigError for wrong arguments, KeyboardInterrupt."""
    given = _parse(words)
    run = Run(Path(given["run"]).expanduser(), given.get("lr_scaling"), given.get("curvature_every"))
    plans = {step: run.plan(step, given) for step in run.steps(given.get("steps"))}
    leads = run.join_workers()
    console = Console(highlight=False, markup=False, soft_wrap=True, quiet=not leads)
    points = []
    try:
        for step, plan in plans.items():
            if (found := _measure(run, step, plan, console)) is None:
                console.print(f"step {step}: left out, the learning rate is 0 there")
            else:
                points.append((step, *found))
    except KeyboardInterrupt:
        console.print("kfuse cbs: stopped; finished branches are kept, and the same command goes on from there")
        raise
    except BranchError as error:
        console.print(f"kfuse cbs: {error}")
        return 1
    if not points:
        raise ConfigError(f"run={run.path}: the learning rate is 0 at all of its checkpoints")
    c = calibration([found for *_, found in points])
    checkpoints = [{"step": step, "lr": lr} | each.as_dict() for step, lr, each in points]
    result = {"run": str(run.path), "lr_scaling": run.lr_scaling, "c": c, "checkpoints": checkpoints}
    if leads:
        write_json(run.path / "cbs" / "cbs.json", result)
    if c is None:
        console.print("c is unknown: at no checkpoint are both B* and the noise scale known")
    else:
        console.print(f"c = {c:.3g} (geometric mean): policy=gns policy.factor={c:.3g}")
    return 0


def _parse(words: Sequence[str]) -> dict[str, Any]:
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


def _measure(run: Run, step: int, plan: Plan, console: Console) -> tuple[float, CriticalBatch] | None:
    """Trains the branches from one checkpoint, and prints what they show. Returns that and the learning rate.

    Returns None where that is 0.
    """
    start = Start(run, step, plan)
    if not start.lr > 0:
        return None
    with console.status("") as status, start.branches() as train:

        def branch(k: float, repetition: int) -> Trace:
            status.update(f"step {step}: batch {plan.batch(k)}, repetition {repetition + 1} of {plan.repetitions}")
            return train(k, repetition)

        try:
            found = measure(branch, plan)
        except ValueError as error:
            raise BranchError(f"step {step}: {error}") from error
        except (RuntimeError, OSError) as error:
            raise BranchError(f"step {step}: a branch has failed: {one_line(error)}") from error
    print_point(step, start.lr, found, console)
    return start.lr, found


def print_point(step: int, lr: float, found: CriticalBatch, console: Console) -> None:
    plan = found.plan
    console.print(
        f"step {step}: batch size {plan.batch_size}, learning rate {lr:.4g}, branches of "
        f"{plan.branch_samples} samples, {plan.repetitions} repetitions; tolerated: {100 * plan.tolerance:g} %"
    )
    shown = table("k", "batch", "loss", "excess %", "95 % interval", texts=0)
    for k, losses, (mean, low, high) in zip(found.factors, found.losses, found.excess(), strict=True):
        cells = [f"{k:g}", str(plan.batch(k)), "diverged"]
        if all(map(math.isfinite, losses)):
            cells[2:] = [f"{sum(losses) / len(losses):.4g}"]
            if math.isfinite(mean):  # else the reference's loss is 0
                cells += [f"{100 * mean:+.2f}", f"{100 * low:+.2f} to {100 * high:+.2f}"]
        shown.add_row(*cells)
    console.print(shown, soft_wrap=False)
    interval = f"({figure(found.low)} to {figure(found.high)})"
    text = f"  B* is above {figure(found.low)} samples {interval}: try larger factors"
    if found.critical is not None:
        text = f"  B* = {figure(found.critical)} samples {interval}"
    if found.noise_scale is not None:
        text += "; noise scale {} ({} to {})".format(*map(figure, found.noise_scale))
    if found.ratio is not None:
        text += f"; c = {found.ratio:.3g}"
    if found.curvature_noise_scale is not None:
        text += f"\n  noise scale of the curvature {figure(found.curvature_noise_scale)}"
    if found.curvature_ratio is not None:
        text += f"; B* over it {found.curvature_ratio:.3g}"
    console.print(f"{text}\n")


# -- branches ---------------------------------------------------------------------------------------------------------


class BranchError(RuntimeError):
    """A branch cannot be trained. The message is one line."""


class Run:
    """A run of the command line, and what its branches need of it."""

    def __init__(self, path: Path, lr_scaling: str | None, curvature_every: int | None) -> None:
        """lr_scaling: sqrt, linear or none; None: linear for SGD, else sqrt. curvature_every: of the reference's steps.

        Raises ConfigError for what is no run, has no checkpoint, or cannot have branches.
        """
        self.path = path
        if not config_path(path).is_file():
            raise ConfigError(f"run={path}: must be the directory of a run of `kfuse`")
        self.config = read_config(path, [*AT_SHELL, *(f"{group}._target_" for group in CLASS_GROUPS)])
        self.checkpoints = steps_in(path / "checkpoints")  # by step, ascending
        if not self.checkpoints:
            raise ConfigError(f"run={path}: has no checkpoint: checkpoint.every_steps=N, checkpoint.keep=N write them")
        if (sync := self.config["comm"]["sync"]) != "ssgd":
            raise ConfigError(f"run={path}: comm.sync={sync}: must be ssgd; else workers have batches of their own")
        self.curvature_every = curvature_every
        self.lr_scaling = lr_scaling or ("linear" if "SGD" in self.config["optimizer"]["_target_"] else "sqrt")

    def steps(self, asked: Sequence[int] | None) -> list[int]:
        """Returns the checkpoints to measure at, by step. Raises ConfigError for one that is not there."""
        steps = sorted(set(asked or self.checkpoints))
        if missing := [step for step in steps if step not in self.checkpoints]:
            raise ConfigError(f"steps={show(missing)}: no such checkpoint; there are {show([*self.checkpoints])}")
        return steps

    def plan(self, step: int, given: dict[str, Any]) -> Plan:
        """Returns what is measured at a checkpoint. Raises ConfigError where it cannot be used, and for batches that
        are not whole micro-batches, or larger than an epoch.
        """
        try:
            at = load(self.checkpoints[step])["progress"]
        except CheckpointError as error:
            raise ConfigError(f"run={self.path}: {error}") from error
        if (length := at["began_with"]["dataset size"]) is None:
            raise ConfigError(f"run={self.path}: must train on data of a length: a stream has one order only")
        plan = Plan(at["batch_size"], **{name: given[name] for name in _OF_PLAN.keys() & given.keys()})
        micro = self.config["batch"]["micro"]
        for k in plan.factors:
            if plan.batch(k) % micro:
                raise ConfigError(
                    f"run={self.path}: factors: {k:g} makes a batch of {plan.batch(k)} samples at step {step}: must be "
                    f"whole micro-batches of batch.micro={micro}, one at least"
                )
        plan.steps(plan.factors[-1], at["cursor"], length)
        return plan

    def join_workers(self) -> bool:
        """Begins the session with the run's settings of communication. Returns whether this worker is the first."""
        comm = self.config["comm"]
        if comm["schedule"] == "symmetric" and "WORLD_SIZE" not in os.environ:  # for several workers only
            comm["schedule"] = "auto"
        comm["audit_every"], comm["audit_on_corruption"] = None, "report"
        values = flat(self.config)
        joined = session.init(**{name: values[name] for name in CommSettings.__annotations__})
        set_threads(self.config)
        return joined.group.rank == 0


class Start:
    """A checkpoint of a run, in this process's memory, as the branches begin from it."""

    def __init__(self, run: Run, step: int, plan: Plan) -> None:
        """Raises BranchError where the run's model and optimizer do not take the checkpoint's state."""
        self._run, self._plan, path = run, plan, run.checkpoints[step]
        self._sha256 = json.loads((path / "manifest.json").read_text())["sha256"]
        config = copy.deepcopy(run.config)
        config["train"]["save_model"], config["policy"] = False, {"_target_": "kfuse.policies.NoPolicy"}
        config["checkpoint"] |= {"every_steps": None, "resume": str(path)}
        self._trainer = trainer = build_trainer({**config, "run_dir": str(run.path)})
        try:
            for _ in trainer.steps():
                break  # it has the checkpoint's state, and has trained nothing
        except (ValueError, RuntimeError, OSError) as error:
            raise BranchError(f"{path}: {one_line(error)}") from error
        self.lr = trainer.decisions.rate.scheduled()  # the run's learning rate at the checkpoint; 0 where a decay ends

    @contextlib.contextmanager
    def branches(self) -> Iterator[Branch]:
        """Context: its value returns the trace of a branch of the plan, and trains it, unless that was done before.

        Repetition 0 has the run's own data order.
        """
        run, plan, trainer, at = self._run, self._plan, self._trainer, self._trainer.progress
        values, opt = flat(run.config), trainer.opt
        # At k = 1 the rate is the checkpoint's.
        factor = self.lr / opt.base_lr / gain(run.lr_scaling, plan.batch_size, values["batch_size"])
        for group in opt.param_groups:
            group["lr"] *= factor
        values |= {"lr_scaling": run.lr_scaling, "lr_decay": "none", "lr_warmup_steps": 0, "epochs": None}
        values |= {"clip_norm": None, "train_target_accuracy": None}
        # A branch evaluates nothing: settings that need held-out data are off.
        values |= {AT_SHELL[rule.key].name: None for rule in RULES if "heldout" in rule.when and rule.key in AT_SHELL}

        def settings(k: float, repetition: int) -> Any:
            batch, seed = plan.batch(k), (run.config["seed"] + repetition) % 2**32
            bounds = {"batch_min": min(values["batch_min"], batch), "batch_max": max(values["batch_max"], batch)}
            last = at.step + plan.steps(k, at.cursor, trainer.samples_an_epoch)
            curvature_every = run.curvature_every if k == plan.factors[0] else None
            own = {"seed": seed, "steps": last, "statistics_curvature_every": curvature_every}
            return completed({**values, **bounds, **own})

        with branches(trainer.given.model, trainer.given.data, opt, plan, settings, position=at) as train:

            def branch(k: float, repetition: int) -> Trace:
                own = settings(k, repetition)
                lr = opt.base_lr * gain(run.lr_scaling, plan.batch(k), values["batch_size"])
                # What the result depends on, beside the run's configuration.
                asked = {"checkpoint": self._sha256, "batch_size": plan.batch(k), "seed": own["seed"], "lr": lr}
                asked |= {name: own[name] for name in ("steps", "statistics_curvature_every")}
                asked["workers"] = trainer.session.group.size
                done = run.path / "cbs" / f"step-{at.step:08d}" / f"batch-{plan.batch(k)}-seed-{own['seed']}.json"
                try:
                    found = json.loads(done.read_text())
                except (OSError, ValueError):
                    found = {}
                if found.get("branch") != asked:
                    found = {"branch": asked, "steps": train(k, repetition)}
                    if trainer.session.group.rank == 0:
                        write_json(done, found)
                return [tuple(row) for row in found["steps"]]

            yield branch
