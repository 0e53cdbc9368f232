"""The content of rank 0's decisions, on its way to all workers. A step's tail carries a decision's number alone.

Rank 0 sends the content, as JSON, before the step whose tail has the number. The others wait for it when they read that
step's statistics. It goes through the supervisor, which outlives the views; in a job of fixed size through the store.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

from kfuse.comm.group import CommError
from kfuse.membership import Session

_NUMBERS = itertools.count(1)  # of this process: a number is never used again, in another training neither
_KEPT = 64  # more than the steps that any worker can be behind rank 0


class Published:
    """Sends what rank 0 decided, and receives it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._own: dict[int, dict[str, Any]] = {}

    def send(self, content: dict[str, Any]) -> int:
        """On rank 0: sends a decision, and returns its number. Raises CommError where the store is gone."""
        session, number = self._session, next(_NUMBERS)
        self._own[number] = content
        self._own.pop(number - _KEPT, None)
        if session.elastic:
            session.publish(number, content)
        elif session.group.size > 1:
            try:
                session.group.store.set(_key(number), json.dumps(content))
                session.group.store.delete_key(_key(number - _KEPT))
            except RuntimeError as error:
                raise CommError(f"rank 0 could not send decision {number}: {error}") from error
        return number

    def receive(self, worker: int, number: int) -> dict[str, Any]:
        """The decision of this number that `worker` sent as rank 0. Raises CommError where it does not come in time."""
        session = self._session
        if worker == session.worker:
            return self._own[number]
        try:
            if session.elastic:
                return session.published(worker, number)
            content: dict[str, Any] = json.loads(session.group.store.get(_key(number)))
            return content
        except (RuntimeError, TimeoutError) as error:
            raise CommError(f"decision {number} of rank 0 (worker {worker}) has not arrived: {error}") from error


def _key(number: int) -> str:
    return f"decision/{number}"
