"""Accepts connections and authenticates them by the job's token: the supervisor's workers, and other hosts' agents."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import resource
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from kfuse.elastic import protocol

HELLO_TIMEOUT_S = 10.0
MAX_HELLO = 4096  # bytes
MAX_FILES = 2**16  # some programs go through all that are allowed
MAX_UNKNOWN = 512  # asyncio accepts 100 at a time: a worker's hello is read well before its connection is the oldest

Serve = Callable[[dict[str, Any], asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Server:
    """Listens on one address. Connections that have not authenticated are bounded in number, time and bytes."""

    def __init__(self, token: str, serve: Serve) -> None:
        """serve: runs for each authenticated connection, with its hello; the connection ends when it returns.

        It may raise ValueError, KeyError or TypeError for a message that makes no sense, and OSError.
        """
        self._token, self._serve = token, serve
        self._unknown: dict[asyncio.StreamWriter, None] = {}  # in order of arrival
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def open(self, host: str, port: int = 0) -> int:
        """Listens from now on; returns the port. Raises OSError."""
        allow_files()
        self._server = await asyncio.start_server(self._accept, host, port, limit=protocol.MAX_LINE)
        for each in self._server.sockets:
            with each.dup() as listener:  # asyncio accepts as many at a time as may wait: here more may wait
                listener.listen(socket.SOMAXCONN)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        self._server.close()
        for writer in self._connections.values():
            writer.transport.abort()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _authenticate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> dict[str, Any]:
        """The hello message of a connection that knows the token. If too many wait, the oldest connection is ended.

        Raises ValueError for any other message, TimeoutError after `HELLO_TIMEOUT_S`, OSError if the connection ends.
        """
        while len(self._unknown) >= MAX_UNKNOWN:
            oldest = next(iter(self._unknown))
            del self._unknown[oldest]
            oldest.transport.abort()
        self._unknown[writer] = None
        try:
            hello = protocol.decode(await asyncio.wait_for(_first_line(reader), HELLO_TIMEOUT_S))
        finally:
            self._unknown.pop(writer, None)
        known = hmac.compare_digest(str(hello.get("token", "")).encode(), self._token.encode())
        if hello["type"] != "hello" or not known:
            raise ValueError("not authenticated")
        return hello

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        try:
            await self._serve(await self._authenticate(reader, writer), reader, writer)
        except (OSError, ValueError, KeyError, TypeError):
            pass  # not authenticated, or the other side was lost: the end of its process is handled elsewhere
        finally:
            del self._connections[task]
            writer.close()


def allow_files() -> None:
    """Raises the soft limit of this process's open files, often 1024, towards the hard one; new processes inherit it.

    A worker takes about five of them here: two connections, one to its view's store, its output, and its process.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


async def _first_line(reader: asyncio.StreamReader) -> bytes:
    """The first line of a connection, whose sender then waits for the answer. Raises ValueError: too long, no end."""
    line = b""
    while not line.endswith(b"\n"):
        more = await reader.read(MAX_HELLO)
        line += more
        if not more or len(line) > MAX_HELLO:
            raise ValueError("no hello")
    return line
