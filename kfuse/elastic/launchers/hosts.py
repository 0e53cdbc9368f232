"""Workers on several machines without a cluster manager: each host's agent offers slots and starts workers in them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kfuse.elastic import protocol
from kfuse.elastic.launchers.agent import SILENCE_S, AgentError, offer, send_heartbeats
from kfuse.elastic.server import Server


class HostProcess:
    """A worker on some host, as the supervisor sees it."""

    def __init__(self, number: int, env: dict[str, str]) -> None:
        self.number, self.env = number, env
        self.running = False
        self.cause = ""
        """How it ended, where that was with its host."""
        self.agent: asyncio.StreamWriter | None = None
        """The connection of the agent that has started it."""
        self._lines: asyncio.Queue[str | None] = asyncio.Queue()
        self._status: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def ended(self) -> bool:
        """Whether its end was reported."""
        return self._status.done()

    async def lines(self) -> AsyncIterator[str]:
        """What it prints, line by line, until it ends."""
        while (line := await self._lines.get()) is not None:
            yield line

    async def wait(self) -> int:
        """Its exit status once it has ended; -SIGKILL if its host was lost."""
        return await asyncio.shield(self._status)

    def kill(self) -> None:
        """Ends it at once, on whatever host it is."""
        if self.agent is None:
            self.end(-signal.SIGKILL)
        elif not self.ended:
            protocol.send(self.agent, "kill", worker=self.number)

    def printed(self, line: str) -> None:
        """Called when its agent reports a line."""
        self._lines.put_nowait(line)

    def end(self, status: int, cause: str = "") -> None:
        """Called when its agent reports its end, or is lost."""
        if not self.ended:
            self.cause = cause
            self._status.set_result(status)
            self._lines.put_nowait(None)


@dataclass(eq=False)
class _Host:
    """A host: the connection of its agent, and the workers in its slots."""

    name: str
    agent: asyncio.StreamWriter
    slots: int
    only: int | None
    """The one process that it is for; None: it is for any."""
    processes: dict[int, HostProcess] = field(default_factory=dict)

    @property
    def free(self) -> int:
        return self.slots - len(self.processes)


class HostsLauncher:
    """Starts `command` in the slots that hosts offer at host:port, this machine among them; the emptiest first.

    A worker for which there is no slot waits for one, as long as it takes.
    """

    def __init__(
        self, command: list[str] | None, host: str, port: int, token: str, slots: int, most: int | None = None
    ) -> None:
        """host: this machine's address, as the other hosts reach it. slots: how many workers this machine takes.

        most: how many workers the job has at most. As many as a host may get of them share its cores.
        """
        self._most = most
        self._command, self._host, self._port, self._token, self._slots = command, host, port, token, slots
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
        """Tells all agents that the job is over."""
        for host in self._hosts:
            protocol.send(host.agent, "over")
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
            share = host.slots if self._most is None else min(host.slots, self._most)
            start = {"command": self._command, "env": process.env, "folder": os.getcwd(), "share": share}
            protocol.send(host.agent, "start", worker=process.number, **start)

    async def _serve(self, hello: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one agent's connection. When it ends, the host is lost."""
        host = _Host(str(hello["host"]), writer, int(hello["slots"]), hello.get("only"))
        protocol.set_acknowledgement_timeout(writer.get_extra_info("socket"), SILENCE_S)
        protocol.send(writer, "welcome")
        beating = asyncio.create_task(send_heartbeats(writer))
        self._hosts.append(host)
        self._place()
        try:
            while line := await reader.readline():
                message = protocol.decode(line)
                process = host.processes.get(message.get("worker", -1))
                if process is not None and message["type"] == "line":
                    process.printed(str(message["text"]))
                elif process is not None and message["type"] == "ended":
                    del host.processes[process.number]
                    process.end(int(message["status"]))
                    self._place()
        finally:
            beating.cancel()
            self._hosts.remove(host)
            for process in host.processes.values():
                process.end(-signal.SIGKILL, f"was lost with its host {host.name}: the agent there is gone")
