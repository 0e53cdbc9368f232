"""Which ranks have come to a place in their program, asked of the store alone: no message is sent."""

from __future__ import annotations

import time

from torch.distributed import Store  # type: ignore[attr-defined]

GRACE_S = 5.0
"""Ranks that wait for the same one time out at about the same time."""


class StoreLost(RuntimeError):
    """The store does not answer any more."""


class RollCall:
    """The ranks of one group."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._meetings: dict[str, int] = {}

    def next(self, what: str) -> int:
        """Returns the number of this rank's next meeting of a kind, from 0."""
        self._meetings[what] = self._meetings.get(what, -1) + 1
        return self._meetings[what]

    def missing(self, what: str, number: int) -> list[int]:
        """Returns the ranks that have not come to this meeting. This rank has. Raises StoreLost."""
        keys = [f"meet/{what}/{number}/{rank}" for rank in range(self._size)]
        try:
            self._store.set(keys[self._rank], "1")
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            if number and not missing:
                self._store.delete_key(f"meet/{what}/{number - 1}/{self._rank}")  # all have seen it, as they are here
        except RuntimeError as error:
            raise StoreLost(str(error)) from error
        return missing

    def silent(self, what: str) -> list[int]:
        """After a timeout: returns the ranks that report none within GRACE_S; [] where all or no others do."""
        try:
            self._store.set(f"late/{what}/{self._rank}", "1")
            deadline = time.monotonic() + GRACE_S
            late = set(range(self._size))
            while late and time.monotonic() < deadline:
                late = {r for r in late if not self._store.check([f"late/{what}/{r}"])}
                time.sleep(0.05)
        except RuntimeError:  # the store is lost too: the timeout is reported without names
            return []
        return sorted(late) if len(late) < self._size else []
