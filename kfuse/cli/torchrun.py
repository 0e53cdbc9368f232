"""The command line under torchrun: no supervisor, and rank 0 keeps the run directory and the display."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from kfuse import session
from kfuse.cli.output import to_its_end
from kfuse.comm.devices import DeviceError
from kfuse.comm.group import CommError
from kfuse.comm.settings import CommOptions
from kfuse.elastic.protocol import STOP_STATUS
from kfuse.elastic.rendezvous import Rendezvous
from kfuse.logs import set_up_logging
from kfuse.membership import Record
from kfuse.observe.recorder import Recorder
from kfuse.optim import ConsistencyError
from kfuse.settings.tree import flat
from kfuse.train.build import build_trainer, set_threads

_FAILURES = (CommError, ConsistencyError, DeviceError)


def lead(rendezvous: Rendezvous, job: dict[str, Any], recorder: Recorder) -> int:
    """Rank 0: sends the configuration to the others, trains, and writes the run directory. Returns the exit status."""
    lock = threading.Lock()  # checkpoints are reported by the thread that writes them

    def record(kind: str, data: dict[str, Any]) -> None:
        with lock:
            recorder.keep([(kind, data)])

    rendezvous.announce(job)
    with contextlib.ExitStack() as until_recorded:
        return to_its_end(recorder, lambda: _train(rendezvous, job, until_recorded, record), _FAILURES)


def follow(rendezvous: Rendezvous) -> int:
    """Any other rank: receives the configuration from rank 0 and trains; shows nothing. Returns the exit status."""
    try:
        job = rendezvous.await_job()
        if isinstance(job, int):
            return job
        set_up_logging(job["observe"]["log_level"], f"worker {rendezvous.rank}")
        with contextlib.ExitStack() as until_over:
            return STOP_STATUS.get(_train(rendezvous, job, until_over) or "", 0)
    except _FAILURES as error:
        print(f"kfuse: rank {rendezvous.rank} ends: {error}", file=sys.stderr)
        return 1


def _train(
    rendezvous: Rendezvous, job: dict[str, Any], to_the_end: contextlib.ExitStack, record: Record | None = None
) -> str | None:
    """Returns why training ended. Raises CommError if a worker is lost.

    to_the_end: how long signals are requests to stop. torchrun sends one as soon as it has seen that a worker is lost.
    """
    set_threads(job)
    session.join_fixed_group(rendezvous, CommOptions.of(flat(job)), job["comm"]["timeout_s"], record)
    reasons = to_the_end.enter_context(_stop_signals())
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
