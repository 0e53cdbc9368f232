"""Tells whether an exception comes from the user, by a signal (Ctrl-C), or was raised by the code that is running.

The traceback tells: the handler of a signal is a frame of it. Python's own handler of Ctrl-C is written in C and leaves
no frame, so `CtrlC` puts one in its place that does the same.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any


def _interrupt(number: int, frame: FrameType | None) -> None:
    """As Python's own handler of SIGINT."""
    raise KeyboardInterrupt


class CtrlC:
    """Context: a KeyboardInterrupt by Ctrl-C can be told apart. Other handlers than Python's own stay as they are.

    Around a whole training, since setting a handler takes longer than calling a policy.
    """

    def __enter__(self) -> None:
        self._replaced = _is_main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._replaced:
            signal.signal(signal.SIGINT, _interrupt)

    def __exit__(self, *_: object) -> None:
        # Not where the code has set a handler of its own meanwhile.
        if self._replaced and _is_main_thread() and signal.getsignal(signal.SIGINT) is _interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def exits_are_errors() -> Iterator[None]:
    """Context: a SystemExit becomes a RuntimeError, unless a signal's handler raises it. For the model and the data of
    a job that has no script: there it would end a worker as if all was well. So does any other exception that is no
    Exception, but for KeyboardInterrupt, and for GeneratorExit, which ends a training's iterator.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        if by_signal(error):
            raise
        raise RuntimeError(f"training has raised {type(error).__name__}: {error}") from error


def _is_main_thread() -> bool:
    """No other thread may set handlers, or gets signals."""
    return threading.current_thread() is threading.main_thread()


def by_signal(error: BaseException) -> bool:
    """Whether the handler of a signal has raised `error`, or what `error` was raised in place of."""
    handlers = {_interrupt.__code__, *map(_code, map(signal.getsignal, signal.valid_signals()))}
    return any(code in handlers for each in _chain(error) for code in _codes(each))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The exception, and those during whose handling it was raised."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__context__


def _codes(error: BaseException) -> Iterator[CodeType]:
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback.tb_frame.f_code
        traceback = traceback.tb_next


def _code(handler: Any) -> CodeType | None:
    """Of a function or a method; None for anything else that a signal may have."""
    return getattr(getattr(handler, "__func__", handler), "__code__", None)
