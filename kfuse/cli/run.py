"""One run of the command line: a supervisor for the workers, and the run directory and display they report to."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from kfuse.cli import torchrun
from kfuse.config import instantiate
from kfuse.elastic.launchers import Launcher, TorchrunLauncher
from kfuse.elastic.protocol import STOP_STATUS
from kfuse.elastic.supervisor import LOOP_LEFT, NOT_TRAINED, Elasticity, JobFailed, Supervisor
from kfuse.observe.display import Display
from kfuse.observe.logs import set_up_logging
from kfuse.observe.run_dir import RunDirectory


class Reports:
    """Keeps what workers report, and shows it.

    A script's second training has a directory of its own in the first one's: RUN_DIR/2, and so on.
    """

    def __init__(self, directory: RunDirectory, display: Display) -> None:
        self.directory, self._display = directory, display
        directory.warn = display.line
        self._first = directory
        self._training: int | None = None
        self._trainings = 0
        self._begin()

    def _begin(self) -> None:
        self.summary: dict[str, Any] | None = None
        self._started = time.time()
        self._last: dict[str, Any] = {}

    def record(self, kind: str, data: dict[str, Any]) -> None:
        match kind:
            case "start":
                self._start(data)
            case "metrics":
                if self.directory.metrics(data):  # else it is known: a new leader reports the newest steps again
                    self._last = data
                    self._display.metrics(data)
            case "event":
                self.directory.event(data)
                self._display.event(data)
            case "ledger":
                self.directory.ledger(data)
            case "summary":
                self.summary = data

    def _start(self, data: dict[str, Any]) -> None:
        if data["training"] != self._training:
            self._training = data["training"]
            self._trainings += 1
            if self._trainings > 1:
                self._finish(LOOP_LEFT)
                self.directory = self._first.another(str(self._trainings))
                self._begin()
        self.directory.rewind(data["step"])
        self._display.start(data["samples"], data["steps"], f"kfuse  {self.directory.path}")

    def line(self, text: str) -> None:
        self._display.line(text)

    def failed(self, why: str) -> None:
        """The job has failed. The event is not shown: who ends the job says it."""
        self.directory.event({"step": self._last.get("step"), "kind": "failure", "why": why})

    def close(self, why: str | None) -> None:
        """Writes the summary; where the workers could not give one, from the last step that was reported."""
        self._finish(why)

    def _finish(self, why: str | None) -> None:
        summary = self.summary or {
            "steps": self._last["step"] + 1 if self._last else 0,
            "epochs": self._last.get("epoch", 0),
            "samples": self._last.get("samples", 0),
            "wall_s": time.time() - self._started,
            **{name: self._last.get(name) for name in ("loss", "batch_size", "lr", "workers")},
            "eval_loss": None,
            "eval_accuracy": None,
            "params_sha256": None,
            "exit_reason": why,
        }
        try:
            self.directory.summary(summary)
        except OSError as error:
            self.line(f"kfuse: warning: {self.directory.path / 'summary.json'}: cannot be written: {error.strerror}")
        self.directory.close()
        if self.summary is None and why in ("failed", NOT_TRAINED):
            self._display.stop()
        else:
            self._display.finish(summary)


def run(cfg: DictConfig, run_dir: Path) -> int:
    """Trains as `cfg` says and returns the exit status: 0, 1 after a failure, 130 after Ctrl-C, 143 after SIGTERM."""
    config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    observe = config["observe"]
    launcher = instantiate.build(config["launcher"])
    job = {**config, "run_dir": str(run_dir.absolute())}
    reports = Reports(
        RunDirectory(run_dir, tensorboard=observe["tensorboard"], ledger=observe["ledger"]),
        Display(progress=observe["progress"]),
    )
    if isinstance(launcher, TorchrunLauncher):
        set_up_logging(observe["log_level"], "worker 0")
        return torchrun.lead(launcher.meeting, job, reports)
    set_up_logging(observe["log_level"], "supervisor", reports.line)
    elasticity = Elasticity(
        **{key: config["workers"][key] for key in ("count", "min", "max")},
        **config["elastic"],
        restart=config["checkpoint"]["every_steps"] is not None,
    )
    return supervise(launcher, job, reports, elasticity)


def supervise(launcher: Launcher, job: dict[str, Any], reports: Reports, elasticity: Elasticity) -> int:
    """Runs a job to its end and returns the exit status, as `run` does."""
    why, failure = "failed", ""
    try:
        why = asyncio.run(_supervise(Supervisor(launcher, job, reports, elasticity))) or ""
    except JobFailed as error:
        failure = str(error)
        reports.failed(failure)
    finally:
        reports.close(why or None)
    if failure:
        print(f"kfuse: error: {failure}; the run directory is {reports.directory.path}", file=sys.stderr)
        return 1
    if why == NOT_TRAINED:
        print("kfuse: the script has ended without using kf.fit or kf.DataLoader: nothing was trained", file=sys.stderr)
    return STOP_STATUS.get(why, 0)


async def _supervise(supervisor: Supervisor) -> str | None:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, supervisor.stop, "interrupted")
    loop.add_signal_handler(signal.SIGTERM, supervisor.stop, "terminated")
    return await supervisor.run()
