"""What the supervisor knows of one worker."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from kfuse.elastic.launchers import WorkerProcess

_KEPT_LINES = 200
_TRACEBACK = "Traceback (most recent call last):"


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
    pid: int | None = None
    """None until it has connected."""
    host: str = ""
    started_at: float = field(default_factory=time.monotonic)
    alive_at: float = field(default_factory=time.monotonic)
    """When it last said anything."""
    why: str = ""
    """Why we killed it, if we did."""
    joined: bool = False
    """It was in a view that came about, this one or one before."""
    leaving: bool = False
    """Another is to take its place."""
    ended_loop: int = 0
    """The newest training whose loop has ended on this worker, whether or not the training is over."""
    failed_at: int | None = None
    """The step at which an exception ended its training loop."""
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))
    """The last that it printed."""
    killed: asyncio.Event = field(default_factory=asyncio.Event)

    def kill(self) -> None:
        self.killed.set()
        self.process.kill()

    async def end(self, grace_s: float) -> int | None:
        """Its exit status once it has ended. None if it was killed, and so long after there is still no word of it."""
        ended, killed = asyncio.ensure_future(self.process.wait()), asyncio.ensure_future(self.killed.wait())
        try:
            await asyncio.wait([ended, killed], return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                await asyncio.wait([ended], timeout=grace_s)
            return ended.result() if ended.done() else None
        finally:
            ended.cancel()
            killed.cancel()

    def error(self) -> tuple[str, ...]:
        """Of the last traceback that it printed: where it was raised, and the exception. Empty if there is none."""
        lines = list(self.lines)
        starts = [index for index, line in enumerate(lines) if line.strip() == _TRACEBACK]
        if not starts:
            return ()
        frames = lines[starts[-1] + 1 :]
        exception = next((line for line in frames if line and not line.startswith(" ")), None)
        if exception is None:
            return ()
        places = [line.strip() for line in frames[: frames.index(exception)] if line.startswith("  File ")]
        return (*places[-1:], exception.strip())

    def disconnect(self) -> None:
        if self.writer is not None:
            self.writer.transport.abort()


def how_it_ended(status: int | None, why: str) -> str:
    """An exit status in words. why: for which we killed it, if we did; then None says that there was no word of it."""
    if why:
        return f"{why} and {'cannot be reached' if status is None else 'was killed'}"
    if status is not None and status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with exit status {status}"
