"""The worker's side of the control channel, against a supervisor that reads nothing for a while."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from kfuse.elastic import client as client_module
from kfuse.elastic import protocol
from kfuse.elastic.client import ControlClient
from kfuse.elastic.protocol import ControlError

SILENCE_S = 0.5
RECORDS = 300
PADDING = "x" * 100_000  # together more than two sockets' buffers hold


class Stopped:
    """A supervisor that has greeted a worker, and reads only when it is told to."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.connections: list[Any] = []
        threading.Thread(target=self._greet, daemon=True).start()

    def _greet(self) -> None:
        for _ in range(2):
            connection, _ = self.listener.accept()
            lines = connection.makefile("rwb")
            json.loads(lines.readline())
            lines.write(protocol.encode({"type": "welcome", "job": {}, "silence_s": SILENCE_S}))
            lines.flush()
            self.connections.append((connection, lines))

    def messages(self) -> Iterator[dict[str, Any]]:
        return map(protocol.decode, self.connections[1][1])

    def end(self) -> None:
        while self.connections:
            connection, lines = self.connections.pop()
            with contextlib.suppress(OSError):  # the worker has closed it
                connection.shutdown(socket.SHUT_RDWR)
            lines.close()
            connection.close()
        self.listener.close()


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stopped]:
    supervisor = Stopped()
    port = supervisor.listener.getsockname()[1]
    monkeypatch.setenv(protocol.ENV_CONTROL, f"127.0.0.1:{port}")
    monkeypatch.setenv(protocol.ENV_TOKEN, "secret")
    monkeypatch.setenv(protocol.ENV_WORKER, "3")
    yield supervisor
    supervisor.end()


def report(client: ControlClient, steps: Iterable[int]) -> None:
    for step in steps:
        client.send("record", kind="metrics", data={"step": step, "padding": PADDING})


def closed(client: ControlClient, stopped: Stopped) -> list[dict[str, Any]]:
    """What the supervisor gets, which reads again while the worker ends."""
    closing = threading.Thread(target=client.close)
    closing.start()
    found = [*stopped.messages()]
    closing.join()
    return found


def test_a_supervisor_that_is_stopped_costs_neither_a_worker_nor_a_record(stopped: Stopped) -> None:
    """Sending does not wait for it, and its silence for longer than the acknowledgements' limit is not its end."""
    client = ControlClient()
    client.send("ready")
    report(client, range(RECORDS))
    time.sleep(3 * SILENCE_S)
    client.check()
    found = closed(client, stopped)
    assert [message["type"] for message in found] == ["ready", *["record"] * RECORDS, "goodbye"]
    assert [message["data"]["step"] for message in found[1:-1]] == list(range(RECORDS))


def test_closing_does_not_wait_for_a_supervisor_that_is_gone(stopped: Stopped) -> None:
    client = ControlClient()
    report(client, range(RECORDS))
    stopped.end()
    client.close()
    with pytest.raises(ControlError):
        client.send("ready")


def test_of_records_that_are_too_many_to_wait_it_is_said_which_are_lost(
    stopped: Stopped, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_MOST_WAITING", 10)
    client = ControlClient()
    sent = 0
    while len(client._unsent) < 10:
        report(client, [sent])
        sent += 1
    for step in (sent, sent + 1):
        client.send("record", kind="ledger", data={"step": step})
    client.send("joined")
    found = closed(client, stopped)
    assert [message["data"]["step"] for message in found[:sent]] == list(range(sent))
    lost = found[sent]["data"]
    assert (lost["kind"], lost["steps"], lost["lines"]) == ("records_lost", [sent, sent + 1], 2)
    assert [message["type"] for message in found[sent + 1 :]] == ["joined", "goodbye"], "these are never lost"
