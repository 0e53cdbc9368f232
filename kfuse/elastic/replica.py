"""A worker of several processes, its ranks, over which one model is sharded: it trains and ends as one.

To the supervisor it is one worker, for which rank 0 speaks. The ranks are torch's default process group. Each has a
group of its own with the processes of the same rank in the other workers: the shards of one index. Three rules keep the
ranks together: they take a step, a view or a state by a vote, or none of them does; rank 0 says which view; and what
the supervisor sends interrupts no wait but that for other workers: in torch's own messages the ranks wait for each
other.

(torchft's replica groups have this shape. They skip the samples of a step that fails; here the step is made again.)
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, BinaryIO, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from kfuse.comm.group import CommError
from kfuse.elastic import protocol
from kfuse.elastic.client import ControlClient
from kfuse.elastic.protocol import ControlError, View

T = TypeVar("T")

_SILENT_S = 0.5  # without a heartbeat of another rank, after which rank 0 sends the supervisor none
_NEWS_S, _POLL_S = 0.2, 0.01  # after an error, until the end of another rank is known
_ENDED_S = 5.0  # until then the launcher has ended this process, as another rank has ended
_KEPT_VIEWS = 16  # the newest
_PASSED_ON = ("fatal", "loop_ended", "notice")  # what a rank but rank 0 has to say to the supervisor


class Replica:
    """This process's place among the ranks of its worker."""

    def __init__(self, timeout_s: float) -> None:
        """Connects, on every rank at the same point. Raises RuntimeError where torch's process group is another one,
        ControlError.
        """
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if not dist.is_initialized() or dist.get_world_size() != self.size:
            raise RuntimeError(
                f"kfuse-run --ranks {self.size}: call torch.distributed.init_process_group(), or init_device_mesh for "
                f"all {self.size} ranks, before kf.init and before the first optimizer of kfuse is made"
            )
        self.link: RankLink = (FollowerLink if self.rank else LeaderLink)(timeout_s)
        self._group = dist.new_group(backend="gloo")  # a rank may be late by what its script does alone between steps

    def gather(self, mine: Tensor, what: str) -> Tensor:
        """Returns every rank's tensor, [size, *shape of mine], on the CPU. Raises RuntimeError where one is gone."""
        every = [torch.empty_like(mine) for _ in range(self.size)]
        try:
            dist.all_gather(every, mine, group=self._group)
        except RuntimeError as error:
            raise RuntimeError(f"{what}: another rank of this worker is gone, or does not answer: {error}") from error
        return torch.stack(every)

    def every(self, mine: Sequence[float], what: str) -> list[list[float]]:
        """Returns every rank's numbers."""
        found: list[list[float]] = self.gather(torch.tensor(mine, dtype=torch.float64), what).tolist()
        return found

    def meet(self, what: str) -> None:
        """Waits until all ranks are about to do the same. Raises RuntimeError where one does something else: torch's
        messages in which the ranks were at different points would bring each other's numbers.
        """
        word = float(zlib.crc32(what.encode()))
        if any(other != [word] for other in self.every([word], what)):
            raise RuntimeError(f"{what}: another rank of this worker does something else: all must call it")

    def together(self, act: Callable[[], T], what: str) -> T:
        """Returns what `act` returns, if it succeeds on all ranks. Else each of them raises CommError.

        Or ControlError where the supervisor is lost.
        """
        error: CommError | ControlError | None = None
        try:
            result = act()
        except (CommError, ControlError) as raised:
            error = raised
        if any(failed for (failed,) in self.every([error is not None], what)):
            raise error or CommError(f"{what} failed on another rank of this worker")
        return result

    def commit(
        self, reduce: Callable[[], Tensor], length: int, summed: Sequence[int], averaged: Sequence[int]
    ) -> Tensor:
        """Reduces a step on each rank, and takes it on all ranks or on none. Returns the record of the whole worker.

        reduce: returns this rank's record, float64 [length]. Slots that are `summed` become the sum over the ranks,
        those that are `averaged` the mean, all others are rank 0's. The one message of a step beside torch's own.
        Raises CommError on all ranks if it, or ControlError, was raised on one.
        """
        error: CommError | ControlError | None = None
        mine = torch.ones(length + 1, dtype=torch.float64)
        try:
            self.link.check()
            mine[1:], mine[0] = reduce(), 0.0
        except (CommError, ControlError) as raised:
            error = raised
        every = self.gather(mine, "a step's record")
        if every[:, 0].any():
            raise error or CommError("the step is not complete on another rank of this worker")
        record = every[0, 1:].clone()
        for slots, of in ((summed, 1), (averaged, self.size)):
            for slot in slots:  # in the order of the ranks: the same bits on all
                record[slot] = sum(every[:, 1 + slot].tolist()) / of
        return record

    def await_end(self) -> None:
        """After an error: if another rank has ended, whose end may be the reason, waits until this one is ended too."""
        until = time.monotonic() + _NEWS_S
        while time.monotonic() < until:
            if self.link.has_lost_rank():
                time.sleep(_ENDED_S)
            time.sleep(_POLL_S)

    def agreed(self, view: View) -> View:
        """Returns rank 0's view. view: the newest one that this rank knows."""
        generation = int(self.every([view.generation], "which view is next")[0][0])
        return view if generation == view.generation else self.link.view_of(generation)


class RankLink(ControlClient):
    """The link of one rank: rank 0's leads to the supervisor, the others' to rank 0."""

    def __init__(self, timeout_s: float) -> None:
        self._views: dict[int, View] = {}
        ends = map(int, os.environ[protocol.ENV_REPLICA].split(","))
        self._ranks = [socket.socket(fileno=end) for end in ends]
        for rank in self._ranks:
            rank.set_inheritable(False)
        super().__init__(timeout_s)

    def has_lost_rank(self) -> bool:
        """Whether a rank that this one is connected with has ended: then the launcher ends this one too."""
        ends = select.poll()
        for rank in self._ranks:
            ends.register(rank, 0)  # an end is told in any case
        return any(event & select.POLLHUP for _, event in ends.poll(0))

    def view_of(self, generation: int) -> View:
        """Returns the view of this generation, once rank 0 has passed it on. Raises ControlError."""
        found = self._await(lambda: self._views.get(generation))
        assert found is not None
        return found

    def _made(self, view: dict[str, Any]) -> View:
        made = replace(super()._made(view), prefix=f"rank {os.environ['RANK']}")
        self._views[made.generation] = made
        self._views.pop(made.generation - _KEPT_VIEWS, None)
        return made


class LeaderLink(RankLink):
    """Rank 0's. What the supervisor sends, and what this rank decides, goes on to the others."""

    def _connect(self, address: tuple[str, int], timeout_s: float, **more: Any) -> tuple[socket.socket, BinaryIO, Any]:
        connection, lines, welcome = super()._connect(address, timeout_s, **more)
        if not more:
            self._passing = threading.Lock()
            self._heard = dict.fromkeys(self._ranks, time.monotonic())
            self._pass_on(protocol.encode(welcome))
            for rank in self._ranks:
                threading.Thread(target=self._listen, args=(rank,), name="kfuse-rank", daemon=True).start()
        return connection, lines, welcome

    def _pass_on(self, line: bytes) -> None:
        """To all other ranks. An empty line: the supervisor is gone."""
        with self._passing:
            for rank in self._ranks:
                with contextlib.suppress(OSError):  # it has ended: the launcher ends this worker
                    rank.sendall(line) if line else rank.shutdown(socket.SHUT_WR)

    def _next(self, lines: BinaryIO) -> bytes:
        line = b""
        try:
            line = super()._next(lines)
        finally:
            self._pass_on(line)
        return line

    def publish(self, decision: dict[str, Any]) -> int:
        number = super().publish(decision)
        known = {"worker": self.worker, "number": number, "decision": decision}
        self._pass_on(protocol.encode({"type": "decision", **known}))
        return number

    def send(self, message: str, **fields: Any) -> None:
        """Leaves out that the loop has ended where another rank has: its error was the reason, and is known."""
        if message != "loop_ended" or not self.has_lost_rank():
            super().send(message, **fields)

    def close(self) -> None:
        self._pass_on(protocol.encode({"type": "goodbye"}))
        super().close()

    def _listen(self, rank: socket.socket) -> None:
        """Takes another rank's heartbeats and messages, until it ends."""
        with contextlib.suppress(OSError, ValueError):
            for line in rank.makefile("rb"):
                self._heard[rank] = time.monotonic()
                message = protocol.decode(line)
                if (kind := message.pop("type")) in _PASSED_ON:
                    self.send(kind, **message)
        self._heard[rank] = math.inf  # the launcher knows whether it has failed

    def _beat(self) -> None:
        if time.monotonic() - min(self._heard.values()) < protocol.HEARTBEAT_S + _SILENT_S:
            super()._beat()


class FollowerLink(RankLink):
    """The others'."""

    def _connect(self, address: tuple[str, int], timeout_s: float, **more: Any) -> tuple[socket.socket, BinaryIO, Any]:
        (leader,) = self._ranks
        self._reached = leader  # no other worker asks whether it reaches this rank
        if not more:
            self._lines = leader.makefile("rb")
            if not (line := self._lines.readline(protocol.MAX_LINE)):
                raise ControlError("rank 0 of this worker has ended before it joined the job")
            self._welcome = protocol.decode(line)
        return leader, self._lines, self._welcome

    def send(self, message: str, **fields: Any) -> None:
        if message in _PASSED_ON and (message != "loop_ended" or fields["failed_at"] is not None):
            super().send(message, **fields)

    def _tell_unreached(self, inquiry: int, addresses: list[tuple[int, Any]], timeout_s: float) -> None:
        """Rank 0 does."""

    def _beat(self) -> None:
        with self._changed:  # after what has not been sent: it is the same connection
            self._unsent.append(protocol.encode({"type": "alive"}))
            self._flush()
