"""A host's agent: starts and kills workers there for a supervisor elsewhere, and passes on what they print.

agent -> supervisor: hello (token, slots, host, only), line (worker, text), ended (worker, status), alive.
supervisor -> agent: welcome, start (worker, command, env, folder, share), kill (worker), alive, over.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from kfuse.elastic.launchers.local import LocalLauncher, LocalProcess
from kfuse.elastic.protocol import HEARTBEAT_S, MAX_LINE, decode, send, set_acknowledgement_timeout

if TYPE_CHECKING:
    from kfuse.elastic.launchers.base import WorkerProcess

_CONNECT_S = 60.0
SILENCE_S = 10.0  # without acknowledgements, after which a connection counts as lost
_SUPERVISOR_LOST_S = 20.0  # time for workers to write a checkpoint after the supervisor is lost
_LAST_OUTPUT_S = 1.0


class AgentError(RuntimeError):
    """The supervisor is lost: it cannot be reached, has refused this agent, or has ended."""


async def offer(
    host: str, port: int, token: str, slots: int, kill_with_agent: bool = True, only: int | None = None
) -> None:
    """Runs workers for the supervisor at host:port, at most `slots` at a time, until the job is over.

    kill_with_agent: if this process ends, the kernel sends its workers SIGKILL; else SIGTERM. only: number of the one
    process that this agent is for; None: it is for any. Raises AgentError; then all of its workers have ended.
    """
    reader, writer = await _connect(host, port)
    agent, why = _Agent(writer, kill_with_agent), ""
    heartbeats: asyncio.Task[None] | None = None
    try:
        send(writer, "hello", token=token, slots=slots, host=socket.gethostname(), only=only)
        if not await reader.readline():
            raise AgentError(f"the supervisor at {host}:{port} refused this host: is the token its own?")
        heartbeats = asyncio.create_task(send_heartbeats(writer))  # not before: the hello is one line
        while line := await reader.readline():
            message = decode(line)
            if message["type"] == "over":
                return
            await agent.handle(message)
        await agent.ended(_SUPERVISOR_LOST_S)
    except (OSError, ValueError) as error:
        why = f": {error}"
        await agent.ended(_SUPERVISOR_LOST_S)
    finally:
        if heartbeats is not None:
            heartbeats.cancel()
        for process in agent.processes.values():
            process.kill()
        writer.close()
    raise AgentError(f"the supervisor at {host}:{port} is gone{why}")


async def _connect(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Tries again for `_CONNECT_S`: hosts come up in any order. Raises AgentError."""
    deadline = asyncio.get_running_loop().time() + _CONNECT_S
    while True:
        try:
            reader, writer = await asyncio.open_connection(host, port, limit=MAX_LINE)
            break
        except OSError as error:
            if asyncio.get_running_loop().time() > deadline:
                raise AgentError(f"no supervisor at {host}:{port} within {_CONNECT_S:.0f} s: {error}") from error
            await asyncio.sleep(0.2)
    set_acknowledgement_timeout(writer.get_extra_info("socket"), SILENCE_S)
    return reader, writer


async def send_heartbeats(writer: asyncio.StreamWriter) -> None:
    """Sends heartbeats, so that a lost connection is noticed."""
    while not writer.is_closing():
        send(writer, "alive")
        await asyncio.sleep(HEARTBEAT_S)


async def follow(process: WorkerProcess, pass_on: Callable[[str], Awaitable[None]]) -> int:
    """Passes on what a worker prints. Returns its exit status once it has ended and its output has been read."""

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


class _Agent:
    """The workers of this host."""

    def __init__(self, writer: asyncio.StreamWriter, kill_with_agent: bool) -> None:
        self._writer = writer
        self._launcher = LocalLauncher(parent_end_signal=signal.SIGKILL if kill_with_agent else signal.SIGTERM)
        self.processes: dict[int, LocalProcess] = {}
        self._watching: set[asyncio.Task[None]] = set()

    async def handle(self, message: dict[str, Any]) -> None:
        """Handles a message of the supervisor: start or kill a worker."""
        number = message.get("worker")
        if message["type"] == "start" and isinstance(number, int):
            folder = message["folder"] if os.path.isdir(message["folder"]) else None
            try:
                process = await self._launcher.start(message["env"], message["command"], folder, message["share"])
            except OSError as error:
                send(self._writer, "line", worker=number, text=f"the worker cannot be started: {error}")
                send(self._writer, "ended", worker=number, status=127)
                return
            self.processes[number] = process
            watching = asyncio.create_task(self._watch(number, process))
            self._watching.add(watching)
            watching.add_done_callback(self._watching.discard)
        elif message["type"] == "kill" and number in self.processes:
            self.processes[number].kill()

    async def _watch(self, number: int, process: LocalProcess) -> None:
        async def pass_on(line: str) -> None:
            send(self._writer, "line", worker=number, text=line)
            with contextlib.suppress(OSError):
                await self._writer.drain()

        status = await follow(process, pass_on)
        del self.processes[number]
        send(self._writer, "ended", worker=number, status=status)

    async def ended(self, timeout_s: float) -> None:
        """Returns when all workers have ended, or after the timeout."""
        if self._watching:
            await asyncio.wait(self._watching, timeout=timeout_s)
