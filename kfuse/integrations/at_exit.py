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
_LIMIT_S = 5.0
"""For the callbacks, which Python sees being dropped."""
_PAUSE_S = 0.1
"""For the tensors of messages, which it does not see."""


@cache
def wait_at_exit() -> None:
    """At exit Python waits until the callbacks are dropped, and a moment more. Asked for once."""
    atexit.register(_wait)


def drop_before_exit(callback: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns `callback`, which is given to a future; at exit Python waits until torch has dropped it."""
    wait_at_exit()
    _callbacks.add(callback)
    return callback


def _wait() -> None:
    end = time.monotonic() + _LIMIT_S
    while _callbacks and time.monotonic() < end:
        time.sleep(0.001)
    time.sleep(_PAUSE_S)
