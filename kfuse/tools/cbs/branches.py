"""Branches of a run: jobs that go on from one of its checkpoints with another batch size and learning rate.

A branch has the run's own configuration and the checkpoint's state, and files in a directory of its own. Only what a
policy's decision would change is changed: the batch size, and the factor on the learning rate.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console

from kfuse.checkpoint.format import Checkpointer, CheckpointError, load, steps_in
from kfuse.cli.run import supervise
from kfuse.elastic.job import Elasticity
from kfuse.elastic.protocol import STOP_STATUS
from kfuse.observe import write_whole
from kfuse.observe.display import Display
from kfuse.observe.recorder import Recorder
from kfuse.observe.run_dir import RunDirectory
from kfuse.settings import instantiate
from kfuse.settings.instantiate import CLASS_GROUPS
from kfuse.settings.tree import AT_SHELL, ConfigError, flat
from kfuse.tools.cbs.estimate import Plan, Trace
from kfuse.tools.run_files import config_path, read_config, read_metrics
from kfuse.train.context import Settings
from kfuse.train.learning_rate import gain
from kfuse.train.state import with_settings


class BranchError(RuntimeError):
    """A branch has failed. The message is one line."""


class Run:
    """A run of the command line, and what its branches need of it."""

    config: dict[str, Any]
    """The run's configuration, in plain values."""
    checkpoints: dict[int, Path]
    """The run's checkpoints by step, ascending."""
    workers: int
    """Worker processes of a branch."""
    lr_scaling: str
    """f: how the learning rate follows the batch size in the branches."""

    def __init__(self, path: Path, lr_scaling: str | None = None, workers: int | None = None) -> None:
        """lr_scaling: sqrt, linear or none; None: linear for SGD, else sqrt. workers: of a branch; None: the run's.

        Raises ConfigError for what is no run, has no checkpoint, or cannot have branches.
        """
        self.path = path
        if not config_path(path).is_file():
            raise ConfigError(f"run={path}: must be the directory of a run of `kfuse`; it has no .hydra/config.yaml")
        self.config = read_config(path, [*AT_SHELL, *(f"{group}._target_" for group in CLASS_GROUPS)])
        self.checkpoints = steps_in(path / "checkpoints")
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
        config["observe"] |= {"progress": False, "tensorboard": False, "ledger": False}
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
        """The run's batch size there, in samples."""
        self._cursor: int = at["cursor"]
        self._length: int | None = at["began_with"]["dataset size"]
        if self._length is None:
            raise ConfigError(f"run={run.path}: must train on data of a length: a stream has one order only")
        lr = config["lr"]
        try:
            schedule = Settings.of(flat(config)).schedule(self._length)
        except ValueError as error:  # of values that do not fit together
            raise ConfigError(f"{config_path(run.path)}: lr: {error}") from error
        done = schedule.done(at["schedule"] if lr["scaling"] == "adascale" else self.step, at["samples"])
        means = at["mean_grad_sq"], at["mean_grad_variance"]
        factor = schedule.shape(at["schedule"], done) * schedule.gain(self.batch_size, *means) * at["lr_scale"]
        self.lr: float = lr["base"] * factor
        """The run's learning rate at the checkpoint; 0 at the end of a decay."""
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
            first = self._state["progress"]["samples"]
            try:
                rows = read_metrics(folder)
            except ConfigError as error:
                raise BranchError(str(error)) from error
            figures = [[row["samples"] - first, row["loss"], row["grad_variance"], row["grad_sq"]] for row in rows]
            found = {"branch": branch, "steps": figures}
            text = json.dumps(found, allow_nan=False) + "\n"
            write_whole(done, lambda to: to.write_text(text))  # a killed measurement leaves no part of a branch
        return [(samples, loss, s, g) for samples, loss, s, g in found["steps"]]

    def _run_job(self, folder: Path, batch_size: int, seed: int, steps: int) -> None:
        start = folder / "start"
        failed: list[Mapping[str, Any]] = []
        writer = Checkpointer(start, 1, lambda event: failed.append(event) if event["kind"] != "checkpoint" else None)
        writer.save(self.step, with_settings(self._state, batch_size, self._lr_scale, seed))
        writer.wait()
        if failed:
            raise BranchError(f"{start}: {failed[0]['why']}")
        config = self._run.branch_config(batch_size, seed, start, self.step + steps)
        config_path(folder).parent.mkdir()
        OmegaConf.save(OmegaConf.create(config), config_path(folder))
        with (folder / "output.log").open("w") as log:
            display = Display(progress=False, console=Console(file=log, width=120))
            recorder = Recorder(RunDirectory(folder, tensorboard=False), display)
            launcher = instantiate.build(config["launcher"])
            elasticity = Elasticity.of(flat(config), restart=False)
            status = supervise(launcher, {**config, "run_dir": str(folder.absolute())}, recorder, elasticity)
        if status in STOP_STATUS.values():
            raise KeyboardInterrupt
        if status:
            raise BranchError(f"a branch with batches of {batch_size} has failed: {folder / 'output.log'}")
