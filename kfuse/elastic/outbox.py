"""A worker's messages to the supervisor: sent at once where the connection takes them, else they wait in memory."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

from kfuse.elastic import protocol

_MOST_WAITING = 100_000  # messages; what cannot be dropped waits beyond it


class Outbox:
    """Sends lines over a connection, in order. Thread-safe; a call never waits for the other side.

    While a stopped supervisor reads nothing, its connection takes no more: then lines wait here, and a thread sends
    them. Where too many wait, records of steps are dropped, and an event says of which steps.
    """

    def __init__(self, connection: socket.socket, most: int = _MOST_WAITING) -> None:
        """connection: blocking. most: how many lines may wait before records of steps are dropped."""
        self._connection, self._most = connection, most
        self._lines: deque[bytes] = deque()
        self._losses = protocol.Losses("the supervisor took no records, and too many waited in a worker")
        self._changed = threading.Condition()
        self._closed = False
        self._error: OSError | None = None
        threading.Thread(target=self._send_waiting, name="kfuse-outbox", daemon=True).start()

    def send(self, message: Mapping[str, Any], step: int | None = None) -> None:
        """Sends a message. step: of a record that may be dropped; None: it must not be.

        Raises OSError if the connection is lost.
        """
        line = protocol.encode(message)
        with self._changed:
            if self._error is not None:
                raise self._error
            if step is not None and len(self._lines) >= self._most:
                self._losses.add(step)
                return
            self._report_losses()
            if not self._lines:
                line = line[self._send_at_once(line) :]
            if line:
                self._lines.append(line)
                self._changed.notify_all()

    def give_up(self, error: OSError) -> None:
        """The connection is lost: nothing is sent any more, and nothing waits for it."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the connection when everything has been sent, or it is lost."""
        with self._changed:
            self._report_losses()
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._lines or self._error)
        self._connection.close()

    def _report_losses(self) -> None:
        if (event := self._losses.take()) is not None:
            self._lines.append(protocol.encode({"type": "record", "kind": "event", "data": event}))

    def _send_at_once(self, line: bytes) -> int:
        """Sends what the connection takes without waiting; returns how many bytes. A lost worker loses none of them."""
        try:
            return self._connection.send(line, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._error = error
            raise

    def _send_waiting(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._closed or self._error)
                if not self._lines or self._error:
                    return
                line = self._lines[0]  # it stays until it is sent, so that no other one overtakes it
            try:
                self._connection.sendall(line)
            except OSError as error:
                return self.give_up(error)
            with self._changed:
                self._lines.popleft()
                self._changed.notify_all()
