"""The lock that keeps the processes of two runs out of one directory.

The supervisor (or the process that trains alone) takes the directory; its workers share it until they end. So a command
that is started again, after its supervisor was killed, waits until no worker of the first one can write there any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from kfuse.settings.tree import ConfigError

_LOCK = ".lock"
_WAIT_S = 60.0  # workers end within 40 s of the loss of their supervisor; one that is stopped (SIGSTOP) does not
_SAY_S = 1.0
_POLL_S = 0.05


@contextlib.contextmanager
def taken(run_dir: Path, where: str, wait_s: float = _WAIT_S) -> Iterator[None]:
    """Context of a run: no other one is in this directory, and none comes. Its workers may `share` it.

    Waits for the processes of a run before, and says so. Raises ConfigError where these have not ended after `wait_s`;
    OSError if the directory cannot be written.
    """
    with (run_dir / _LOCK).open("a") as file:
        started, said = time.monotonic(), False
        while not (_lock(file, fcntl.LOCK_EX) and _lock(file, fcntl.LOCK_SH)):  # another may come in between
            waited = time.monotonic() - started
            if waited > wait_s:
                why = f"processes of another run in it have not ended within {wait_s:.0f} s"
                raise ConfigError(f"{where}: must be one that no run uses: {why}")
            if waited > _SAY_S and not said:
                said = True
                print(f"kfuse: {where}: waiting until the processes of the run in it have ended", file=sys.stderr)
            time.sleep(_POLL_S)
        try:
            yield
        finally:
            _lock(file, fcntl.LOCK_UN)  # also of forked children that still have the file


def share(run_dir: Path) -> TextIO | None:
    """A worker's part in its run's directory, until the file is closed; None where it cannot be seen from here.

    Raises ConfigError if another run has taken it: this worker's supervisor is gone.
    """
    try:
        file = (run_dir / _LOCK).open("a")
    except OSError:  # on another host
        return None
    if not _lock(file, fcntl.LOCK_SH):
        time.sleep(_POLL_S)  # `in_use` may have asked at this moment
        if not _lock(file, fcntl.LOCK_SH):
            file.close()
            raise ConfigError(f"{run_dir}: another run uses it: must be this worker's own")
    return file


def in_use(run_dir: Path) -> bool:
    """Returns whether a process of a run is in this directory. True where that cannot be seen from here."""
    try:
        with (run_dir / _LOCK).open() as file:
            if not _lock(file, fcntl.LOCK_EX):
                return True
            _lock(file, fcntl.LOCK_UN)
            return False
    except FileNotFoundError:
        return False


def _lock(file: TextIO, kind: int) -> bool:
    """Returns whether the file is locked so. A file system without locks keeps nobody out."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
