"""The processes of a worker whose model is sharded over them (`kfuse-run --ranks`): they begin and end together."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from kfuse.elastic.launchers.local import LocalLauncher, LocalProcess, how
from kfuse.elastic.protocol import ENV_LOG, ENV_REPLICA, OF_RANK

_HOST = "127.0.0.1"
_WAITING_LINES = 64


class ReplicaProcess:
    """One worker of several processes of this machine. Once one has failed all of them are killed."""

    running = True
    cause = ""  # how it ended, where that was not by its rank 0

    def __init__(self, ranks: Sequence[LocalProcess], port: socket.socket) -> None:
        """ranks: by rank. port: keeps the number of their store's port from other processes."""
        self._ranks, self._port = ranks, port
        self._status = asyncio.create_task(self._all_ended())

    async def _all_ended(self) -> int:
        status = 0

        async def watch(rank: int, process: LocalProcess) -> None:
            nonlocal status
            ended = await process.wait()
            if ended and not status:
                status = ended
                self.kill()
                self.cause = f"rank {rank} {process.cause or how(ended)}" if process.cause or rank else ""

        await asyncio.gather(*(watch(rank, process) for rank, process in enumerate(self._ranks)))
        self._port.close()
        return status

    async def lines(self) -> AsyncIterator[str]:
        printed: asyncio.Queue[str | None] = asyncio.Queue(_WAITING_LINES)

        async def read(label: str, process: LocalProcess) -> None:
            try:
                async for line in process.lines():
                    await printed.put(label + line)
            finally:
                await printed.put(None)

        labels = [OF_RANK.format(rank) if rank else "" for rank in range(len(self._ranks))]
        reading = [asyncio.create_task(read(*each)) for each in zip(labels, self._ranks, strict=True)]
        try:
            for _ in reading:
                while (line := await printed.get()) is not None:
                    yield line
        finally:
            for task in reading:
                task.cancel()

    async def wait(self) -> int:
        """0, or the exit status of the first one that failed."""
        return await asyncio.shield(self._status)

    def kill(self) -> None:
        for process in self._ranks:
            process.kill()

    def send_signal(self, number: int) -> None:
        """Sends it to rank 0, which speaks for all."""
        self._ranks[0].send_signal(number)


class ReplicaLauncher:
    """Starts each worker as several processes of this machine, with the variables that torch's process group reads."""

    def __init__(self, local: LocalLauncher, ranks: int) -> None:
        """local: starts each of a worker's `ranks` processes."""
        self._local, self._ranks = local, ranks

    async def open(self) -> str:
        return await self._local.open()

    async def start(self, env: Mapping[str, str]) -> ReplicaProcess:
        """Starts one worker. Raises OSError; then none of its processes is left."""
        started = list[LocalProcess]()
        with contextlib.ExitStack() as here:
            pairs = [socket.socketpair() for _ in range(1, self._ranks)]  # of rank 0 and of each other one
            for end in chain.from_iterable(pairs):
                here.callback(end.close)
            port = socket.socket()
            # Bound, and not listened to: torch's store can bind it too, and nobody is given the number meanwhile.
            port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                port.bind((_HOST, 0))
                of_all = {"WORLD_SIZE": str(self._ranks), "LOCAL_WORLD_SIZE": str(self._ranks)}
                of_all |= {"MASTER_ADDR": _HOST, "MASTER_PORT": str(port.getsockname()[1])}
                for rank in range(self._ranks):
                    ends = [pairs[rank - 1][1].fileno()] if rank else [end.fileno() for end, _ in pairs]
                    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), ENV_REPLICA: ",".join(map(str, ends))}
                    if rank and ENV_LOG in env:
                        log = Path(env[ENV_LOG])
                        own[ENV_LOG] = str(log.with_stem(f"{log.stem}-rank-{rank}"))
                    started.append(await self._local.start({**env, **of_all, **own}, ends))
            except BaseException:
                port.close()
                for process in started:
                    await process.end()
                raise
        return ReplicaProcess(started, port)

    async def close(self) -> None:
        """Does nothing: the processes have ended."""
