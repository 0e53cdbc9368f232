"""Workers as processes of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from itertools import count
from pathlib import Path
from typing import BinaryIO

from kfuse.cores import cores
from kfuse.elastic.protocol import ENV_LOG, HEARTBEAT_S

_PR_SET_PDEATHSIG = 1
_LONGEST_LINE = 2**20  # bytes
_STOPPED_LOOKS = 4  # in a row: as a suspended job goes on, a single one may find a worker that is still stopped
_DRIVERS = ("nvidia*", "nvhost*", "kfd", "dxg")  # files in /dev of CUDA, of Jetson boards, of ROCm, of WSL


class LocalProcess(asyncio.subprocess.SubprocessStreamProtocol):
    """A worker process of this machine.

    asyncio's own `Process.wait` returns only when the output pipe is closed, which a child may hold open.
    """

    running = True
    cause = ""  # why it was killed here

    def __init__(self, slot: int, log: BinaryIO | None = None) -> None:
        """slot: its number among those that run on this machine. log: what it prints is written there too."""
        super().__init__(_LONGEST_LINE, asyncio.get_running_loop())
        self.slot, self.log = slot, log
        self._exited = asyncio.Event()

    @property
    def ended(self) -> bool:
        return self._exited.is_set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._process = transport
        self._watching = asyncio.create_task(kill_once_stopped(self, transport.get_pid()))
        super().connection_made(transport)

    def process_exited(self) -> None:
        """Kills its process group, once: the number may later be another group's."""
        self.kill()
        self._watching.cancel()
        self._exited.set()
        super().process_exited()

    async def lines(self) -> AsyncIterator[str]:
        assert self.stdout is not None
        try:
            while True:
                try:
                    line = await self.stdout.readline()
                except ValueError:  # longer than `_LONGEST_LINE` without an end (a progress bar, for example): dropped
                    continue
                if not line:
                    return
                if self.log is not None:
                    try:
                        await asyncio.to_thread(self.log.write, line)  # a file system that hangs delays no heartbeat
                    except OSError as error:
                        yield f"kfuse: warning: {self.log.name}: can no longer be written: {error.strerror}"
                        self.log.close()
                        self.log = None
                yield line.decode(errors="replace").rstrip("\n")
        finally:
            if self.log is not None:
                self.log.close()
            if self.ended:  # no more is read, though a child may still hold the pipe open
                self._process.close()

    async def wait(self) -> int:
        await self._exited.wait()
        status = self._process.get_returncode()
        assert status is not None
        return status

    def kill(self) -> None:
        if not self.ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.get_pid(), signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Sends it to the process alone, unless that has ended."""
        if not self.ended:
            self._process.send_signal(number)

    async def end(self) -> None:
        """Kills it; returns when nothing of it is left in the event loop."""
        self.kill()
        await self.wait()
        self._process.close()


class LocalLauncher:
    """Starts `command` once per worker, each in a process group of its own: Ctrl-C reaches the supervisor alone."""

    def __init__(
        self,
        command: list[str] | None = None,
        *,
        parent_end_signal: signal.Signals | None = None,
        share: int | None = None,
        folder: str | None = None,
    ) -> None:
        """parent_end_signal: the signal that the kernel sends a worker when this process ends; None: none.

        share: how many workers share this machine's cores: each gets its part as OMP_NUM_THREADS, unless that is set.
        folder: working directory; None: this process's.
        """
        self._command = command or [sys.executable, "-m", "kfuse.cli.worker"]
        self._parent_end_signal, self._share, self._folder = parent_end_signal, share, folder
        self._processes: list[LocalProcess] = []

    @property
    def gpus(self) -> int:
        """How many GPUs its workers see, as this process does."""
        return gpus()

    async def open(self) -> str:
        return "127.0.0.1"

    async def start(self, env: Mapping[str, str], inherited: Collection[int] = ()) -> LocalProcess:
        """Starts one worker, with `env` and the lowest free slot as LOCAL_RANK in its environment. Raises OSError.

        inherited: file descriptors that it has too.
        """
        self._processes = [process for process in self._processes if not process.ended]
        taken = {process.slot for process in self._processes}
        slot = next(number for number in count() if number not in taken)
        process = LocalProcess(slot, open_log(env))
        await asyncio.get_running_loop().subprocess_exec(
            lambda: process,
            *self._command,
            # gloo and the store log many lines for each lost peer, which kfuse reports as an event.
            env={
                "TORCH_CPP_LOG_LEVEL": "ERROR",
                "PYTHONUNBUFFERED": "1",  # what it prints is seen as it comes
                **({} if self._share is None else {"OMP_NUM_THREADS": str(max(1, cores() // self._share))}),
                **os.environ,
                "LOCAL_RANK": str(slot),
                **env,
            },
            cwd=self._folder,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            pass_fds=inherited,
            preexec_fn=signal_at_parent_end(self._parent_end_signal),
        )
        self._processes.append(process)
        return process

    async def close(self) -> None:
        """Does nothing: the processes have ended."""


async def kill_once_stopped(process: LocalProcess, pid: int) -> None:
    """Kills a worker that stays stopped by a signal for about 2 s: the others wait for it."""
    looks, time = 0, asyncio.get_running_loop().time
    while looks < _STOPPED_LOOKS:
        since = time()
        await asyncio.sleep(HEARTBEAT_S)
        was_here = time() - since < 2 * HEARTBEAT_S  # else this process was stopped too
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:  # else it has ended
            looks = looks + 1 if was_here and file.read().rpartition(b")")[2].startswith(b" T") else 0
    process.cause = "was stopped by a signal and was killed"
    process.kill()


def how(status: int) -> str:
    """Text about the end of a process with this exit status."""
    if status >= 0:
        return f"ended with exit status {status}"
    known = {each.value: each.name for each in signal.Signals}
    return f"was ended by {known.get(-status, f'signal {-status}')}"


def gpus() -> int:
    """How many GPUs this process sees. Where there is no driver torch is not asked: its import takes seconds."""
    if not any(any(Path("/dev").glob(name)) for name in _DRIVERS):
        return 0
    from kfuse.comm import devices  # here, as Ray copies this module to where kfuse is not imported

    return devices.count()


def open_log(env: Mapping[str, str]) -> BinaryIO | None:
    """Opens the file to which a worker with this environment is to be logged; None: to none. Raises OSError."""
    if ENV_LOG not in env:
        return None
    Path(env[ENV_LOG]).parent.mkdir(parents=True, exist_ok=True)
    return open(env[ENV_LOG], "ab", buffering=0)


def signal_at_parent_end(number: signal.Signals | None) -> Callable[[], None] | None:
    """A function for a process just forked: has the kernel send it this signal when its parent ends."""
    if number is None:
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up before the fork
    return lambda: prctl(_PR_SET_PDEATHSIG, number)
