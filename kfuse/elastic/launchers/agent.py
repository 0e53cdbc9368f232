"""A host's agent: offers the host's slots to a supervisor, and runs workers in them (see `hosts`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kfuse.elastic.launchers.local import LocalLauncher, LocalProcess
from kfuse.elastic.launchers.replica import ReplicaLauncher, ReplicaProcess
from kfuse.elastic.protocol import HEARTBEAT_S, MAX_LINE, decode, place, send, set_acknowledgement_timeout

SILENCE_S = 10.0  # without acknowledgements, after which a connection counts as lost
_CONNECT_S = 60.0  # for the first connection: hosts come up in any order
_AGAIN_S = 600.0  # for another one, to a supervisor that was lost: the network, or the supervisor, may come back
_ATTEMPT_S = 10.0
_FIRST_WAIT_S, _MOST_WAIT_S = 0.2, 5.0  # between two attempts; each wait is half as long again
_LAST_OUTPUT_S = 1.0


class AgentError(RuntimeError):
    """The supervisor cannot be reached, or has refused this agent."""


class SupervisorLost(AgentError):
    """The connection to the supervisor has ended before the job was over."""


async def join(host: str, port: int, token: str, slots: int) -> bool:
    """Runs workers for the supervisor at host:port, and again if it is lost and comes back, until the job is over.

    The job's notice signals go on to the workers; once these have left this function returns. So it does at SIGTERM
    while it waits for the supervisor. Returns False where some workers had to be killed, as they did not leave in time.
    Raises AgentError: the supervisor has refused this host, or was not there for a minute, or once lost for ten.
    """
    limit_s = _CONNECT_S
    while True:
        try:
            return await offer(host, port, token, slots, takes_notice=True, limit_s=limit_s)
        except SupervisorLost as error:
            limit_s = _AGAIN_S
            _say(f"{error}; its workers here have ended")


def _say(text: str) -> None:
    print(f"kfuse-run: {text}", file=sys.stderr, flush=True)


async def offer(
    host: str,
    port: int,
    token: str,
    slots: int,
    kill_with_agent: bool = True,
    only: int | None = None,
    takes_notice: bool = False,
    limit_s: float = _CONNECT_S,
) -> bool:
    """Runs workers for the supervisor at host:port, at most `slots` at a time, until the job is over.

    kill_with_agent: if this process ends, the kernel sends its workers SIGKILL; else SIGTERM. only: number of the one
    process that this agent is for; None: it is for any. takes_notice: as in `join`. limit_s: for the connection.
    Returns False where some workers had to be killed, as they did not leave in time. Raises AgentError. In any case
    all of its workers have ended.
    """
    hello = {"token": token, "slots": slots, "host": socket.gethostname(), "only": only}
    connecting = asyncio.create_task(_connect(host, port, hello, limit_s, tells=takes_notice))
    with _calls(lambda _: connecting.cancel(), ["SIGTERM"] if takes_notice else []):
        await asyncio.wait([connecting])
    if connecting.cancelled():
        _say(f"ended by SIGTERM as it waited for the supervisor at {place(host, port)}")
        return True
    reader, writer, job = connecting.result()
    if job["type"] == "over":
        writer.close()
        return True
    if takes_notice:
        _say(f"connected to {place(host, port)}: offers {slots} slot{'s' if slots > 1 else ''}")
    folder = job["folder"] if os.path.isdir(job["folder"]) else None
    end_signal = signal.SIGKILL if kill_with_agent else signal.SIGTERM
    local = LocalLauncher(job["command"], parent_end_signal=end_signal, share=job["share"], folder=folder)
    launcher = local if job["ranks"] == 1 else ReplicaLauncher(local, job["ranks"])
    agent = _Agent(writer, launcher, job["grace_s"])
    serving, leaving = asyncio.create_task(agent.serve(reader)), asyncio.create_task(agent.leave())
    heartbeats = asyncio.create_task(send_heartbeats(writer))
    try:
        with _calls(agent.take_notice, job["notice_signals"] if takes_notice else []):
            await asyncio.wait([serving, leaving], return_when=asyncio.FIRST_COMPLETED)
            if leaving.done():
                _say("has left after its notice")
                return leaving.result()
            if (why := serving.result()) is None:
                if takes_notice:
                    _say("the job is over")
                return True
            if agent.watching:
                await asyncio.wait(agent.watching, timeout=job["grace_s"])
            if agent.notice.done():  # meanwhile
                return not agent.watching
    finally:
        for task in (serving, leaving, heartbeats):
            task.cancel()
        for process in agent.processes.values():
            process.kill()
        if agent.watching:
            await asyncio.wait(agent.watching, timeout=_LAST_OUTPUT_S)
        writer.close()
    raise SupervisorLost(f"the supervisor at {place(host, port)} is gone{why}")


@contextlib.contextmanager
def _calls(act: Callable[[int], object], names: Sequence[str]) -> Iterator[None]:
    """Context: these signals to this process call `act` with their number, and do nothing else."""
    loop, numbers = asyncio.get_running_loop(), [signal.Signals[name] for name in names]
    for number in numbers:
        loop.add_signal_handler(number, act, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def _connect(
    address: str, port: int, hello: dict[str, Any], limit_s: float, tells: bool
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, dict[str, Any]]:
    """A connection and the supervisor's welcome. Tries again for `limit_s`. tells: says that it waits.

    Raises AgentError.
    """
    loop = asyncio.get_running_loop()
    deadline, wait_s = loop.time() + limit_s, _FIRST_WAIT_S
    while True:
        try:
            async with asyncio.timeout(_ATTEMPT_S):
                reader, writer = await asyncio.open_connection(address, port, limit=MAX_LINE)
                set_acknowledgement_timeout(writer.get_extra_info("socket"), SILENCE_S)
                send(writer, "hello", **hello)
                if line := await reader.readline():
                    return reader, writer, decode(line)
            raise AgentError(f"the supervisor at {place(address, port)} refused this host: is the token its own?")
        except OSError as error:
            if loop.time() > deadline:
                why = str(error) or "no answer"
                raise AgentError(f"no supervisor at {place(address, port)} within {limit_s:.0f} s: {why}") from error
        if tells and wait_s == _FIRST_WAIT_S:
            _say(f"waits for a supervisor at {place(address, port)}, for at most {limit_s:.0f} s")
        await asyncio.sleep(wait_s)
        wait_s = min(1.5 * wait_s, _MOST_WAIT_S)


async def send_heartbeats(writer: asyncio.StreamWriter) -> None:
    while not writer.is_closing():
        send(writer, "alive")
        await asyncio.sleep(HEARTBEAT_S)


class _Agent:
    def __init__(self, writer: asyncio.StreamWriter, launcher: LocalLauncher | ReplicaLauncher, grace_s: float) -> None:
        self._writer, self._launcher, self._grace_s = writer, launcher, grace_s
        self.processes: dict[int, LocalProcess | ReplicaProcess] = {}
        self.watching: set[asyncio.Task[None]] = set()
        self.notice: asyncio.Future[int] = asyncio.get_running_loop().create_future()  # the signal that gave it
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
        if not self.notice.done():
            self.notice.set_result(number)

    async def leave(self) -> bool:
        """Waits for a notice, and until all workers have left. Returns False after the grace."""
        number = await self.notice
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

    async def _watch(self, number: int, process: LocalProcess | ReplicaProcess) -> None:
        reading = asyncio.create_task(self._pass_on(number, process))
        status = await process.wait()
        await asyncio.wait([reading], timeout=_LAST_OUTPUT_S)  # what it started may hold the pipe open
        reading.cancel()
        del self.processes[number]
        send(self._writer, "ended", worker=number, status=status, cause=process.cause)

    async def _pass_on(self, number: int, process: LocalProcess | ReplicaProcess) -> None:
        async for line in process.lines():
            send(self._writer, "line", worker=number, text=line)
            with contextlib.suppress(OSError):
                await self._writer.drain()
