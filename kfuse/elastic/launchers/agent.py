"""A host's agent: starts and kills workers there for a supervisor elsewhere, and passes on what they print.

agent -> supervisor: hello (token, slots, host), line (worker, text), ended (worker, status), alive.
supervisor -> agent: welcome, start (worker, command, env, folder, share), kill (worker), alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from typing import Any

from kfuse.elastic import protocol
from kfuse.elastic.launchers.local import LocalLauncher, LocalProcess, follow

_CONNECT_S = 60.0
SILENCE_S = 10.0  # without acknowledgements, after which a connection counts as lost
_SUPERVISOR_LOST_S = 20.0  # time for workers to write a checkpoint after the supervisor is lost


class AgentError(RuntimeError):
    """The supervisor is lost: it cannot be reached, has refused this agent, or has ended."""


async def offer(host: str, port: int, token: str, slots: int, kill_with_agent: bool = True) -> None:
    """Runs workers for the supervisor at host:port, at most `slots` at a time, until the job is over.

    kill_with_agent: if this process ends, the kernel sends its workers SIGKILL; else SIGTERM. Raises AgentError; then
    all of its workers have ended.
    """
    reader, writer = await _connect(host, port)
    agent, why = _Agent(writer, kill_with_agent), ""
    heartbeats: asyncio.Task[None] | None = None
    try:
        agent.send("hello", token=token, slots=slots, host=socket.gethostname())
        if not await reader.readline():
            raise AgentError(f"the supervisor at {host}:{port} refused this host: is the token its own?")
        heartbeats = asyncio.create_task(send_heartbeats(writer))  # not before: the hello is one line
        while line := await reader.readline():
            message = protocol.decode(line)
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
        agent.kill_all()
        writer.close()
    raise AgentError(f"the supervisor at {host}:{port} is gone{why}")


async def _connect(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Tries again for `_CONNECT_S`: hosts come up in any order. Raises AgentError."""
    deadline = asyncio.get_running_loop().time() + _CONNECT_S
    while True:
        try:
            reader, writer = await asyncio.open_connection(host, port, limit=protocol.MAX_LINE)
            break
        except OSError as error:
            if asyncio.get_running_loop().time() > deadline:
                raise AgentError(f"no supervisor at {host}:{port} within {_CONNECT_S:.0f} s: {error}") from error
            await asyncio.sleep(0.2)
    protocol.set_acknowledgement_timeout(writer.get_extra_info("socket"), SILENCE_S)
    return reader, writer


async def send_heartbeats(writer: asyncio.StreamWriter) -> None:
    """Sends heartbeats, so that a lost connection is noticed."""
    while not writer.is_closing():
        protocol.send(writer, "alive")
        await asyncio.sleep(protocol.HEARTBEAT_S)


class _Agent:
    """The workers of this host."""

    def __init__(self, writer: asyncio.StreamWriter, kill_with_agent: bool) -> None:
        self._writer = writer
        self._launcher = LocalLauncher(parent_end_signal=signal.SIGKILL if kill_with_agent else signal.SIGTERM)
        self._processes: dict[int, LocalProcess] = {}
        self._watching: set[asyncio.Task[None]] = set()

    def send(self, kind: str, **fields: Any) -> None:
        protocol.send(self._writer, kind, **fields)

    async def handle(self, message: dict[str, Any]) -> None:
        """Handles a message of the supervisor: start or kill a worker."""
        number = message.get("worker")
        if message["type"] == "start" and isinstance(number, int):
            folder = message["folder"] if os.path.isdir(message["folder"]) else None
            try:
                process = await self._launcher.spawn(message["command"], message["env"], folder, message["share"])
            except OSError as error:
                self.send("line", worker=number, text=f"{message['command'][0]}: {error}")
                self.send("ended", worker=number, status=127)
                return
            self._processes[number] = process
            watching = asyncio.create_task(self._watch(number, process))
            self._watching.add(watching)
            watching.add_done_callback(self._watching.discard)
        elif message["type"] == "kill" and number in self._processes:
            self._processes[number].kill()

    async def _watch(self, number: int, process: LocalProcess) -> None:
        async def pass_on(line: str) -> None:
            self.send("line", worker=number, text=line)
            with contextlib.suppress(OSError):
                await self._writer.drain()

        status = await follow(process, pass_on)
        del self._processes[number]
        self.send("ended", worker=number, status=status)

    async def ended(self, timeout_s: float) -> None:
        """Returns when all workers have ended, or after the timeout."""
        waits = [asyncio.ensure_future(process.wait()) for process in self._processes.values()]
        if waits:
            await asyncio.wait(waits, timeout=timeout_s)

    def kill_all(self) -> None:
        for process in list(self._processes.values()):
            with contextlib.suppress(ProcessLookupError):
                process.kill()
