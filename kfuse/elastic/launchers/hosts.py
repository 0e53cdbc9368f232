"""Workers on several machines without a cluster manager: each host's agent offers slots and starts workers in them.

agent -> launcher: hello (token, slots, host, only), line (worker, text), ended (worker, status), alive.
launcher -> agent: welcome (command, folder, share), start (worker, env), kill (worker), alive, over.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kfuse.elastic.launchers.local import LocalLauncher, LocalProcess
from kfuse.elastic.protocol import HEARTBEAT_S, MAX_LINE, decode, send, set_acknowledgement_timeout
from kfuse.elastic.server import Server

_CONNECT_S = 60.0
_SILENCE_S = 10.0  # without acknowledgements, after which a connection counts as lost
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
    hello = {"token": token, "slots": slots, "host": socket.gethostname(), "only": only}
    reader, writer, job = await _connect(host, port, hello)
    folder = job["folder"] if os.path.isdir(job["folder"]) else None
    end_signal = signal.SIGKILL if kill_with_agent else signal.SIGTERM
    launcher = LocalLauncher(job["command"], parent_end_signal=end_signal, share=job["share"], folder=folder)
    agent, why = _Agent(writer, launcher), ""
    heartbeats = asyncio.create_task(_send_heartbeats(writer))
    try:
        try:
            while line := await reader.readline():
                message = decode(line)
                match message["type"]:
                    case "over":
                        return
                    case "start":
                        await agent.start(message["worker"], message["env"])
                    case "kill" if message["worker"] in agent.processes:
                        agent.processes[message["worker"]].kill()
        except (OSError, ValueError) as error:
            why = f": {error}"
        if agent.watching:
            await asyncio.wait(agent.watching, timeout=_SUPERVISOR_LOST_S)
    finally:
        heartbeats.cancel()
        for process in agent.processes.values():
            process.kill()
        writer.close()
    raise AgentError(f"the supervisor at {host}:{port} is gone{why}")


async def _connect(
    address: str, port: int, hello: dict[str, Any]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, dict[str, Any]]:
    """A connection and the supervisor's welcome. Tries again for `_CONNECT_S`: hosts come up in any order.

    Raises AgentError.
    """
    deadline = asyncio.get_running_loop().time() + _CONNECT_S
    while True:
        try:
            reader, writer = await asyncio.open_connection(address, port, limit=MAX_LINE)
            set_acknowledgement_timeout(writer.get_extra_info("socket"), _SILENCE_S)
            send(writer, "hello", **hello)
            if line := await reader.readline():
                return reader, writer, decode(line)
            raise AgentError(f"the supervisor at {address}:{port} refused this host: is the token its own?")
        except OSError as error:
            if asyncio.get_running_loop().time() > deadline:
                raise AgentError(f"no supervisor at {address}:{port} within {_CONNECT_S:.0f} s: {error}") from error
            await asyncio.sleep(0.2)


async def _send_heartbeats(writer: asyncio.StreamWriter) -> None:
    while not writer.is_closing():
        send(writer, "alive")
        await asyncio.sleep(HEARTBEAT_S)


class _Agent:
    def __init__(self, writer: asyncio.StreamWriter, launcher: LocalLauncher) -> None:
        self._writer, self._launcher = writer, launcher
        self.processes: dict[int, LocalProcess] = {}
        self.watching: set[asyncio.Task[None]] = set()

    async def start(self, number: int, env: dict[str, str]) -> None:
        try:
            process = await self._launcher.start(env)
        except OSError as error:
            send(self._writer, "line", worker=number, text=f"the worker cannot be started: {error}")
            send(self._writer, "ended", worker=number, status=127)
            return
        self.processes[number] = process
        watching = asyncio.create_task(self._watch(number, process))
        self.watching.add(watching)
        watching.add_done_callback(self.watching.discard)

    async def _watch(self, number: int, process: LocalProcess) -> None:
        reading = asyncio.create_task(self._pass_on(number, process))
        status = await process.wait()
        await asyncio.wait([reading], timeout=_LAST_OUTPUT_S)  # what it started may hold the pipe open
        reading.cancel()
        del self.processes[number]
        send(self._writer, "ended", worker=number, status=status)

    async def _pass_on(self, number: int, process: LocalProcess) -> None:
        async for line in process.lines():
            send(self._writer, "line", worker=number, text=line)
            with contextlib.suppress(OSError):
                await self._writer.drain()


# -- the supervisor's side ---------------------------------------------------------------------------------------------


class HostProcess:
    """A worker on some host, as the supervisor sees it."""

    def __init__(self, number: int, env: dict[str, str]) -> None:
        self.number, self.env = number, env
        self.running = False
        self.cause = ""  # how it ended, where that was with its host
        self.agent: asyncio.StreamWriter | None = None  # of the host that has started it
        self.printed: asyncio.Queue[str | None] = asyncio.Queue()  # its lines, then None
        self._status: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def ended(self) -> bool:
        return self._status.done()

    async def lines(self) -> AsyncIterator[str]:
        while (line := await self.printed.get()) is not None:
            yield line

    async def wait(self) -> int:
        """-SIGKILL if its host was lost."""
        return await asyncio.shield(self._status)

    def kill(self) -> None:
        if self.agent is None:
            self.end(-signal.SIGKILL)
        elif not self.ended:
            send(self.agent, "kill", worker=self.number)

    def end(self, status: int, cause: str = "") -> None:
        if not self.ended:
            self.cause = cause
            self._status.set_result(status)
            self.printed.put_nowait(None)


@dataclass(eq=False)
class _Host:
    """A host: the connection of its agent, and the workers in its slots."""

    name: str
    agent: asyncio.StreamWriter
    slots: int
    only: int | None  # the one process that it is for; None: it is for any
    processes: dict[int, HostProcess] = field(default_factory=dict)

    @property
    def free(self) -> int:
        return self.slots - len(self.processes)


class HostsLauncher:
    """Starts `command` in the slots that hosts offer at host:port, this machine among them; the emptiest first.

    A worker for which there is no slot waits for one, as long as it takes.
    """

    def __init__(self, command: list[str] | None, host: str, port: int, token: str, slots: int, most: int) -> None:
        """host: this machine's address, as the other hosts reach it. slots: how many workers this machine takes.

        most: how many workers the job has at most. As many as a host may get of them share its cores.
        """
        self._command, self._host, self._port, self._token = command, host, port, token
        self._slots, self._most = slots, most
        self._server = Server(token, self._serve)
        self._hosts: list[_Host] = []
        self._waiting: list[HostProcess] = []
        self._started = 0
        self._own: asyncio.Task[None] | None = None

    async def open(self) -> str:
        """Waits for hosts from now on, and offers this one's slots. Raises OSError."""
        self._port = await self._server.open(self._host, self._port)
        if self._slots:  # if this process ends, its workers get SIGTERM: they may still write a checkpoint
            own = offer(self._host, self._port, self._token, self._slots, kill_with_agent=False)
            self._own = asyncio.create_task(own)
        return self._host

    async def start(self, env: Mapping[str, str]) -> HostProcess:
        """A worker that starts as soon as a host has a free slot."""
        path = {name: value for name, value in os.environ.items() if name == "PYTHONPATH"}
        process = HostProcess(self._started, {**path, **env})
        self._started += 1
        self._waiting.append(process)
        self._place()
        return process

    async def close(self) -> None:
        for host in self._hosts:
            send(host.agent, "over")
            host.agent.close()
        if self._own is not None:
            with contextlib.suppress(AgentError):
                await self._own
        await self._server.close()

    def _place(self) -> None:
        self._waiting = [process for process in self._waiting if not process.ended]  # killed while it waited
        for process in [*self._waiting]:
            hosts = [host for host in self._hosts if host.free > 0 and host.only in (None, process.number)]
            if not hosts:
                continue
            host = max(hosts, key=lambda host: host.free)
            self._waiting.remove(process)
            host.processes[process.number] = process
            process.agent, process.running = host.agent, True
            send(host.agent, "start", worker=process.number, env=process.env)

    async def _serve(self, hello: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one agent's connection. When it ends, the host is lost."""
        host = _Host(str(hello["host"]), writer, int(hello["slots"]), hello.get("only"))
        set_acknowledgement_timeout(writer.get_extra_info("socket"), _SILENCE_S)
        send(writer, "welcome", command=self._command, folder=os.getcwd(), share=min(host.slots, self._most))
        beating = asyncio.create_task(_send_heartbeats(writer))
        self._hosts.append(host)
        self._place()
        try:
            while line := await reader.readline():
                message = decode(line)
                process = host.processes.get(message.get("worker", -1))
                if process is not None and message["type"] == "line":
                    process.printed.put_nowait(str(message["text"]))
                elif process is not None and message["type"] == "ended":
                    del host.processes[process.number]
                    process.end(int(message["status"]))
                    self._place()
        finally:
            beating.cancel()
            self._hosts.remove(host)
            for process in host.processes.values():
                process.end(-signal.SIGKILL, f"was lost with its host {host.name}: the agent there is gone")
