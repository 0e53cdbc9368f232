"""Workers on several machines without a cluster manager: each host's agent offers slots and starts workers in them.

agent -> launcher: hello (token, slots, host, only), line (worker, text), ended (worker, status, cause), leaving, alive.
launcher -> agent: welcome (command, folder, share, grace_s, notice_signals), start (worker, env), kill (worker), left
(no "start" comes any more), alive, over.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kfuse.elastic.launchers.agent import SILENCE_S, AgentError, offer, send_heartbeats
from kfuse.elastic.protocol import ENV_WORKER, decode, send, set_acknowledgement_timeout
from kfuse.elastic.server import Server


class HostProcess:
    """A worker on some host, as the supervisor sees it."""

    def __init__(self, number: int, env: dict[str, str]) -> None:
        """number: the worker's."""
        self.number, self.env = number, env
        self.running = False
        self.cause = ""  # how it ended, where that was with its host
        self.cut_off = False  # others do not reach its host
        self.noticed = False  # its machine is about to be taken away; where it gets no signal of its own
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
    noticed: bool = False  # it is about to be taken away
    cut_off: bool = False  # a worker on it was not reached by others: it gets workers where no other host has room
    processes: dict[int, HostProcess] = field(default_factory=dict)

    @property
    def free(self) -> int:
        return 0 if self.noticed else self.slots - len(self.processes)


class HostsLauncher:
    """Starts `command` in the slots that hosts offer at host:port, this machine among them; the emptiest first.

    A worker for which there is no slot waits for one, as long as it takes.
    """

    def __init__(
        self,
        command: list[str] | None,
        host: str,
        port: int,
        token: str,
        slots: int,
        most: int,
        grace_s: float,
        notice_signals: Sequence[str] = (),
        ranks: int = 1,
    ) -> None:
        """host: this machine's address, as the other hosts reach it. slots: how many processes this machine takes.

        most: how many workers the job has at most. As many as a host may get of them share its cores. grace_s: until an
        agent kills workers that are to end. notice_signals: names of those that an agent passes on to its workers.
        ranks: processes of each worker.
        """
        self._ranks = ranks
        self._command, self._host, self._port, self._token = command, host, port, token
        self._slots, self._most, self._grace_s, self._notice_signals = slots, most, grace_s, notice_signals
        self._server = Server(token, self._serve)
        self._hosts: list[_Host] = []
        self._waiting: list[HostProcess] = []
        self._own: asyncio.Task[bool] | None = None
        self._over = False
        self.event: Callable[..., None] = lambda kind, **fields: None

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
        process = HostProcess(int(env[ENV_WORKER]), {**path, **env})
        self._waiting.append(process)
        self._place()
        return process

    async def close(self) -> None:
        self._over = True
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
            host = max(hosts, key=lambda host: (not host.cut_off, host.free))
            self._waiting.remove(process)
            host.processes[process.number] = process
            process.agent, process.running = host.agent, True
            send(host.agent, "start", worker=process.number, env=process.env)

    async def _serve(self, hello: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one agent's connection. When it ends, the host is lost."""
        if self._over:  # it was on its way
            send(writer, "over")
            return
        host = _Host(str(hello["host"]), writer, int(hello["slots"]) // self._ranks, hello.get("only"))
        set_acknowledgement_timeout(writer.get_extra_info("socket"), SILENCE_S)
        limits = {"grace_s": self._grace_s, "notice_signals": [*self._notice_signals], "ranks": self._ranks}
        share = min(host.slots, self._most) * self._ranks
        send(writer, "welcome", command=self._command, folder=os.getcwd(), share=share, **limits)
        beating = asyncio.create_task(send_heartbeats(writer))
        self._hosts.append(host)
        if host.only is None:
            self.event("host_joined", host=host.name, slots=host.slots)
        self._place()
        try:
            while line := await reader.readline():
                message = decode(line)
                process = host.processes.get(message.get("worker", -1))
                if process is not None and message["type"] == "line":
                    process.printed.put_nowait(str(message["text"]))
                elif process is not None and message["type"] == "ended":
                    del host.processes[process.number]
                    host.cut_off |= process.cut_off
                    process.end(int(message["status"]), message.get("cause", ""))
                    self._place()
                elif message["type"] == "leaving":
                    host.noticed = True
                    send(writer, "left")
        finally:
            beating.cancel()
            self._hosts.remove(host)
            if host.only is None and not self._over:
                if host.noticed:
                    self.event("host_left", host=host.name)
                else:
                    self.event("host_lost", host=host.name, workers=[*host.processes])
            for process in host.processes.values():
                process.end(-signal.SIGKILL, f"was lost with its host {host.name}: the agent there is gone")
