"""While a command of kfuse imports its modules: Ctrl-C ends it quietly, and no garbage is collected.

Importing torch takes a second or more, in which nothing has begun that would have to be undone. Ctrl-C ends it with
status 130 and without a traceback. The objects that torch makes stay: to look for garbage among them takes a tenth of
that time.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from types import FrameType

STATUS = 130
_MODULES = ("kfuse", "kfuse.cli.kfuse_run", "kfuse.cli.worker")
_PROGRAMS = ("kfuse", "kfuse-run")


def begin_command() -> None:
    """In kfuse's commands: Ctrl-C ends the process at once (unless it ignores SIGINT), and no garbage is collected."""
    if not _is_command():
        return
    gc.disable()
    main = threading.current_thread() is threading.main_thread()
    if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def resume_collection() -> None:
    """Collects garbage again, in a command. What was made meanwhile is kept for ever: it is not looked at again."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def raise_again() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt, as usual."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(number: int, frame: FrameType | None) -> None:
    os._exit(STATUS)


def _is_command() -> bool:
    if not sys.argv or sys.argv[0] != "-m":  # "-m" while Python looks for the module that it is to run
        return bool(sys.argv) and os.path.basename(sys.argv[0]) in _PROGRAMS
    return any(pair[0] == "-m" and pair[1] in _MODULES for pair in zip(sys.orig_argv, sys.orig_argv[1:], strict=False))
