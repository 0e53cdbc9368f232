"""The worker's side: the control channel, against a supervisor that reads nothing for a while, and views."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any
from unittest.mock import Mock, call

import pytest

from kfuse.comm.group import CommError, Group
from kfuse.comm.settings import CommOptions
from kfuse.elastic import client as client_module
from kfuse.elastic import protocol
from kfuse.elastic.client import ControlClient
from kfuse.elastic.protocol import ControlError, Member, View
from kfuse.elastic.rendezvous import form_group
from kfuse.membership import Session

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
            told = {"silence_s": SILENCE_S, "catch_up_s": 1.0, "notice_signals": [], "workers_bounds": [1, 2]}
            lines.write(protocol.encode({"type": "welcome", "job": {}, **told}))
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
        client.check()


def test_a_worker_that_writes_a_last_checkpoint_is_not_ended(stopped: Stopped, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(client_module, "_SUPERVISOR_LOST_GRACE_S", 0.2)
    monkeypatch.setattr(client_module.os, "_exit", lambda status: ended.set())
    client = ControlClient()
    with client.saving():
        stopped.end()
        assert not ended.wait(1.0)
    assert ended.wait(60.0), "else it would stay behind"
    client.close()


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


def test_metrics_are_sent_in_batches_in_order(stopped: Stopped) -> None:
    client = ControlClient()
    calls = client._messages = Mock(wraps=client._messages)
    began = time.monotonic()
    for step in range(640):
        client.send("record", kind="metrics", data={"step": step, "loss": 0.5})
    client.send("record", kind="event", data={"step": 639, "kind": "view"})
    assert not client._unsent, "an event waits for nothing, and nothing stays behind it"
    full, by_time = 640 // protocol.METRICS_AT_ONCE, (time.monotonic() - began) / protocol.METRICS_S
    assert calls.sendmsg.call_count <= full + by_time + 2
    *found, event, _ = closed(client, stopped)
    assert [message["data"]["step"] for message in found] == list(range(640)) and event["kind"] == "event"
    assert found[7]["data"] == {"step": 7, "loss": 0.5}


KILLED = """
import os, signal, sys, time
from kfuse.elastic.client import ControlClient

client = ControlClient()
for step in range(40):
    client.send("record", kind="metrics", data={"step": step})
    time.sleep(0.02)
if sys.argv[1] != "metrics":
    client.send("record", kind="metrics", data={"step": 40})
    client.send("record", kind=sys.argv[1], data={"step": 40})
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("last", ["metrics", "ledger", "event"])
def test_a_killed_worker_loses_the_last_moments_metrics_and_nothing_else(last: str, stopped: Stopped) -> None:
    """Without a limit in time fewer than `METRICS_AT_ONCE` steps would all be lost."""
    ended = subprocess.run([sys.executable, "-c", KILLED, last], timeout=60)
    assert ended.returncode == -signal.SIGKILL
    found = [*stopped.messages()]
    steps = [message["data"]["step"] for message in found if message["kind"] == "metrics"]
    if last == "metrics":
        assert steps == list(range(len(steps))) and len(steps) >= 20
    else:
        assert steps == list(range(41)) and found[-1] == {"type": "record", "kind": last, "data": {"step": 40}}


# -- views ----------------------------------------------------------------------------------------------------------


class Optimizer(Mock):
    def hand_over(self, leavers: Any) -> None:
        self.group.hand_over(leavers)

    def set_group(self, group: Any) -> None: ...


@pytest.mark.parametrize("recovers", [False, True])
@pytest.mark.parametrize("stays", [True, False])
def test_only_before_a_planned_view_the_group_has_messages(recovers: bool, stays: bool) -> None:
    """A view that recovers may come in place of the planned one: a worker of the group is lost."""
    client, group = Mock(worker=1), Mock(device=Group().device, timeout_s=1.0)
    client.await_view.return_value = View(3, (Member(2 - stays, 1, "here"),), ("127.0.0.1", 1), "shrink", recovers)
    session = Session(group, CommOptions(), client)
    session.view = View(1, (Member(0, 1, "here"), Member(1, 1, "here")), ("127.0.0.1", 1), "start")
    optimizer = Optimizer(group=group)
    session.follow(optimizer.hand_over, optimizer.set_group)
    assert session.switch(2) == stays and session.left == (not stays)
    told = [each for each in group.mock_calls if each != call.retire()]
    assert told == ([call.abort()] if recovers else [call.hand_over([0] if stays else [0, 1]), call.finish()])
    assert [each.args for each in client.send.mock_calls] == [("joined",) if stays else ("left",)]


def test_a_store_that_does_not_answer_keeps_nobody_from_the_next_view() -> None:
    """It is closed as another view is formed. Its port takes connections, and torch waits a second for its answer."""
    looks, began = Mock(side_effect=[None] * 5 + [CommError("another view")]), time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        view = View(2, (Member(0, 1, "here"),) * 2, silent.getsockname(), "failure", recovers=True)
        with pytest.raises(CommError, match="another view"):
            form_group(view, 0, Group(timeout_s=30.0), looks, new=False)
    assert time.monotonic() - began < 3


def test_a_second_training_is_refused_where_workers_may_join() -> None:
    session = Session(Group(), CommOptions(), Mock())
    session.begin_training()
    session.end_training(None)
    with pytest.raises(RuntimeError, match=r"under kfuse-run a script trains once"):
        session.begin_training()
