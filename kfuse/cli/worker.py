"""A worker process of the command line: gets the configuration, builds, joins the others, trains, reports.

A supervisor starts workers by `main`. Under torchrun, where there is none, rank 0 has the configuration, and keeps the
run directory and the display (`lead`); any other rank gets the configuration from it (`follow`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from kfuse import session
from kfuse.cli.first import ENV_FIRST, become_worker
from kfuse.cli.output import to_its_end
from kfuse.comm.devices import DeviceError
from kfuse.comm.group import CommError
from kfuse.comm.settings import CommOptions
from kfuse.elastic.client import ControlClient
from kfuse.elastic.link import Link, Report, ignore
from kfuse.elastic.protocol import STOP_STATUS, ControlError
from kfuse.elastic.rendezvous import Rendezvous
from kfuse.logs import set_up_logging
from kfuse.optim import ConsistencyError
from kfuse.settings.tree import ConfigError, flat
from kfuse.train.build import build_trainer, set_threads

if TYPE_CHECKING:  # it imports rich
    from kfuse.observe.recorder import Recorder

_FAILURES = (CommError, ConsistencyError, DeviceError)


def main() -> int:
    """Returns the exit status; 0: trained, or left as planned. The supervisor shows other errors' traceback."""
    if ENV_FIRST in os.environ:
        become_worker()
    client = ControlClient()
    config = client.job
    set_threads(config)
    session.connect_to_supervisor(client, CommOptions.of(flat(config)), config["comm"]["timeout_s"])
    trainer = build_trainer(config, client.report)
    try:
        trainer.run()
    except (ControlError, ConsistencyError, ConfigError) as error:
        print(f"kfuse: worker {client.worker} ends: {error}", file=sys.stderr)
        return 1
    finally:
        client.close()
    return 0


def lead(rendezvous: Rendezvous, job: dict[str, Any], recorder: Recorder) -> int:
    """Rank 0: sends the configuration to the others, trains, and writes the run directory. Returns the exit status."""
    lock = threading.Lock()  # checkpoints are reported by the thread that writes them

    def report(kind: str, data: dict[str, Any]) -> None:
        with lock:
            recorder.keep([(kind, data)])

    rendezvous.announce(job)
    with contextlib.ExitStack() as until_recorded:
        return to_its_end(recorder, lambda: _train(rendezvous, job, until_recorded, report), _FAILURES)


def follow(rendezvous: Rendezvous) -> int:
    """Any other rank: receives the configuration from rank 0 and trains; shows nothing. Returns the exit status."""
    try:
        job = rendezvous.await_job()
        if isinstance(job, int):
            return job
        set_up_logging(job["observe"]["log_level"], f"worker {rendezvous.rank}")
        with contextlib.ExitStack() as until_over:
            return STOP_STATUS.get(_train(rendezvous, job, until_over, ignore) or "", 0)
    except _FAILURES as error:
        print(f"kfuse: rank {rendezvous.rank} ends: {error}", file=sys.stderr)
        return 1


def _train(rendezvous: Rendezvous, job: dict[str, Any], to_the_end: contextlib.ExitStack, report: Report) -> str | None:
    """Returns why training ended. Raises CommError if a worker is lost.

    to_the_end: how long signals are requests to stop. torchrun sends one as soon as it has seen that a worker is lost.
    """
    set_threads(job)
    joined = session.join_fixed_group(rendezvous, CommOptions.of(flat(job)), job["comm"]["timeout_s"])
    to_the_end.enter_context(_stopped_by_signals(joined.link))
    summary = build_trainer(job, report).run()
    return None if summary is None else summary["exit_reason"]


@contextlib.contextmanager
def _stopped_by_signals(link: Link) -> Iterator[None]:
    """Context: Ctrl-C and SIGTERM ask training to stop, which it does at a step boundary."""

    def stop(number: int, frame: FrameType | None) -> None:
        link.stop = "interrupted" if number == signal.SIGINT else "terminated"

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    try:
        status = main()
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: while a message to a lost worker is under way, the process group's destructor would block.
    os._exit(status)
