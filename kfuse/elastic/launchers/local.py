"""Workers as processes of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping

_PR_SET_PDEATHSIG = 1


class LocalProcess:
    running = True

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def lines(self) -> AsyncIterator[str]:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            yield line.decode(errors="replace").rstrip("\n")

    async def wait(self) -> int:
        return await self._process.wait()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


class LocalLauncher:
    """Starts `command` once per worker, each in a process group of its own.

    So Ctrl-C reaches only the supervisor, which ends the job in order.
    """

    def __init__(
        self, command: list[str] | None = None, *, folder: str | None = None, dies_with_us: bool = False
    ) -> None:
        """folder: where it runs; None: here. dies_with_us: the kernel kills it when this process ends.

        Workers of a supervisor do not: when it is lost they write a checkpoint.
        """
        self._command = command or [sys.executable, "-m", "kfuse.worker"]
        self._folder, self._dies_with_us = folder, dies_with_us

    async def open(self) -> str:
        return "127.0.0.1"

    async def start(self, env: Mapping[str, str]) -> LocalProcess:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            # gloo and the store log every lost peer at length: here that is an event, and handled.
            env={"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ, **env},
            cwd=self._folder,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_dying_with_parent() if self._dies_with_us else None,
            limit=2**20,
        )
        return LocalProcess(process)

    async def close(self) -> None:
        pass


def _dying_with_parent() -> Callable[[], None]:
    """For a process just forked: it gets SIGKILL when the thread that forked it ends."""
    prctl = ctypes.CDLL(None).prctl  # looked up before the fork
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
