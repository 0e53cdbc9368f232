"""Connections without the token, at any port of a running job, neither join nor change a bit of the result."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import socket
import struct
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from elastic_job import Job, assert_same_training, chaos, run_job, words

from kfuse.elastic import protocol, server
from kfuse.elastic.supervisor import Supervisor

pytestmark = pytest.mark.full

TRAINING = words(
    "comm=reproducible comm.bucket_mb=0.002 lr.base=0.003 workers.max=3 model=mlp data=digits model.hidden=[24]",
    "batch.size=16 batch.micro=4 batch.max=64 train.epochs=2 train.heldout_every=20",
)
TOKEN = "0123456789abcdef"
CROWD = 300


def served(visit: Callable[[int], Awaitable[None]]) -> list[int]:
    """The workers that were authenticated by a server while `visit` ran, which is given its port."""
    workers: list[int] = []

    async def serve(hello: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        workers.append(hello["worker"])

    async def go() -> None:
        listening = server.Server(TOKEN, serve)
        await asyncio.wait_for(visit(await listening.open("127.0.0.1")), 60)
        await listening.close()

    asyncio.run(go())
    return workers


def hello(token: str = TOKEN, worker: Any = 7) -> bytes:
    return protocol.encode({"type": "hello", "token": token, "worker": worker, "pid": 1, "host": "h"})


async def say(port: int, *pieces: bytes) -> None:
    """Sends the pieces and waits for the end of the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(ConnectionError):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        assert await reader.read() == b""
    writer.close()


@pytest.mark.parametrize(
    ("pieces", "known"),
    [
        ((hello()[:10], hello()[10:]), True),
        ((hello("\u00e9"),), False),
        ((hello("0" * 16),), False),
        ((b"x" * 2**20,) * 40, False),
        ((b"[" * 4000 + b"\n",), False),
        ((b'{"type": "hello"}\n',), False),
        ((b'{"type": "record", "kind": "summary", "data": {}}\n',), False),
    ],
)
def test_one_short_line_with_the_token_authenticates(pieces: tuple[bytes, ...], known: bool) -> None:
    assert served(lambda port: say(port, *pieces)) == [7] * known


def test_silence_does_not_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HELLO_TIMEOUT_S", 0.05)
    assert served(lambda port: say(port, b"")) == []


def test_the_oldest_stranger_goes_first() -> None:
    """As many connections as are kept; then a worker comes, and another stranger as it speaks."""

    async def visit(port: int) -> None:
        crowd = [await asyncio.open_connection("127.0.0.1", port) for _ in range(server.MAX_UNKNOWN)]
        await say(port, hello())
        assert await crowd[0][0].read() == b"", "the oldest was ended"
        assert not crowd[1][0].at_eof() and not crowd[-1][0].at_eof()
        for _, writer in crowd:
            writer.close()

    assert served(visit) == [7]


def test_more_workers_may_wait_to_be_accepted_than_asyncio_lets() -> None:
    """They come while the supervisor does something else. The next one's connection would time out."""

    async def visit(port: int) -> None:
        crowd = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(120)]
        await say(port, hello())
        for each in crowd:
            each.close()

    assert served(visit) == [7]


def test_as_many_files_are_allowed_as_many_workers_need() -> None:
    async def nothing(port: int) -> None: ...

    _, hard = before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = server.MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, server.MAX_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most - 1, hard))
    try:
        served(nothing)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def listeners(pids: Iterable[int]) -> Iterator[tuple[str, int]]:
    """(address, port) of every TCP socket on which one of these processes listens. Linux."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    inodes.add(os.readlink(entry))
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                address, port = fields[1].split(":")
                words_ = [struct.pack("=I", int(address[at : at + 8], 16)) for at in range(0, len(address), 8)]
                yield socket.inet_ntop(family, b"".join(words_)), int(port, 16)


GARBAGE = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\0" * 5000,
    random.Random(0).randbytes(50_000),
    *(struct.pack("<Q", number) for number in range(16)),  # gloo's sequence numbers, and its pairs' first words
    struct.pack("<BI", 0, 0x3C85F7CE) + b"\x01" + struct.pack("<Q", 2**62),  # the store's magic, then an endless key
    struct.pack("<BI", 0, 0x3C85F7CE) + b"\xff" * 100,
]


async def crowd_at(port: int) -> list[asyncio.StreamWriter]:
    """Many who say nothing, many who say garbage and stay, and as many who are gone at once."""
    writers = []
    for index in range(CROWD):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        if index % 3 == 0:
            writer.transport.abort()
            continue
        if index % 3 == 1:
            writer.write(GARBAGE[index // 3 % len(GARBAGE)])
        writers.append(writer)
    return writers


def test_strangers_change_nothing(tmp_path: Path) -> None:
    """A crowd at each port of each process, as soon as it listens: while training, and while a new group connects.

    And at the control channel hellos that are wrong, also with the token: each is refused.
    """
    alone = run_job(tmp_path / "alone", [*TRAINING, *chaos(tmp_path / "none")])
    met: dict[tuple[str, int], str] = {}
    before = set(listeners([os.getpid()]))  # what another test of this process has left open is no port of this job

    async def strangers(supervisor: Supervisor, job: Job) -> None:
        crowd = []
        while not supervisor.address:
            await asyncio.sleep(0.002)
        for worker in ([0], {}, "x", -1, None):
            await say(int(supervisor.address.rpartition(":")[2]), hello(supervisor.token, worker))
        (tmp_path / "refused").touch()
        while True:
            workers = [worker.pid for worker in supervisor.processes.workers.values() if worker.pid]
            found = dict.fromkeys(listeners([os.getpid()]), "supervisor") | dict.fromkeys(listeners(workers), "worker")
            for (address, port), whose in found.items():
                if (address, port) not in met and (address, port) not in before:
                    met[address, port] = whose
                    with contextlib.suppress(ConnectionError):  # it listens no more
                        crowd += await crowd_at(port)
            if job.metrics:
                (tmp_path / "met").touch()
            await asyncio.sleep(0.002)

    grows = {"phases": [{"step": 5, "workers": 3}], "gates": [{"step": 62, "workers": 3}]}
    policy = chaos(tmp_path, until=str(tmp_path / "met"), **grows)
    job = run_job(tmp_path / "run", [*TRAINING, *policy, "workers.count=2"], during=strangers)
    assert_same_training(job, alone)
    assert (tmp_path / "refused").exists() and not job.of_kind("failure")
    assert len(job.views[-1]["workers"]) == 3, job.told()
    # The control channel and a view's store at least: on a busy machine the first view's may be gone before it is seen.
    assert list(met.values()).count("supervisor") >= 2 and list(met.values()).count("worker") >= 4, met
    assert {address for address, _ in met} == {"127.0.0.1"}
