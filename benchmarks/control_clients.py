"""Workers for control_plane.py: what a supervisor's workers say and hear, without training. Many in one process.

Started by control_plane.py. It reads orders, a line of JSON each, and writes the number and exit status of each worker
that has ended. A worker connects twice, says what `kfuse.elastic.client` and `kfuse.membership` say, and joins each
view as it comes. The leader reports a step each `STEP_S`.
"""

from __future__ import annotations

import asyncio
import functools
import random
import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from kfuse.elastic import protocol

STEP_S = 0.1
WORKERS_A_HOST = 8
_ALIVE = protocol.encode({"type": "alive"})
_NOTICED = 8  # times that losses, one after the other, are noticed by the others
_LIMIT = 2**20  # bytes of a line of orders
_METRICS = {
    **dict.fromkeys(("loss", "lr", "noise_scale", "noise_scale_low", "noise_scale_high", "grad_variance"), 0.123456789),
    **dict.fromkeys(("grad_sq", "grad_norm", "step_time_s", "data_wait_s", "epoch"), 0.0123456789),
    **dict.fromkeys(("samples", "batch_size", "micro_batches", "workers"), 123456),
}


@dataclass(frozen=True)
class Seen:
    """A message from the supervisor, as far as it is used here; workers, leader: of a view."""

    kind: str
    generation: int = 0
    workers: frozenset[int] = frozenset()
    leader: int = -1


@functools.lru_cache(maxsize=8)
def seen(line: bytes) -> Seen:
    """Cached: workers on machines of their own each decode a view, those that share this process do it once."""
    message = orjson.loads(line)
    if message["type"] != "view":
        return Seen(message["type"])
    numbers = [member["worker"] for member in message["view"]["members"]]
    return Seen("view", message["view"]["generation"], frozenset(numbers), numbers[0])


class Connection(asyncio.Protocol):
    """One of a worker's two connections."""

    def __init__(self, heard: Callable[[Seen], None], lost: Callable[[], None]) -> None:
        self._heard, self._lost = heard, lost
        self._parts: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if b"\n" not in data:
            self._parts.append(data)
            return
        *lines, rest = b"".join([*self._parts, data]).split(b"\n")
        self._parts = [rest] if rest else []
        for line in lines:
            self._heard(seen(line))

    def connection_lost(self, error: Exception | None) -> None:
        self._lost()


class Worker:
    """A worker of the job, as the supervisor sees it."""

    def __init__(self, number: int, address: str, token: str, ended: Callable[[int, int], None]) -> None:
        """ended: called with its number and exit status."""
        self._number, self._address, self._ended = number, address.rpartition(":"), ended
        self._who = {"token": token, "worker": number, "pid": 10_000 + number}
        self._who["host"] = f"node-{number // WORKERS_A_HOST:04d}.cluster"
        self._connections: list[Connection] = []
        self._generation = self._broken = self._step = 0
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._leads = self._over = False

    async def run(self) -> None:
        """Connects, and is ready. Each connection sends its hello at once, as a worker process does."""
        host, _, port = self._address
        loop = asyncio.get_running_loop()
        for more in ({}, {"messages": True}):
            welcome = loop.create_future()

            def heard(message: Seen, welcome: asyncio.Future[Seen] = welcome) -> None:
                if welcome.done():
                    self._hear(message)
                else:
                    welcome.set_result(message)

            _, connection = await loop.create_connection(lambda: Connection(heard, self._lost), host, int(port))
            connection.transport.write(protocol.encode({"type": "hello", **self._who, **more}))
            self._connections.append(connection)
            await welcome
        self._timers["heartbeat"] = loop.call_later(random.random() * protocol.HEARTBEAT_S, self._beat)
        self.say("ready")

    def say(self, message: str, **fields: Any) -> None:
        """Sends a message over the second connection."""
        self._connections[1].transport.write(protocol.encode({"type": message, **fields}))

    def lose_contact(self) -> None:
        """It has noticed that another worker is lost, before the supervisor has said so."""
        if self._broken < self._generation:
            self._broken = self._generation
            self.say("broken", generation=self._generation, why="all-reduce: lost contact with rank 1: reset by peer")

    def end(self, status: int) -> None:
        if not self._over:
            self._over = True
            for timer in self._timers.values():
                timer.cancel()
            for connection in self._connections:
                connection.transport.close()
            self._ended(self._number, status)

    def _lost(self) -> None:
        self.end(70)

    def _hear(self, message: Seen) -> None:
        if message.kind == "view":
            self._generation = message.generation
            if self._number not in message.workers:
                self.say("left")
                self.end(0)
                return
            self.say("joined", generation=message.generation)
            if message.leader == self._number and not self._leads:
                self._leads = True
                start = {"step": 0, "restarts": False}
                self.say("record", kind="start", data=start)
                self._make_step()
        elif message.kind == "stop" and self._leads:
            self.say("record", kind="summary", data={})
        elif message.kind == "over":
            self.end(0)

    def _beat(self) -> None:
        self._connections[0].transport.write(_ALIVE)
        self._timers["heartbeat"] = asyncio.get_running_loop().call_later(protocol.HEARTBEAT_S, self._beat)

    def _make_step(self) -> None:
        self.say("record", kind="metrics", data={"step": self._step, **_METRICS})
        self._step += 1
        self._timers["step"] = asyncio.get_running_loop().call_later(STEP_S, self._make_step)


class Process:
    """This process: does what it is told until its input ends."""

    def __init__(self) -> None:
        self._workers: dict[int, Worker] = {}
        self._starting: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        reader = asyncio.StreamReader(_LIMIT)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            order = orjson.loads(line)
            match order["do"]:
                case "start":
                    number = order["worker"]
                    self._workers[number] = Worker(number, order["address"], order["token"], self._ended)
                    task = asyncio.create_task(self._workers[number].run())
                    self._starting.add(task)
                    task.add_done_callback(self._starting.discard)
                case "lose":
                    self._lose(order["workers"], order["over_s"])
                case "say":
                    if (worker := self._workers.get(order["worker"])) is not None:
                        worker.say(order["message"], **order["fields"])

    def _lose(self, numbers: Sequence[int], over_s: float) -> None:
        """These workers are killed within so many seconds, and the others of this process lose contact with them."""
        loop = asyncio.get_running_loop()
        for place, number in enumerate(numbers):
            if number in self._workers:
                loop.call_later(place / len(numbers) * over_s, self._workers[number].end, -9)
        for part in range(_NOTICED):
            loop.call_later((part + 1) / _NOTICED * over_s, self._lose_contact)

    def _lose_contact(self) -> None:
        for worker in self._workers.values():
            worker.lose_contact()

    def _ended(self, number: int, status: int) -> None:
        self._workers.pop(number, None)
        sys.stdout.write(f"{number} {status}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    asyncio.run(Process().run())
