"""The command's output, which may be closed or full: a run goes on, and prints no traceback; and the end of a run."""

from __future__ import annotations

import errno
import io
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kfuse.elastic.processes import IMPORT_THREAD
from kfuse.elastic.protocol import NOT_TRAINED, STOP_STATUS

if TYPE_CHECKING:  # it imports rich
    from kfuse.observe.recorder import Recorder


class _Output(io.FileIO):
    """A file descriptor of this process. After a write has failed it is /dev/null."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            if error.errno != errno.EPIPE:
                print(f"kfuse: output cannot be written: {error.strerror}", file=sys.stderr)
            return len(data)


def survive_closed_output() -> None:
    """From now on what is written to a closed pipe is dropped; of a full disk one line says so on standard error."""
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__"):  # else a test captures it
            stream.flush()
            output = io.BufferedWriter(_Output(stream.fileno(), "w", closefd=False))
            lines = stream.line_buffering or stream.write_through
            setattr(sys, name, io.TextIOWrapper(output, stream.encoding, stream.errors, line_buffering=lines))


def leave(status: int) -> int:
    """Returns the exit status, with which the command is to end now.

    Where torch is still being imported, as in a job that is stopped early, ends the process itself: the interpreter's
    end in the middle of that would be an abort.
    """
    if any(thread.name == IMPORT_THREAD for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def to_its_end(
    recorder: Recorder, work: Callable[[], str | None], failures: type[Exception] | tuple[type[Exception], ...]
) -> int:
    """Does the work, which returns why training ended, and records its end. Returns the exit status.

    failures: which errors of the work are told in one line.
    """
    why: str | None = "failed"
    failure = ""
    try:
        why = work()
    except failures as error:
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
