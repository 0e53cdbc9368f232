"""One run of the command line: a supervisor for the workers, or under torchrun this worker among the others."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from omegaconf import DictConfig, OmegaConf

from kfuse import session
from kfuse.comm.devices import DeviceError
from kfuse.comm.group import CommError
from kfuse.comm.settings import CommOptions
from kfuse.elastic.job import Elasticity, JobFailed
from kfuse.elastic.launchers import Launcher, TorchrunLauncher
from kfuse.elastic.protocol import NOT_TRAINED, STOP_STATUS
from kfuse.elastic.rendezvous import Rendezvous
from kfuse.elastic.supervisor import Supervisor
from kfuse.logs import set_up_logging
from kfuse.membership import Record
from kfuse.observe.recorder import Display, Recorder
from kfuse.observe.run_dir import RunDirectory
from kfuse.optim import ConsistencyError
from kfuse.settings import instantiate
from kfuse.settings.tree import flat
from kfuse.train.build import build_trainer, set_threads

_FAILURES = (JobFailed, CommError, ConsistencyError, DeviceError)


def run(cfg: DictConfig, run_dir: Path) -> int:
    """Trains and returns the exit status: 0, 1 after a failure, 130 after Ctrl-C, 143 after SIGTERM.

    cfg: the checked configuration. run_dir: an existing directory, which the run writes to.
    """
    config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    observe = config["observe"]
    launcher = instantiate.build(config["launcher"])
    job = {**config, "run_dir": str(run_dir.absolute())}
    directory = RunDirectory(run_dir, tensorboard=observe["tensorboard"], ledger=observe["ledger"])
    recorder = Recorder(directory, Display(progress=observe["progress"] is not False))
    if isinstance(launcher, TorchrunLauncher):
        set_up_logging(observe["log_level"], "worker 0")
        return _lead(launcher.rendezvous, job, recorder)
    set_up_logging(observe["log_level"], "supervisor", recorder.line)
    elasticity = Elasticity.of(flat(config), restart=config["checkpoint"]["every_steps"] is not None)
    return supervise(launcher, job, recorder, elasticity)


def supervise(launcher: Launcher, job: dict[str, Any], recorder: Recorder, elasticity: Elasticity) -> int:
    """Runs a job to its end and returns the exit status, as `run` does."""
    supervisor = Supervisor(launcher, job, recorder, elasticity)

    async def work() -> str | None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, supervisor.stop, "interrupted")
        loop.add_signal_handler(signal.SIGTERM, supervisor.stop, "terminated")
        return await supervisor.run()

    return _to_its_end(recorder, lambda: asyncio.run(work()))


def _to_its_end(recorder: Recorder, work: Callable[[], str | None]) -> int:
    """Does the work, which returns why training ended, and records its end. Returns the exit status."""
    why: str | None = "failed"
    failure = ""
    try:
        why = work()
    except _FAILURES as error:
        failure = str(error)
        recorder.failed(failure)
    finally:
        recorder.close(why)
    if failure:
        print(f"kfuse: error: {failure}; the run directory is {recorder.directory.path}", file=sys.stderr)
        return 1
    if why == NOT_TRAINED:
        print("kfuse: the script has ended without using kf.fit or kf.DataLoader: nothing was trained", file=sys.stderr)
    return STOP_STATUS.get(why or "", 0)


# -- under torchrun there is no supervisor: rank 0 keeps the run directory and the display -----------------------------


def _lead(rendezvous: Rendezvous, job: dict[str, Any], recorder: Recorder) -> int:
    """Rank 0: sends the configuration to the others, trains, and writes the run directory. Returns the exit status."""
    lock = threading.Lock()  # checkpoints are reported by the thread that writes them

    def record(kind: str, data: dict[str, Any]) -> None:
        with lock:
            recorder.keep([(kind, data)])

    rendezvous.announce(job)
    return _to_its_end(recorder, lambda: _train(rendezvous, job, record))


def follow(rendezvous: Rendezvous) -> int:
    """Any other rank: receives the configuration from rank 0 and trains; shows nothing. Returns the exit status."""
    try:
        job = rendezvous.await_job()
        if isinstance(job, int):
            return job
        set_up_logging(job["observe"]["log_level"], f"worker {rendezvous.rank}")
        return STOP_STATUS.get(_train(rendezvous, job) or "", 0)
    except _FAILURES as error:
        print(f"kfuse: rank {rendezvous.rank} ends: {error}", file=sys.stderr)
        return 1


def _train(rendezvous: Rendezvous, job: dict[str, Any], record: Record | None = None) -> str | None:
    """Returns why training ended. Raises CommError if a worker is lost."""
    set_threads(job)
    session.join_fixed_group(rendezvous, CommOptions.of(flat(job)), job["comm"]["timeout_s"], record)
    with _stop_signals() as reasons:
        trainer = build_trainer(job)
        trainer.decisions.stop_requests = reasons
        summary = trainer.run()
    return None if summary is None else summary["exit_reason"]


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[str]]:
    """Context: Ctrl-C and SIGTERM append a stop reason to the list; training then ends at a step boundary."""
    reasons: list[str] = []

    def stop(number: int, frame: FrameType | None) -> None:
        reasons.append("interrupted" if number == signal.SIGINT else "terminated")

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield reasons
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
