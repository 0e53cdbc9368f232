"""The messages between the supervisor and its workers: one JSON object a line, over TCP (the control channel).

A worker has two connections. The first one has the heartbeats and what the supervisor sends; the second one, whose
hello has `messages`, has all else that the worker sends. So records of a supervisor that reads nothing for a while may
fill their connection: that of the heartbeats would be ended then by `set_acknowledgement_timeout`, which also counts
what the other side's full buffers keep here. The types of messages: `Supervisor._receive` for those to the supervisor,
`ControlClient._receive` for those to workers.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import orjson

MAX_LINE = 16 * 2**20  # bytes; a longer line is not one of these messages

STOP_STATUS = {"interrupted": 130, "terminated": 143}  # exit status of a command that was asked to stop
# How a job ends where all workers' scripts end with status 0 before a training does.
NOT_TRAINED = "not_trained"  # without kf.fit and kf.DataLoader
LOOP_LEFT = "loop_left"  # out of the loop over a kf.DataLoader

OF_STEPS = ("metrics", "ledger")  # kinds of records of which each step has some
METRICS_S = 0.1  # at most, until a worker sends a step's metrics: a worker that is killed loses no more of them
METRICS_AT_ONCE = 64  # lines that wait in a worker, at which it does not wait longer

HEARTBEAT_S = 0.5  # between two heartbeats
OF_RANK = "rank {}: "  # begins a line that a worker's process other than its rank 0 has printed

ENV_CONTROL = "KFUSE_CONTROL"  # host:port of the supervisor
ENV_TOKEN = "KFUSE_TOKEN"  # the job's secret
ENV_WORKER = "KFUSE_WORKER"  # this worker's number, never reused
ENV_REPLICA = "KFUSE_REPLICA"  # of a worker of several processes: file descriptors, to its rank 0 or of all others
ENV_LOG = "KFUSE_LOG"  # the file to which what it prints is added, on its own host; not set: none


class ControlError(RuntimeError):
    """The supervisor is lost: it cannot be reached, has refused this worker, or has ended."""


@dataclass(frozen=True)
class Member:
    """A worker in a view. Its rank is its place in the view's list."""

    worker: int
    pid: int
    host: str


@dataclass(frozen=True)
class View:
    """A view: the ordered list of workers that train together, and the store over which they connect.

    Generations count views from 1. A worker's rank is its place in `members`; rank 0 is the leader.
    """

    generation: int
    members: tuple[Member, ...]
    store: tuple[str, int]  # host and port; of one worker port 0, as it needs none
    reason: str  # start, restart, grow, shrink, notice, replace, failure, quit or stop
    recovers: bool = False  # a worker was lost: leave the old view at once; else the leader announces when
    prefix: str = ""  # of this process's keys in the store: of several in each worker, equal ranks meet under one

    @property
    def size(self) -> int:
        return len(self.members)

    @cached_property
    def workers(self) -> list[int]:
        """The workers' numbers, in rank order."""
        return [member.worker for member in self.members]

    @cached_property
    def _ranks(self) -> dict[int, int]:
        return {number: rank for rank, number in enumerate(self.workers)}

    def rank_of(self, worker: int) -> int | None:
        """The rank of worker number `worker`; None if it is not in this view."""
        return self._ranks.get(worker)

    @staticmethod
    def from_json(data: dict[str, Any]) -> View:
        """The view that `dataclasses.asdict` gave as plain values."""
        members = tuple(Member(**member) for member in data["members"])
        return View(**{**data, "members": members, "store": tuple(data["store"])})


class DroppedRecords:
    """Counts dropped records, for an event that says of which steps they were."""

    def __init__(self, why: str) -> None:
        self._why = why
        self._lost: tuple[int, int, int] | None = None  # first and last step, number of records

    def add(self, step: int) -> None:
        first, last, lines = self._lost or (step, step, 0)
        self._lost = min(first, step), max(last, step), lines + 1

    def take(self) -> dict[str, Any] | None:
        """The event about what was dropped since the last call; None where nothing was."""
        if self._lost is None:
            return None
        (first, last, lines), self._lost = self._lost, None
        return {"step": last, "kind": "records_lost", "steps": [first, last], "lines": lines, "why": self._why}


def encode(message: Mapping[str, Any]) -> bytes:
    """A message, or a step's record, as a line of JSON. A number that is not finite becomes null."""
    options = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    return orjson.dumps(message, option=options)


def send(writer: asyncio.StreamWriter, kind: str, **fields: Any) -> None:
    """Writes a message, unless the connection is closing."""
    send_to_all([writer], kind, **fields)


def send_to_all(writers: Iterable[asyncio.StreamWriter], kind: str, **fields: Any) -> None:
    """Writes the same message to each, unless it is closing. A view of many workers is large: it is encoded once."""
    line = encode({"type": kind, **fields})
    for writer in writers:
        if not writer.is_closing():
            writer.write(line)


def place(host: str, port: int) -> str:
    """HOST:PORT, as messages name it and --listen takes it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def set_acknowledgement_timeout(connection: socket.socket, silence_s: float) -> None:
    """Ends the connection if what we send (at least heartbeats) is not acknowledged for `silence_s`.

    Without it, TCP would notice a host that is cut off only after a quarter of an hour.
    """
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * silence_s))


def decode(line: bytes) -> dict[str, Any]:
    """A message. Raises ValueError if it is not one JSON object with a "type"."""
    message = orjson.loads(line)
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ValueError("not a control message")
    return message
