"""Workers as processes of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping


class LocalProcess:
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

    def __init__(self, command: list[str] | None = None) -> None:
        self._command = command or [sys.executable, "-m", "kfuse.worker"]

    async def open(self) -> str:
        return "127.0.0.1"

    async def start(self, env: Mapping[str, str]) -> LocalProcess:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            # gloo and the store log every lost peer at length: here that is an event, and handled.
            env={"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ, **env},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            limit=2**20,
        )
        return LocalProcess(process)

    async def close(self) -> None:
        pass
