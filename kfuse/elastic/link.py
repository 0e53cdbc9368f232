"""Whom a worker reports to, and how it learns what rank 0 decides: by itself nobody, and over the group's store.

`Link` is that of a job whose workers are fixed; `kfuse.elastic.client.ControlClient` is that of a supervisor's worker.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kfuse.elastic.protocol import View

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

Report = Callable[[str, dict[str, Any]], None]
"""report(kind, data): takes a record of a run."""

_KEPT = 64  # decisions: more than the steps that any worker can be behind rank 0


def ignore(kind: str, data: dict[str, Any]) -> None:
    """The `Report` of a process whose records nobody keeps or shows."""


class Link:
    """The link of a worker of a job without a supervisor: nothing is sent, and nobody asks for anything."""

    elastic = False  # whether the number of workers can change
    workers_bounds: Sequence[int] | None = None  # the job's least and most workers; None: the number is fixed
    silence_s = 0.0  # without a heartbeat, after which the supervisor kills a worker
    catch_up_s = 0.0  # where the job is to stop: how long workers wait for others that are behind (pair averaging)
    bears_cuts = False  # whether this worker goes on beside others that it does not reach (comm.sync=pair:N,M)
    stop: str | None = None  # why training is asked to stop; None: it is not
    writes_last: bool | None = None  # of a failed job: whether this worker writes its checkpoint; None: the leader does
    numbers = itertools.count(1)  # of this process's decisions: no session and no training uses one again

    def __init__(self, worker: int = 0, store: Store | None = None) -> None:
        """worker: this worker's number. store: of all workers' group; None where this process is alone."""
        self.worker, self._store = worker, store
        self.job: dict[str, Any] = {}  # what a supervisor tells all of its workers as they connect
        self._decisions: dict[tuple[int, int], dict[str, Any]] = {}  # by the worker that published it, and its number

    def send(self, message: str, **fields: Any) -> None:
        """Sends the supervisor a message of this type."""

    def report(self, kind: str, data: dict[str, Any]) -> None:
        """Sends the supervisor, which keeps the run directory, a record."""
        self.send("record", kind=kind, data=data)

    def give_up(self, why: str, event: dict[str, Any] | None = None, lines: Sequence[str] = ()) -> None:
        """Has the supervisor end the job, this process too: no other worker could go on either.

        event, lines: to record and to show; of several workers that give up, only the first one's are.
        """

    # -- rank 0's decisions ---------------------------------------------------------------------------------------

    def publish(self, decision: dict[str, Any]) -> int:
        """Sends the other workers what rank 0 has decided. Returns its number. Raises RuntimeError."""
        number = next(self.numbers)
        self._decisions[self.worker, number] = decision
        self._decisions.pop((self.worker, number - _KEPT), None)
        if self._store is not None:
            self._store.set(f"decision/{number}", json.dumps(decision))
            self._store.delete_key(f"decision/{number - _KEPT}")
        return number

    def fetch(self, worker: int, number: int, timeout_s: float) -> dict[str, Any]:
        """Returns the decision of this number that `worker` has published.

        Raises RuntimeError or TimeoutError where it does not come.
        """
        if worker == self.worker:
            return self._decisions[worker, number]
        assert self._store is not None
        decision: dict[str, Any] = json.loads(self._store.get(f"decision/{number}"))
        return decision

    def take_apart(self) -> list[dict[str, Any]]:
        """Returns what has arrived of other workers' decisions for a training whose workers are apart, in order, once.

        Such a decision has the key `apart`; no step's tail carries its number.
        """
        return []

    # -- views, and the job's end ---------------------------------------------------------------------------------

    def view(self, after: int, recovers: bool = False) -> View | None:
        """The newest view, if its generation is above `after`. recovers: and if it recovers from a lost worker."""
        return None

    def await_view(self, after: int, timeout_s: float | None = None, recovers: bool = False) -> View:
        """What `view` returns, once there is one. Raises ControlError after the timeout."""
        raise NotImplementedError("the workers are fixed")

    def await_over(self, current: int) -> bool:
        """Waits until the supervisor has the job's results: True. False if it forms a recovering view first."""
        return True

    def check(self) -> None:
        """Raises ControlError if the supervisor is gone, or the job has failed."""

    def is_ending(self) -> bool:
        """Whether the supervisor is gone, or the job has failed."""
        return False

    def saving(self) -> contextlib.AbstractContextManager[None]:
        """Context: this process is not ended meanwhile, since it writes a checkpoint."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """This process ends."""
