"""How workers are started. A launcher starts one process at a time; the supervisor decides when."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Protocol

from kfuse.elastic.launchers.hosts import HostsLauncher as HostsLauncher
from kfuse.elastic.launchers.local import LocalLauncher as LocalLauncher
from kfuse.elastic.launchers.ray import RayLauncher as RayLauncher
from kfuse.elastic.launchers.torchrun import TorchrunLauncher as TorchrunLauncher


class WorkerProcess(Protocol):
    """A worker process, as the supervisor sees it.

    It may have attributes. `cause`: how it ended, as a text for events ("was lost with its host 10.0.0.2"). `noticed`:
    whether its machine is about to be taken away. `cut_off`: set before it is killed because others do not reach its
    host.
    """

    running: bool  # False while it waits for a free slot or node, which may take any time

    def lines(self) -> AsyncIterator[str]:
        """What it prints to stdout and stderr, line by line, until it ends."""

    async def wait(self) -> int:
        """Its exit status once it has ended; negative for a signal's number."""

    def kill(self) -> None:
        """Ends it at once, with everything it started. Nothing happens if it has ended."""


class Launcher(Protocol):
    """Starts worker processes; all methods are called by the supervisor.

    A launcher whose workers all run on one machine may have an attribute `gpus`, how many GPUs they see (0: none). Then
    the supervisor gives each worker one of its own, by LOCAL_RANK. Any other launcher sets LOCAL_RANK itself, to the
    number of the worker's GPU among those that the worker sees. One that loses whole hosts may have an attribute
    `event`: the supervisor sets it to a function that records an event, called with its kind and its fields.
    """

    async def open(self) -> str:
        """Called once, before the rest: the address of this machine at which workers reach it. Raises OSError."""

    async def start(self, env: Mapping[str, str]) -> WorkerProcess:
        """Starts one worker: `[sys.executable, "-m", "kfuse.cli.worker"]`. Raises OSError.

        env: environment variables that it gets beside those of this process.
        """

    async def close(self) -> None:
        """Called once, when all workers have ended."""
