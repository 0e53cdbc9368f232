"""Workers as processes of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kfuse.elastic.launchers.base import WorkerProcess

_PR_SET_PDEATHSIG = 1
_LAST_OUTPUT_S = 1.0
_LONGEST_LINE = 2**20  # bytes


class LocalProcess(asyncio.SubprocessProtocol):
    """A worker process of this machine.

    asyncio's own `Process.wait` returns when the output pipe is closed too, which what the worker has started may hold
    open. asyncio reports the process's end by itself.
    """

    running = True

    def __init__(self, slot: int) -> None:
        """slot: its number among those that run on this machine."""
        self.slot = slot
        self._output = asyncio.StreamReader(limit=_LONGEST_LINE)
        self._exited = asyncio.Event()

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        return self._exited.is_set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: the process has started."""
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._process = transport
        pipe = transport.get_pipe_transport(1)
        assert pipe is not None
        self._output.set_transport(pipe)  # so that reading pauses while nobody takes the lines

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """asyncio: it has printed something."""
        self._output.feed_data(data)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """asyncio: nobody can print any more."""
        self._output.feed_eof()

    def process_exited(self) -> None:
        """asyncio: it has ended. What it started ends with it: once, since the number may be another's some day."""
        self._kill_group()
        self._exited.set()

    async def lines(self) -> AsyncIterator[str]:
        """What it prints, line by line, until it ends."""
        try:
            while True:
                try:
                    line = await self._output.readline()
                except ValueError:  # so long without an end that it is no line (a progress bar's): dropped
                    continue
                if not line:
                    return
                yield line.decode(errors="replace").rstrip("\n")
        finally:
            if self.ended:  # nobody reads any more, though a child may hold the other end of the pipe
                self._process.close()

    async def wait(self) -> int:
        """Its exit status once it has ended; negative for a signal's number."""
        await self._exited.wait()
        status = self._process.get_returncode()
        assert status is not None
        return status

    def kill(self) -> None:
        """Ends it at once, with everything it started. Nothing happens if it has ended."""
        if not self.ended:
            self._kill_group()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.get_pid(), signal.SIGKILL)


async def follow(process: WorkerProcess, pass_on: Callable[[str], Awaitable[None]]) -> int:
    """Passes on what a worker prints, and returns its exit status once it has ended and its output has been read."""

    async def read() -> None:
        async for line in process.lines():
            await pass_on(line)

    reading = asyncio.create_task(read())
    try:
        status = await process.wait()
        await asyncio.wait([reading], timeout=_LAST_OUTPUT_S)
    finally:
        reading.cancel()
    return status


class LocalLauncher:
    """Starts `command` once per worker, each in a process group of its own.

    So Ctrl-C reaches only the supervisor, which ends the job in order.
    """

    def __init__(
        self,
        command: list[str] | None = None,
        *,
        folder: str | None = None,
        at_our_end: signal.Signals | None = None,
        share: int | None = None,
    ) -> None:
        """folder: where it runs; None: here. at_our_end: the signal that the kernel (Linux) sends it when this process
        ends.

        share: how many workers share this machine's cores: each gets its part as OMP_NUM_THREADS, unless that is set.
        None: workers set their number of threads themselves.
        """
        self._command = command or [sys.executable, "-m", "kfuse.cli.worker"]
        self._folder, self._at_our_end, self._share = folder, at_our_end, share
        self._processes: list[LocalProcess] = []

    async def open(self) -> str:
        """The address at which workers of this machine reach it."""
        return "127.0.0.1"

    async def start(self, env: Mapping[str, str]) -> LocalProcess:
        """Starts one worker with these environment variables. Raises OSError."""
        return await self.spawn(self._command, env, self._folder, self._share)

    async def spawn(
        self, command: list[str], env: Mapping[str, str], folder: str | None, share: int | None = None
    ) -> LocalProcess:
        """Starts this command, which finds its slot, the lowest that is free, as LOCAL_RANK. Raises OSError."""
        self._processes = [process for process in self._processes if not process.ended]
        taken = {process.slot for process in self._processes}
        slot = next(number for number in count() if number not in taken)
        process = LocalProcess(slot)
        await asyncio.get_running_loop().subprocess_exec(
            lambda: process,
            *command,
            # gloo and the store log every lost peer at length: here that is an event, and handled.
            env={
                "TORCH_CPP_LOG_LEVEL": "ERROR",
                **({} if share is None else {"OMP_NUM_THREADS": str(threads_each(share))}),
                **os.environ,
                "LOCAL_RANK": str(slot),
                **env,
            },
            cwd=folder,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_signalled_at_our_end(self._at_our_end),
        )
        self._processes.append(process)
        return process

    async def close(self) -> None:
        """Nothing is left to be done."""


def threads_each(workers: int) -> int:
    """CPU threads for each of so many workers that share the cores which this process may use."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, cores // workers)


def _signalled_at_our_end(number: signal.Signals | None) -> Callable[[], None] | None:
    """For a process just forked: it gets this signal when the thread that forked it ends."""
    if number is None or sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up before the fork
    return lambda: prctl(_PR_SET_PDEATHSIG, number)
