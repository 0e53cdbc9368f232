"""The end of a script with a monitor: torch's threads drop what they hold before Python ends.

A thread of torch that calls a callback, and one of gloo that has sent a tensor, drops it a little after the message has
arrived, and needs the interpreter for it. If Python ends in between, the process aborts: "terminate called without an
active exception".
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from functools import cache
from weakref import WeakSet

from torch import Tensor

_callbacks: WeakSet[Callable[..., Tensor]] = WeakSet()
"""Those of futures that torch's threads still hold."""


@cache
def wait_at_exit() -> None:
    """Makes Python wait at exit until the callbacks are dropped, and a moment more."""
    atexit.register(_wait)


def drop_before_exit(callback: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns `callback`, for a future; at exit Python waits until torch has dropped it."""
    wait_at_exit()
    _callbacks.add(callback)
    return callback


def _wait() -> None:
    end = time.monotonic() + 5.0
    while _callbacks and time.monotonic() < end:
        time.sleep(0.001)
    time.sleep(0.1)  # for the tensors of messages, which Python does not see being dropped
