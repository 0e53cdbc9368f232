"""What a run directory holds of an earlier run, and the lock that keeps the processes of two runs apart.

The supervisor (or the process that trains alone) takes the directory; its workers share it until they end. So a command
that is started again, after its supervisor was killed, waits until no worker of the first one can write there any more.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

from kfuse.elastic.protocol import LOOP_LEFT, NOT_TRAINED, STOP_STATUS
from kfuse.settings.tree import ConfigError, spell

RECORDS = ("metrics.jsonl", "events.jsonl", "ledger.jsonl", "summary.json")

_LOCK = ".lock"
_WAIT_S = 60.0  # workers end within 40 s of the loss of their supervisor; one that is stopped (SIGSTOP) does not
_SAY_S = 1.0
_POLL_S = 0.05
# Exit reasons of runs that can go on. Nobody knows why a loop was left: its end, an error, Ctrl-C.
_NOT_ENDED = (*STOP_STATUS, "failed", NOT_TRAINED, LOOP_LEFT, None)


class Earlier(NamedTuple):
    """A run that a directory holds."""

    trainings: int  # of its script, of which steps are recorded
    ended: str | None  # the exit reason of a run that has come to its end; None: it can go on


def earlier(run_dir: Path) -> Earlier | None:
    """The run whose records the directory holds; None if there are none."""
    if not any((run_dir / name).exists() for name in RECORDS):
        return None
    further = (run_dir / str(number) for number in itertools.count(2))  # a script's further trainings
    places = [run_dir, *itertools.takewhile(lambda place: (place / "metrics.jsonl").exists(), further)]
    trainings = sum(_size(place / "metrics.jsonl") > 0 for place in places)
    try:
        reason = json.loads((places[-1] / "summary.json").read_bytes())["exit_reason"]
    except (OSError, ValueError, KeyError, TypeError):
        reason = None
    return Earlier(trainings, None if reason in _NOT_ENDED else reason)


def choose_resume(run_dir: Path, checkpoints: Path | None, asked: str | None, where: str, shell: bool = False) -> str:
    """Where a training begins whose directory was given: "never" (at its first step), "auto" or a checkpoint's path.

    checkpoints: the folder that is resumed from, if there is one. asked: one of these, by the user; None: nothing.
    where: how messages name the directory. shell: how they spell settings. Raises ConfigError where another run's
    records would be replaced, or those of one that has ended, unless "auto" is to train that longer; and where nothing
    is asked and there is no checkpoint to go on from, or a checkpoint of an unknown run.
    """
    run, auto, kept = earlier(run_dir), f"{spell('checkpoint.resume', shell)}=auto", has_checkpoint(checkpoints)
    if asked is not None and asked != "auto":
        path = Path(asked).expanduser().resolve()
        own = asked != "never" and any(path.is_relative_to(it.resolve()) for it in (run_dir, checkpoints) if it)
        if run is not None and not own:
            raise ConfigError(f"{where}: holds a run already: must be a new one, or {auto} goes on with it")
        return asked
    if run is not None and run.ended and not (kept and asked):
        longer = f"; to train longer: {auto}" if kept else " and left no checkpoint"
        raise ConfigError(f"{where}: must be a new one: the run in it has ended ({run.ended}){longer}")
    if asked is not None:
        return asked
    if run is not None and run.trainings and not kept:
        anew = "" if checkpoints is None else f"; to begin anew in it, in place of its records: {auto}"
        raise ConfigError(f"{where}: must be a new one: the run in it has left no checkpoint to go on from{anew}")
    if run is None and kept:
        raise ConfigError(f"{where}: holds no run, but {checkpoints} has checkpoints: to go on from them: {auto}")
    return "never" if run is None or checkpoints is None else "auto"


def has_checkpoint(folder: Path | None) -> bool:
    """Returns whether the folder of checkpoints has one, good or not."""
    return folder is not None and next(folder.glob("step-*/manifest.json"), None) is not None


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


@contextlib.contextmanager
def taken(run_dir: Path, where: str, say: Callable[[str], object] = _tell, wait_s: float = _WAIT_S) -> Iterator[None]:
    """Context of a run: no other one is in this directory, and none comes. Its workers may `share` it.

    Waits for the processes of a run before, and says so. Raises ConfigError where these have not ended after `wait_s`;
    OSError if the directory cannot be written.
    """
    import fcntl

    with (run_dir / _LOCK).open("a") as file:
        started, said = time.monotonic(), False
        while not (_lock(file, fcntl.LOCK_EX) and _lock(file, fcntl.LOCK_SH)):  # another may come in between
            waited = time.monotonic() - started
            if waited > wait_s:
                why = f"processes of another run in it have not ended within {wait_s:.0f} s"
                raise ConfigError(f"{where}: must be one that no run uses: {why}")
            if waited > _SAY_S and not said:
                said = True
                say(f"kfuse: {where}: waiting until the processes of the run in it have ended")
            time.sleep(_POLL_S)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # also of forked children that still have the file


def share(run_dir: Path) -> TextIO | None:
    """A worker's part in its run's directory, until the file is closed; None where it cannot be seen from here.

    Raises ConfigError if another run has taken it: this worker's supervisor is gone.
    """
    import fcntl

    try:
        file = (run_dir / _LOCK).open("a")
    except OSError:  # on another host
        return None
    if not _lock(file, fcntl.LOCK_SH):
        file.close()
        raise ConfigError(f"{run_dir}: another run uses it: must be this worker's own")
    return file


def _lock(file: TextIO, kind: int) -> bool:
    """Returns whether the file is locked so. A file system without locks keeps nobody out."""
    import fcntl

    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
