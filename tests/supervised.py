"""A supervisor with workers that are stood in for: no process is started, and nothing waits in real time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from kfuse.elastic import protocol
from kfuse.elastic.job import Job, JobFailed
from kfuse.elastic.supervisor import Supervisor


class _Skipping(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Where nothing is ready, lets the loop's time pass instead of waiting."""

    passed = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            return super().select(None)
        ready = super().select(min(timeout, 0.001))  # threads and sockets have a moment of real time
        if not ready:
            self.passed += timeout
        return ready


class VirtualTime(asyncio.SelectorEventLoop):
    """An event loop whose time passes only while nothing is ready, and then at once."""

    def __init__(self) -> None:
        self._clock = _Skipping()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.passed


class StandIn:
    """A worker process and its end of both connections, as the supervisor sees them."""

    running = True

    def __init__(self) -> None:
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.printed: list[str] = []
        self.heard: list[dict[str, Any]] = []
        """What the supervisor has sent."""
        self.killed = False
        self.hangs = False  # does not end as it is killed

    async def lines(self) -> AsyncIterator[str]:
        await self.wait()
        for line in self.printed:
            yield line

    async def wait(self) -> int:
        return await asyncio.shield(self.status)

    def kill(self) -> None:
        self.killed = True
        if not self.hangs:
            self.end(-9)

    def end(self, status: int, *printed: str) -> None:
        self.printed += printed
        if not self.status.done():
            self.status.set_result(status)

    # -- a StreamWriter's part that the supervisor uses

    @property
    def transport(self) -> StandIn:
        return self

    def abort(self) -> None: ...

    def is_closing(self) -> bool:
        return False

    def write(self, line: bytes) -> None:
        self.heard.append(protocol.decode(line))

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.heard if message["type"] == kind]

    @property
    def view(self) -> list[int]:
        """The numbers of the newest view's workers."""
        return [member["worker"] for member in self.of_kind("view")[-1]["view"]["members"]]


class _AtOnce(list[Any]):
    """In place of the records that wait for a thread to pass them on, in real time."""

    def __init__(self, keep: Callable[[Sequence[tuple[str, dict[str, Any]]]], None]) -> None:
        self._keep = keep

    def append(self, record: tuple[str, dict[str, Any]]) -> None:
        self._keep([record])


class Stage:
    """One job: its supervisor, the stand-ins that it has started, and what was recorded."""

    def __init__(self, elasticity: dict[str, Any], starts_fail: bool, gpus: int) -> None:
        self.gpus = gpus
        self.given: list[str | None] = []
        """The GPU that each worker was given."""
        self.workers: list[StandIn] = []
        self.records: list[tuple[str, dict[str, Any]]] = []
        self.supervisor = Supervisor(self, {}, self, Job(**elasticity))
        self.supervisor.records._waiting = _AtOnce(self.keep)
        self.job: asyncio.Task[str | None]
        self.starts_fail, self.has_room = starts_fail, True

    # -- the launcher and the recorder

    async def open(self) -> str:
        return "127.0.0.1"

    async def start(self, env: Mapping[str, str]) -> StandIn:
        if self.starts_fail:
            raise OSError("no machine has room")
        self.given.append(env.get("LOCAL_RANK"))
        assert int(env[protocol.ENV_WORKER]) == len(self.workers)
        self.workers.append(StandIn())
        self.workers[-1].running = self.has_room
        return self.workers[-1]

    async def close(self) -> None: ...

    def keep(self, records: Sequence[tuple[str, dict[str, Any]]]) -> None:
        self.records += records

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [data for name, data in self.records if name == "event" and data["kind"] == kind]

    # -- what workers do

    async def settle(self, seconds: float = 0.2) -> None:
        """Lets this time pass."""
        await asyncio.sleep(seconds)

    async def ended(self) -> str | None:
        """The error that ends the job, once it has ended."""
        await asyncio.wait([self.job])
        error = self.job.exception()
        assert error is None or isinstance(error, JobFailed)
        return error and str(error)

    async def lose(self, *numbers: int) -> None:
        """These workers are killed at once."""
        for number in numbers:
            self.workers[number].end(-9)
        await self.settle()

    async def boot(self, *numbers: int) -> None:
        for number in numbers:
            known = self.supervisor.processes.workers[number]
            known.connections += [self.workers[number], self.workers[number]]  # type: ignore[list-item]
            known.pid, known.host = 1000 + number, "here"
            await self.says(number, "ready")

    async def join(self, *numbers: int) -> None:
        """Joins the newest view that each was told of."""
        for number in numbers:
            generation = self.workers[number].of_kind("view")[-1]["view"]["generation"]
            await self.says(number, "joined", generation=generation)

    async def says(self, number: int, message: str, **fields: Any) -> None:
        known = self.supervisor.processes.workers[number]
        known.last_message_at = asyncio.get_running_loop().time()
        await self.supervisor._receive(known, {"type": message, **fields})
        await asyncio.sleep(0.002)  # the supervisor handles what is asked for together

    async def lose_contact(self, number: int, generation: int) -> None:
        await self.says(number, "broken", generation=generation, why="a message was late")
        await self.settle()

    async def cut(self, *pairs: tuple[int, int]) -> None:
        """Whoever is asked now, and again, does not reach the other one of these pairs."""
        for number, worker in 2 * [*enumerate(self.workers)]:
            for asked in worker.of_kind("reach")[-1:] if not worker.killed else ():
                missing = [other for pair in pairs if number in pair for other in pair if other != number]
                await self.says(number, "reached", inquiry=asked["inquiry"], missing=missing)
        await self.settle()

    async def steps(self, number: int, *steps: int) -> None:
        for step in steps:
            await self.says(number, "record", kind="metrics", data={"step": step})

    async def train(self, *numbers: int) -> None:
        """Boots these workers, which then are in a view, and have made a first step."""
        await self.boot(*numbers)
        await self.join(*numbers)
        start = {"step": 0, "restarts": False}
        await self.says(numbers[0], "record", kind="start", data=start)
        await self.steps(numbers[0], 0)

    async def hand_over(self, old: int, new: int) -> None:
        """The only worker stays until the new one, which boots, has its state. The new one trains to the end."""
        await self.boot(new)
        assert self.workers[new].view == [old, new]
        await self.join(old, new)
        assert self.workers[new].view == [new]
        await self.says(old, "left")
        self.workers[old].end(0)
        await self.join(new)
        await self.end_well(new)

    async def end_well(self, *numbers: int) -> None:
        """The training's results arrive, and these workers end."""
        await self.says(numbers[0], "record", kind="summary", data={})
        for number in numbers:
            self.workers[number].end(0)


def play(
    elasticity: dict[str, Any], script: Callable[[Stage], Awaitable[None]], starts_fail: bool = False, gpus: int = 0
) -> tuple[Stage, str | None]:
    """Runs a job in which `script` acts for the workers: (what was seen, the error that ended it)."""

    async def go() -> tuple[Stage, str | None]:
        stage = Stage(elasticity, starts_fail, gpus)
        stage.job = asyncio.create_task(stage.supervisor.run())
        await stage.settle()
        acting = asyncio.ensure_future(script(stage))
        await asyncio.wait([stage.job, acting], return_when=asyncio.FIRST_COMPLETED)
        if acting.done():
            acting.result()
        error = await stage.ended()
        await acting
        return stage, error

    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        return runner.run(go())
