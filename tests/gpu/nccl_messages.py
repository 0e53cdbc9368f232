"""What the double of NCCL compares before a message runs: who meets whom in it, and what each says of it. [6]"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from torch import Tensor

FOREVER_S = 10**6


class Meeting(NamedTuple):
    """Of all ranks, in a collective."""

    number: int  # of the collectives
    rank: int
    size: int
    told: str

    @property
    def key(self) -> str:
        return f"{self.number}/{self.rank}"

    @property
    def awaited(self) -> list[str]:
        return [f"{self.number}/{r}" for r in range(self.size)]

    @property
    def connection(self) -> str:
        """What NCCL connects once: its algorithms differ, at least, between kinds of messages."""
        return str(json.loads(self.told)["message"].split()[0])

    @property
    def ends(self) -> list[int]:
        return list(range(self.size))

    def difference(self, told: list[str]) -> str | None:
        """What the ranks have enqueued as this number, where that does not fit together. [6]"""
        given = [json.loads(each) for each in told]
        if len({each["message"] for each in given}) > 1:
            return "; ".join(f"number {self.number} is {each['message']} on rank {r}" for r, each in enumerate(given))
        if "sends" in given[0]:
            for a, sender in enumerate(given):
                for b, receiver in enumerate(given):
                    if sender["sends"][b] != receiver["receives"][a]:
                        return f"rank {a} sends {sender['sends'][b]}, rank {b} expects {receiver['receives'][a]}"
        return None


class Part(NamedTuple):
    """Of two ranks: one's send and the other's receive."""

    is_send: bool
    tensor: Tensor
    source: int
    target: int
    number: int  # of the messages from `source` to `target`

    @property
    def told(self) -> str:
        return f"{self.tensor.numel()} {self.tensor.dtype}"

    @property
    def key(self) -> str:
        return self._key_of(self.is_send)

    @property
    def awaited(self) -> list[str]:
        return [self._key_of(not self.is_send)]

    @property
    def connection(self) -> str:
        return f"{self.source} to {self.target}"

    @property
    def ends(self) -> list[int]:
        return [self.source, self.target]

    def _key_of(self, is_send: bool) -> str:
        return f"{'send' if is_send else 'recv'}/{self.source}/{self.target}/{self.number}"

    def difference(self, told: list[str]) -> str | None:
        return None if told == [self.told] else f"{self.key} has {self.told}, the other rank {told[0]}"

    def run(self, gloo: Any) -> Any:
        if self.is_send:
            return gloo.send([self.tensor], self.target, self.number)
        return gloo.recv([self.tensor], self.source, self.number)


class Parts:
    """Sends and receives under way, as a work of gloo. In a thread: a wait that times out closes a connection."""

    def __init__(self, gloo: Any, parts: Sequence[Part]) -> None:
        self._ended, self._error = threading.Event(), ""
        works = [part.run(gloo) for part in parts]
        threading.Thread(target=self._wait, args=(works,), daemon=True).start()

    def _wait(self, works: list[Any]) -> None:
        try:
            for work in works:
                work.wait(timedelta(seconds=FOREVER_S))
        except RuntimeError as error:
            self._error = str(error)
        self._ended.set()

    def wait(self, timeout: timedelta | None = None) -> None:
        if not self._ended.wait(None if timeout is None else timeout.total_seconds()) or self._error:
            raise RuntimeError(self._error or "not yet")

    def is_completed(self) -> bool:
        return self._ended.is_set()
