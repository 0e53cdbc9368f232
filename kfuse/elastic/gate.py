"""Authenticates connections to the supervisor by the job's token."""

from __future__ import annotations

import asyncio
import hmac
from typing import Any

from kfuse.elastic import protocol

HELLO_TIMEOUT_S = 10.0
MAX_HELLO = 4096  # bytes
MAX_STRANGERS = 512  # asyncio accepts 100 at a time: a worker's hello is read well before its turn to go comes


class Gate:
    """Strangers are bounded in number, in time and in what they may say."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._strangers: dict[asyncio.StreamWriter, None] = {}  # in order of arrival

    async def hello(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> dict[str, Any]:
        """The hello of who knows the token. Where there are too many strangers, the oldest has to go.

        Raises ValueError for anything else, TimeoutError after `HELLO_TIMEOUT_S`, OSError where the connection ends.
        """
        while len(self._strangers) >= MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()
        self._strangers[writer] = None
        try:
            hello = protocol.decode(await asyncio.wait_for(_first_line(reader), HELLO_TIMEOUT_S))
        finally:
            self._strangers.pop(writer, None)
        known = hmac.compare_digest(str(hello.get("token", "")).encode(), self._token.encode())
        if hello["type"] != "hello" or not known:
            raise ValueError("not authenticated")
        return hello


async def _first_line(reader: asyncio.StreamReader) -> bytes:
    """A worker says one line and then waits for the answer. Raises ValueError where it gets too long."""
    line = b""
    while not line.endswith(b"\n"):
        more = await reader.read(MAX_HELLO)
        line += more
        if not more or len(line) > MAX_HELLO:
            raise ValueError("no hello")
    return line
