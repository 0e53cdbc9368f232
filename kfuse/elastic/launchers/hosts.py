"""Workers on several machines without a cluster manager: each host's agent offers slots and starts workers in them.

agent -> launcher: hello (token, slots, host, only), line (worker, text), ended (worker, status), leaving, alive.
launcher -> agent: welcome (command, folder, share, grace_s, notice_signals), start (worker, env), kill (worker), left
(no "start" comes any more), alive, over.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kfuse.elastic.launchers.local import LocalLauncher, LocalProcess
from kfuse.elastic.protocol import HEARTBEAT_S, MAX_LINE, decode, send, set_acknowledgement_timeout
from kfuse.elastic.server import Server

_CONNECT_S = 60.0
_SILENCE_S = 10.0  # without acknowledgements, after which a connection counts as lost
_LAST_OUTPUT_S = 1.0


class AgentError(RuntimeError):
    """The supervisor is lost: it cannot be reached, has refused this agent, or has ended."""


async def offer(
    host: str,
    port: int,
    token: str,
    slots: int,
    kill_with_agent: bool = True,
    only: int | None = None,
    takes_notice: bool = False,
) -> bool:
    """Runs workers for the supervisor at host:port, at most `slots` at a time, until the job is over.

    kill_with_agent: if this process ends, the kernel sends its workers SIGKILL; else SIGTERM. only: number of the one
    process that this agent is for; None: it is for any. takes_notice: the job's notice signals, sent to this process,
    go on to its workers; once these have left this function returns. Returns False where some had to be killed, as
    they did not leave in time. Raises AgentError. In any case all of its workers have ended.
    """
    hello = {"token": token, "slots": slots, "host": socket.gethostname(), "only": only}
    reader, writer, job = await _connect(host, port, hello)
    folder = job["folder"] if os.path.isdir(job["folder"]) else None
    end_signal = signal.SIGKILL if kill_with_agent else signal.SIGTERM
    launcher = LocalLauncher(job["command"], parent_end_signal=end_signal, share=job["share"], folder=folder)
    agent = _Agent(writer, launcher, job["grace_s"])
    serving, leaving = asyncio.create_task(agent.serve(reader)), asyncio.create_task(agent.leave())
    heartbeats = asyncio.create_task(_send_heartbeats(writer))
    for name in job["notice_signals"] if takes_notice else ():
        number = signal.Signals[name]
        asyncio.get_running_loop().add_signal_handler(number, agent.take_notice, number)
    try:
        await asyncio.wait([serving, leaving], return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():
            return leaving.result()
        if (why := serving.result()) is None:
            return True
        if agent.watching:
            await asyncio.wait(agent.watching, timeout=job["grace_s"])
    finally:
        for task in (serving, leaving, heartbeats):
            task.cancel()
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
    def __init__(self, writer: asyncio.StreamWriter, launcher: LocalLauncher, grace_s: float) -> None:
        self._writer, self._launcher, self._grace_s = writer, launcher, grace_s
        self.processes: dict[int, LocalProcess] = {}
        self.watching: set[asyncio.Task[None]] = set()
        self._notice: asyncio.Future[int] = asyncio.get_running_loop().create_future()  # the signal that gave it
        self._left = asyncio.Event()  # the supervisor starts no worker here any more

    async def serve(self, reader: asyncio.StreamReader) -> str | None:
        """Does what the supervisor says, until the job is over: None. If the connection ends before: why, or ""."""
        try:
            while line := await reader.readline():
                message = decode(line)
                match message["type"]:
                    case "over":
                        return None
                    case "start":
                        await self.start(message["worker"], message["env"])
                    case "kill" if message["worker"] in self.processes:
                        self.processes[message["worker"]].kill()
                    case "left":
                        self._left.set()
        except (OSError, ValueError) as error:
            return f": {error}"
        return ""

    def take_notice(self, number: int) -> None:
        if not self._notice.done():
            self._notice.set_result(number)

    async def leave(self) -> bool:
        """Waits for a notice, and until all workers have left. Returns False after the grace."""
        number = await self._notice
        send(self._writer, "leaving")
        try:
            async with asyncio.timeout(self._grace_s):
                await self._left.wait()  # a worker that is told before could be replaced by one here
                for process in self.processes.values():
                    process.send_signal(number)
                while self.watching:
                    await asyncio.wait(self.watching)
        except TimeoutError:
            return False
        return True

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
    leaving: bool = False  # it is about to be taken away
    processes: dict[int, HostProcess] = field(default_factory=dict)

    @property
    def free(self) -> int:
        return 0 if self.leaving else self.slots - len(self.processes)


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
    ) -> None:
        """host: this machine's address, as the other hosts reach it. slots: how many workers this machine takes.

        most: how many workers the job has at most. As many as a host may get of them share its cores. grace_s: until an
        agent kills workers that are to end. notice_signals: names of those that an agent passes on to its workers.
        """
        self._command, self._host, self._port, self._token = command, host, port, token
        self._slots, self._most, self._grace_s, self._notice_signals = slots, most, grace_s, notice_signals
        self._server = Server(token, self._serve)
        self._hosts: list[_Host] = []
        self._waiting: list[HostProcess] = []
        self._started = 0
        self._own: asyncio.Task[bool] | None = None

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
        limits = {"grace_s": self._grace_s, "notice_signals": [*self._notice_signals]}
        share = min(host.slots, self._most)
        send(writer, "welcome", command=self._command, folder=os.getcwd(), share=share, **limits)
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
                elif message["type"] == "leaving":
                    host.leaving = True
                    send(writer, "left")
        finally:
            beating.cancel()
            self._hosts.remove(host)
            for process in host.processes.values():
                process.end(-signal.SIGKILL, f"was lost with its host {host.name}: the agent there is gone")
