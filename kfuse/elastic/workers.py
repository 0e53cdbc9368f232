"""What the supervisor knows of one worker."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from kfuse.elastic.launchers import WorkerProcess

_KEPT_LINES = 60


class State(Enum):
    BOOTING = "booting"
    READY = "ready"  # built its model; waits to be taken in
    PROPOSED = "proposed"  # in a view that it has not joined yet
    MEMBER = "member"
    ENDED = "ended"


@dataclass(eq=False)
class Worker:
    number: int
    process: WorkerProcess
    state: State = State.BOOTING
    writer: asyncio.StreamWriter | None = None
    pid: int = 0
    host: str = ""
    started_at: float = field(default_factory=time.monotonic)
    alive_at: float = field(default_factory=time.monotonic)
    """When it last said anything."""
    why: str = ""
    """Why we killed it, if we did."""
    leaving: bool = False
    """Another is to take its place."""
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))
    """The last that it printed."""


def how_it_ended(status: int) -> str:
    """An exit status in words."""
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with exit status {status}"
