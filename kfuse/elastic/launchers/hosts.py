"""Workers on several machines without a cluster manager: each host's agent offers slots, and starts workers in them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import AsyncIterator, Mapping
from typing import Any

from kfuse.elastic import protocol
from kfuse.elastic.gate import Gate
from kfuse.elastic.launchers.agent import SILENCE_S, AgentError, beat, offer


class HostProcess:
    """A worker, as seen from the supervisor."""

    def __init__(self, number: int, env: dict[str, str]) -> None:
        self.number, self.env = number, env
        self.running = False
        self.host: _Host | None = None
        self._lines: asyncio.Queue[str | None] = asyncio.Queue()
        self._status: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def lines(self) -> AsyncIterator[str]:
        while (line := await self._lines.get()) is not None:
            yield line

    async def wait(self) -> int:
        """As of any process; the loss of its host counts as SIGKILL."""
        return await asyncio.shield(self._status)

    def kill(self) -> None:
        if self._status.done():
            return
        if self.host is None:
            self.end(-signal.SIGKILL)
        else:
            self.host.send("kill", worker=self.number)

    def say(self, line: str) -> None:
        self._lines.put_nowait(line)

    def end(self, status: int) -> None:
        if not self._status.done():
            self._status.set_result(status)
            self._lines.put_nowait(None)

    @property
    def ended(self) -> bool:
        return self._status.done()


class _Host:
    """An agent's connection."""

    def __init__(self, writer: asyncio.StreamWriter, slots: int) -> None:
        self.writer, self.slots = writer, slots
        self.processes: dict[int, HostProcess] = {}

    @property
    def free(self) -> int:
        return self.slots - len(self.processes)

    def send(self, kind: str, **fields: Any) -> None:
        protocol.tell(self.writer, kind, **fields)


class HostsLauncher:
    """Starts `command` in the slots that hosts offer at host:port, this machine among them; the emptiest first.

    A worker for which there is no slot waits for one, as long as it takes.
    """

    def __init__(
        self, command: list[str], host: str, port: int, token: str, slots: int, most: int | None = None
    ) -> None:
        """host: this machine's address, as the other hosts reach it. slots: how many workers this machine takes.

        most: how many workers the job has at most. As many as a host may get of them share its cores.
        """
        self._most = most
        self._command, self._host, self._port, self._token, self._slots = command, host, port, token, slots
        self._gate = Gate(token)
        self._hosts: list[_Host] = []
        self._waiting: deque[HostProcess] = deque()
        self._started = 0

    async def open(self) -> str:
        self._server = await asyncio.start_server(self._serve, self._host, self._port, limit=protocol.MAX_LINE)
        self._port = self._server.sockets[0].getsockname()[1]
        # Workers of this machine are its own: when this process dies they may write a checkpoint.
        self._own = asyncio.create_task(offer(self._host, self._port, self._token, self._slots, dies_with_us=False))
        return self._host

    async def start(self, env: Mapping[str, str]) -> HostProcess:
        path = {name: value for name, value in os.environ.items() if name == "PYTHONPATH"}
        process = HostProcess(self._started, {**path, **env})
        self._started += 1
        self._waiting.append(process)
        self._place()
        return process

    async def close(self) -> None:
        self._server.close()
        for host in self._hosts:
            host.send("over")
            host.writer.close()
        with contextlib.suppress(AgentError):
            await self._own

    def _place(self) -> None:
        while self._waiting and any(host.free > 0 for host in self._hosts):
            process = self._waiting.popleft()
            if process.ended:  # killed while it waited
                continue
            host = max(self._hosts, key=lambda host: host.free)
            host.processes[process.number] = process
            process.host, process.running = host, True
            env, folder = process.env, os.getcwd()
            share = host.slots if self._most is None else min(host.slots, self._most)
            host.send("start", worker=process.number, command=self._command, env=env, folder=folder, share=share)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """An agent's connection, once it has shown the token."""
        host: _Host | None = None
        beating: asyncio.Task[None] | None = None
        try:
            hello = await self._gate.hello(reader, writer)
            host = _Host(writer, int(hello["slots"]))
            protocol.expect_answers(writer.get_extra_info("socket"), SILENCE_S)
            host.send("welcome")
            beating = asyncio.create_task(beat(writer))
            self._hosts.append(host)
            self._place()
            while line := await reader.readline():
                self._hear(host, protocol.decode(line))
        except (OSError, ValueError, KeyError, TimeoutError):
            pass  # not authenticated, or a host that is lost
        finally:
            if beating is not None:
                beating.cancel()
            if host is not None:
                self._lose(host)
            writer.close()

    def _hear(self, host: _Host, message: dict[str, Any]) -> None:
        process = host.processes.get(message.get("worker", -1))
        if process is None:
            return
        if message["type"] == "line":
            process.say(str(message["text"]))
        elif message["type"] == "ended":
            del host.processes[process.number]
            process.end(int(message["status"]))
            self._place()

    def _lose(self, host: _Host) -> None:
        if host in self._hosts:
            self._hosts.remove(host)
        for process in host.processes.values():
            process.say("the host's agent is gone")
            process.end(-signal.SIGKILL)
