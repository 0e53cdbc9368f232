"""One run of the command line: a supervisor for the workers, and a recorder for what they report."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from kfuse.cli import torchrun
from kfuse.elastic.job import Elasticity, JobFailed
from kfuse.elastic.launchers import Launcher, TorchrunLauncher
from kfuse.elastic.protocol import NOT_TRAINED, STOP_STATUS
from kfuse.elastic.supervisor import Supervisor
from kfuse.logs import set_up_logging
from kfuse.observe.display import Display
from kfuse.observe.recorder import Recorder
from kfuse.observe.run_dir import RunDirectory
from kfuse.settings import instantiate
from kfuse.settings.tree import flat


def run(cfg: DictConfig, run_dir: Path) -> int:
    """Trains and returns the exit status: 0, 1 after a failure, 130 after Ctrl-C, 143 after SIGTERM.

    cfg: the checked configuration. run_dir: an existing directory, which the run writes to.
    """
    config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    observe = config["observe"]
    launcher = instantiate.build(config["launcher"])
    job = {**config, "run_dir": str(run_dir.absolute())}
    recorder = Recorder(
        RunDirectory(run_dir, **{name: observe[name] for name in ("tensorboard", "ledger")}),
        Display(progress=observe["progress"] is not False),
    )
    if isinstance(launcher, TorchrunLauncher):
        set_up_logging(observe["log_level"], "worker 0")
        return torchrun.lead(launcher.rendezvous, job, recorder)
    set_up_logging(observe["log_level"], "supervisor", recorder.line)
    elasticity = Elasticity.of(flat(config), restart=config["checkpoint"]["every_steps"] is not None)
    return supervise(launcher, job, recorder, elasticity)


def supervise(launcher: Launcher, job: dict[str, Any], recorder: Recorder, elasticity: Elasticity) -> int:
    """Runs a job to its end and returns the exit status, as `run` does."""
    why, failure = "failed", ""
    try:
        why = asyncio.run(_supervise(Supervisor(launcher, job, recorder, elasticity))) or ""
    except JobFailed as error:
        failure = str(error)
        recorder.failed(failure)
    finally:
        recorder.close(why or None)
    if failure:
        print(f"kfuse: error: {failure}; the run directory is {recorder.directory.path}", file=sys.stderr)
        return 1
    if why == NOT_TRAINED:
        print("kfuse: the script has ended without using kf.fit or kf.DataLoader: nothing was trained", file=sys.stderr)
    return STOP_STATUS.get(why, 0)


async def _supervise(supervisor: Supervisor) -> str | None:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, supervisor.stop, "interrupted")
    loop.add_signal_handler(signal.SIGTERM, supervisor.stop, "terminated")
    return await supervisor.run()
