"""`kfuse cbs run=RUN_DIR`: the critical batch size over a run, measured by branches from its checkpoints.

A branch is a job with the run's own configuration and the checkpoint's state, and files in a directory of its own. Only
what a policy's decision would change is changed: the batch size, and the factor on the learning rate.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_type_hints

from omegaconf import OmegaConf
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from kfuse.checkpoint.format import Checkpointer, CheckpointError, load, steps_in
from kfuse.cli.run import supervise
from kfuse.elastic.protocol import STOP_STATUS
from kfuse.observe import write_whole
from kfuse.observe.recorder import Display, Recorder, figure
from kfuse.observe.run_dir import RunDirectory
from kfuse.settings import instantiate
from kfuse.settings.instantiate import CLASS_GROUPS, describe, fits, one_line
from kfuse.settings.tree import AT_SHELL, ConfigError, completed, did_you_mean, flat, show
from kfuse.tools.cbs.estimate import CriticalBatch, Plan, Trace, calibration, measure
from kfuse.tools.run_files import config_path, read_config, read_metrics
from kfuse.train.learning_rate import LRSchedule, gain

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
    console = Console(highlight=False, markup=False, soft_wrap=True)
    plans = _plans(run, given, console)
    try:
        points = [_measure(run, step, plan, console) for step, plan in plans.items()]
    except KeyboardInterrupt:
        console.print("kfuse cbs: stopped; finished branches are kept, and the same command goes on from there")
        raise
    except BranchError as error:
        console.print(f"kfuse cbs: {error}")
        return 1
    c = calibration([found for _, found in points])
    checkpoints = [{"step": step, "lr": lr} | each.as_dict() for step, (lr, each) in zip(plans, points, strict=True)]
    result = {"run": str(run.path), "lr_scaling": run.lr_scaling, "c": c, "checkpoints": checkpoints}
    text = json.dumps(result, indent=1, allow_nan=False) + "\n"
    write_whole(run.path / "cbs" / "cbs.json", lambda to: to.write_text(text))
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
    plan = found.plan
    console.print(
        f"step {step}: batch size {plan.batch_size}, learning rate {lr:.4g}, branches of "
        f"{plan.branch_samples} samples, {plan.repetitions} repetitions; tolerated: {100 * plan.tolerance:g} %"
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
    console.print(table, soft_wrap=False)
    interval = f"({figure(found.low)} to {'unknown' if found.high is None else figure(found.high)})"
    text = f"  B* is above {figure(found.low)} samples {interval}: try larger factors"
    if found.critical is not None:
        text = f"  B* = {figure(found.critical)} samples {interval}"
    if found.noise_scale is not None:
        text += "; noise scale {} ({} to {})".format(*map(figure, found.noise_scale))
    if found.ratio is not None:
        text += f"; c = {found.ratio:.3g}"
    console.print(f"{text}\n")


# -- branches ---------------------------------------------------------------------------------------------------------


class BranchError(RuntimeError):
    """A branch has failed. The message is one line."""


class Run:
    """A run of the command line, and what its branches need of it."""

    def __init__(self, path: Path, lr_scaling: str | None, workers: int | None) -> None:
        """lr_scaling: sqrt, linear or none; None: linear for SGD, else sqrt. workers: of a branch; None: the run's.

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
        self.lr_scaling = lr_scaling or ("linear" if "SGD" in self.config["optimizer"]["_target_"] else "sqrt")
        self.workers = workers or self.config["workers"]["count"]

    def branch_config(self, batch_size: int, seed: int, start: Path, last_step: int) -> dict[str, Any]:
        """Returns the configuration of a branch that ends after `last_step` steps, those of the run included.

        batch.size stays the run's first one, which learning rates refer to: the branch's is in the checkpoint `start`.
        """
        config = copy.deepcopy(self.config)
        batch = config["batch"]
        batch["min"], batch["max"] = min(batch["min"], batch_size), max(batch["max"], batch_size)
        config["seed"] = seed
        config["policy"] = {"_target_": "kfuse.policies.NoPolicy"}
        config["lr"] |= {"scaling": self.lr_scaling, "decay": "none", "warmup_steps": 0}
        config["workers"] |= {"count": self.workers, "min": self.workers, "max": self.workers}
        config["train"] |= {"epochs": None, "steps": last_step, "target_accuracy": None, "eval_every": last_step}
        config["train"]["save_model"] = False
        config["checkpoint"] |= {"every_steps": None, "resume": str(start)}
        config["observe"] |= {"progress": False, "sinks": [], "ledger": False}
        if "Torchrun" in config["launcher"]["_target_"]:
            config["launcher"] = {"_target_": "kfuse.elastic.launchers.LocalLauncher"}
            if config["comm"]["schedule"] == "symmetric":  # under torchrun only
                config["comm"]["schedule"] = "auto"
        return config


class Start:
    """A checkpoint of a run, as the branches begin from it. Raises ConfigError where it cannot be used."""

    def __init__(self, run: Run, step: int) -> None:
        self._run, path = run, run.checkpoints[step]
        try:
            self._state = load(path)
        except CheckpointError as error:
            raise ConfigError(f"run={run.path}: {error}") from error
        self._sha256 = json.loads((path / "manifest.json").read_text())["sha256"]
        at, config = self._state["progress"], run.config
        self.step: int = at["step"]
        self.batch_size: int = at["batch_size"]
        self._cursor: int = at["cursor"]
        self._length: int | None = at["began_with"]["dataset size"]
        if self._length is None:
            raise ConfigError(f"run={run.path}: must train on data of a length: a stream has one order only")
        lr = config["lr"]
        settings: Any = completed(flat(config))
        schedule = LRSchedule.of(settings, self._length)
        done = schedule.done(at["schedule"] if lr["scaling"] == "adascale" else self.step, at["samples"])
        means = at["mean_grad_sq"], at["mean_grad_variance"]
        factor = schedule.shape(at["schedule"], done) * schedule.gain(self.batch_size, *means) * at["lr_scale"]
        self.lr: float = lr["base"] * factor  # the run's learning rate at the checkpoint; 0 at the end of a decay
        # The branches' own schedule multiplies by gain(f, batch size): at k = 1 the rate is the checkpoint's.
        self._lr_scale = factor / gain(run.lr_scaling, self.batch_size, config["batch"]["size"])

    def check(self, plan: Plan) -> None:
        """Raises ConfigError for batches that are not whole micro-batches, or larger than an epoch."""
        micro = self._run.config["batch"]["micro"]
        for k in plan.factors:
            if plan.batch(k) % micro:
                raise ConfigError(
                    f"run={self._run.path}: factors: {k:g} makes a batch of {plan.batch(k)} samples at step "
                    f"{self.step}: must be whole micro-batches of batch.micro={micro}, one at least"
                )
        plan.steps(plan.factors[-1], self._cursor, self._length)

    def train(self, plan: Plan, k: float, repetition: int) -> Trace:
        """Trains branch k of the plan, unless that was done before. Repetition 0 has the run's own data order.

        Raises BranchError where it fails, KeyboardInterrupt where it is stopped.
        """
        run, batch, seed = self._run, plan.batch(k), (self._run.config["seed"] + repetition) % 2**32
        steps = plan.steps(k, self._cursor, self._length)
        # What the result depends on, beside the run's configuration.
        branch = {"checkpoint": self._sha256, "batch_size": batch, "seed": seed, "steps": steps}
        branch |= {"lr_scaling": run.lr_scaling, "workers": run.workers}
        folder = run.path / "cbs" / f"step-{self.step:08d}" / f"batch-{batch}-seed-{seed}"
        done = folder / "branch.json"
        try:
            found = json.loads(done.read_text())
        except (OSError, ValueError):
            found = {}
        if found.get("branch") != branch:
            if folder.exists():  # of a measurement that was killed, or with other settings
                shutil.rmtree(folder)
            folder.mkdir(parents=True)
            try:
                self._run_job(folder, batch, seed, steps)
            finally:  # as large as the run's checkpoint; a stopped or failed branch begins anew
                shutil.rmtree(folder / "start", ignore_errors=True)
            first, rows = self._state["progress"]["samples"], read_metrics(folder)
            figures = [[row["samples"] - first, row["loss"], row["grad_variance"], row["grad_sq"]] for row in rows]
            found = {"branch": branch, "steps": figures}
            text = json.dumps(found, allow_nan=False) + "\n"
            write_whole(done, lambda to: to.write_text(text))  # a killed measurement leaves no part of a branch
        return [(samples, loss, s, g) for samples, loss, s, g in found["steps"]]

    def _run_job(self, folder: Path, batch_size: int, seed: int, steps: int) -> None:
        start = folder / "start"
        failed: list[Mapping[str, Any]] = []
        writer = Checkpointer(start, 1, lambda event: failed.append(event) if event["kind"] != "checkpoint" else None)
        writer.save(self.step, _with_settings(self._state, batch_size, self._lr_scale, seed))
        writer.wait()
        if failed:
            raise BranchError(f"{start}: {failed[0]['why']}")
        config = self._run.branch_config(batch_size, seed, start, self.step + steps)
        config_path(folder).parent.mkdir()
        OmegaConf.save(OmegaConf.create(config), config_path(folder))
        with (folder / "output.log").open("w") as log:
            display = Display(progress=False, console=Console(file=log, width=120))
            recorder = Recorder(RunDirectory(folder, sinks=()), display)
            launcher = instantiate.build(config["launcher"])
            settings: Any = flat(config)
            status = supervise(launcher, {**config, "run_dir": str(folder.absolute())}, recorder, settings)
        if status in STOP_STATUS.values():
            raise KeyboardInterrupt
        if status:
            raise BranchError(f"a branch with batches of {batch_size} has failed: {folder / 'output.log'}")


def _with_settings(state: Mapping[str, Any], batch_size: int, lr_scale: float, seed: int) -> dict[str, Any]:
    """Returns a state, of a training without a scheduler, with other settings for the next step on; both share tensors.

    Left out are the policy's state, and what the training had decided or was about to report.
    """
    silent: dict[str, Any] = {"in_flight": [], "unread": []}
    at, optimizer = state["progress"], state["optimizer"]
    settings = {"batch_size": batch_size, "lr_scale": lr_scale, "began_with": at["began_with"] | {"seed": seed}}
    return {
        **state,
        "progress": {**at, **settings, "contexts": {}, "best": None},
        "optimizer": {**optimizer, "kfuse": {**optimizer["kfuse"], **silent}},
        "statistics": {**state["statistics"], **silent},
        "decisions": {**state["decisions"], "workers_requested": 0, "requested": {}, "under_way": {}},
        "policy": {},
        "records": {"recent": "[]", "told_before": {}},
    }
