"""One run of the command line: a supervisor for the workers. It imports torch where it needs a store for several."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from kfuse.cli.first import FirstWorker
from kfuse.cli.output import to_its_end
from kfuse.elastic.job import Job, JobFailed
from kfuse.elastic.launchers import TorchrunLauncher
from kfuse.elastic.supervisor import Supervisor
from kfuse.logs import set_up_logging
from kfuse.observe.recorder import Display, Recorder
from kfuse.observe.run_dir import RunDirectory
from kfuse.settings import instantiate
from kfuse.settings.tree import flat


def run(cfg: DictConfig, run_dir: Path, first: FirstWorker) -> int:
    """Trains and returns the exit status: 0, 1 after a failure, 130 after Ctrl-C, 143 after SIGTERM.

    cfg: the checked configuration. run_dir: an existing directory, which the run writes to. first: used as the
    launcher where it has checked the configuration.
    """
    config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    observe = config["observe"]
    early = first.process is not None
    launcher = first if early else instantiate.build(config["launcher"])
    job = {**config, "run_dir": str(run_dir.absolute())}
    directory = RunDirectory(run_dir, observe["sinks"], observe["ledger"], settings=config)
    display = Display(progress=observe["progress"] is not False)
    recorder = Recorder(directory, display, begins=lambda: OmegaConf.save(cfg, run_dir / ".hydra" / "config.yaml"))
    if isinstance(launcher, TorchrunLauncher):
        from kfuse.cli.worker import lead  # imports torch

        set_up_logging(observe["log_level"], "worker 0")
        return lead(launcher.rendezvous, job, recorder)
    set_up_logging(observe["log_level"], "supervisor", recorder.line)
    settings: Any = flat(config)
    restart = settings["checkpoint_every_steps"] is not None
    supervisor = Supervisor(launcher, job, recorder, Job(settings, restart))
    return supervise(supervisor, recorder, first.run if early else asyncio.run)


def supervise(
    supervisor: Supervisor,
    recorder: Recorder,
    run_loop: Callable[[Coroutine[Any, Any, str | None]], str | None] = asyncio.run,
) -> int:
    """Runs a job to its end and returns the exit status, as `run` does. run_loop: as asyncio.run."""

    async def work() -> str | None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, supervisor.stop, "interrupted")
        for name in {"SIGTERM", *supervisor.job.settings["elastic_notice_signals"]}:
            loop.add_signal_handler(signal.Signals[name], supervisor.stop, "terminated")
        if interrupted:
            supervisor.stop("interrupted")
        return await supervisor.run()

    # Ctrl-C before the first line of `work` must not be an exception: the task would begin as the loop is being closed.
    interrupted: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: interrupted.append(number))
    return to_its_end(recorder, lambda: run_loop(work()), JobFailed)
