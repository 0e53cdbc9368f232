"""The command's output, which may be closed or full: a run goes on, and prints no traceback; and the command's end."""

from __future__ import annotations

import errno
import io
import os
import sys
import threading
from typing import Any

from kfuse.elastic.processes import IMPORT_THREAD


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
