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


def exit_quietly() -> None:
    """From now on Ctrl-C ends the process at once, if it is one of kfuse's commands and does not ignore SIGINT."""
    ours = _is_command() and threading.current_thread() is threading.main_thread()
    if ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def pause_collection() -> None:
    """From now on nothing is garbage-collected, if this is one of kfuse's commands."""
    if _is_command():
        gc.disable()


def resume_collection() -> None:
    """Ends `pause_collection`. What was made meanwhile is kept for ever: it is not looked at again."""
    if _is_command():
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
