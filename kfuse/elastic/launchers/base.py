"""What the supervisor asks of a launcher."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Protocol


class WorkerProcess(Protocol):
    """A worker that is started."""

    running: bool
    """False while there is no place for it: that may take any time."""

    def lines(self) -> AsyncIterator[str]:
        """What it prints, line by line, until it ends."""

    async def wait(self) -> int:
        """Its exit status once it has ended; negative for a signal's number."""

    def kill(self) -> None:
        """Ends it at once, with everything it started. Nothing happens if it has ended."""


class Launcher(Protocol):
    """Starts workers."""

    async def open(self) -> str:
        """Called once, before the rest: the address of this machine at which workers reach it. Raises OSError."""

    async def start(self, env: Mapping[str, str]) -> WorkerProcess:
        """Starts one worker with these environment variables. Raises OSError."""

    async def close(self) -> None:
        """Called once, when all workers have ended."""
