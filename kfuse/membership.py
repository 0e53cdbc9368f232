"""One worker's place in a job: its group, its view, and its connection to the supervisor."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from kfuse.comm.group import CommError, Group
from kfuse.comm.settings import CommOptions
from kfuse.elastic import rendezvous
from kfuse.elastic.protocol import ControlError, Met, View

if TYPE_CHECKING:  # only where a supervisor has started this worker
    from kfuse.elastic.client import ControlClient

Record = Callable[[str, dict[str, Any]], None]

_LOG = logging.getLogger("kfuse")

_ENDED_S = 5.0  # until then the supervisor, told that the job must end, has ended this process
_MOST_LANES = 8  # only optimizers that take part in the same backward need different lanes


def _call(listeners: list[weakref.WeakMethod[Callable[..., None]]], *arguments: Any) -> None:
    """Calls these methods, in the order of registration, but for those of deleted objects."""
    for listener in listeners:
        if (method := listener()) is not None:
            method(*arguments)


class Session:
    """One worker of a job: its group, its view and its supervisor. Made by `init`."""

    def __init__(
        self, group: Group, comm: CommOptions, control: ControlClient | None = None, record: Record | None = None
    ) -> None:
        """comm: how gradients are reduced. control: the connection to the supervisor; None: there is no supervisor.

        record: called with each record that is reported, on rank 0 of a job without a supervisor.
        """
        self.group, self.comm, self.control_client, self._record = group, comm, control, record
        self.view: View | None = None
        self._listeners: list[weakref.WeakMethod[Callable[..., None]]] = []
        self._leave_takers: list[weakref.WeakMethod[Callable[..., None]]] = []
        # How many of the group's lanes (`Group.lane`) this worker's optimizers use.
        self.lanes_used = self._optimizers_made = 0
        self.lost = False  # training has failed because a worker or the supervisor was lost: exit waits for nothing
        self.left = False  # a view was formed without this worker, which therefore ends
        self._generation = 0  # of the active view, or of the one being entered
        self.apart = False  # each worker is at a step of its own (pair averaging): no collective can be made
        self.has_trained = self.in_training = False  # a training has begun in this process; one is under way
        self.run_dir: TextIO | None = None  # holds its lock, so that no other run uses it while this process may write

    @property
    def local_rank(self) -> int:
        """This worker's number on its machine."""
        if self.view is None:
            return int(os.environ.get("LOCAL_RANK", self.group.rank))
        here = self.view.members[self.group.rank].host
        return sum(member.host == here for member in self.view.members[: self.group.rank])

    @property
    def worker(self) -> int:
        return self.group.rank if self.control_client is None else self.control_client.worker

    @property
    def workers(self) -> list[int]:
        """The numbers of the view's workers, in rank order."""
        return list(range(self.group.size)) if self.view is None else self.view.workers

    @property
    def elastic(self) -> bool:
        """Whether the number of workers can change."""
        return self.control_client is not None

    @property
    def mirrors(self) -> bool:
        """Whether another worker repeats a worker's updates of sharded state, in case that one is lost."""
        return self.elastic and self.comm.redundancy == "mirror"

    def on_group_change(self, listener: Callable[[Group], None]) -> None:
        """Calls `listener`, a bound method, with each new group, until its object is deleted."""
        self._listeners.append(weakref.WeakMethod(listener))

    def on_planned_change(self, listener: Callable[[Sequence[int]], None]) -> None:
        """Calls `listener`, a bound method, before a planned change of the view, while the group still has all workers.

        Its argument: the ranks of the group that leave.
        """
        self._leave_takers.append(weakref.WeakMethod(listener))

    def new_lane(self) -> int:
        """The lane of a new optimizer; the same on every rank, if all make the same optimizers in the same order.

        Lanes are given in turns, so that a process that makes many optimizers does not open ever more connections.
        """
        self._optimizers_made += 1
        self.lanes_used = min(self._optimizers_made, _MOST_LANES)
        return (self._optimizers_made - 1) % _MOST_LANES

    # -- the supervisor -------------------------------------------------------------------------------------------

    def proposed_generation(self) -> int:
        """The generation of the view that the supervisor has proposed to this worker; 0 if there is none."""
        if self.control_client is None or self.view is None:
            return 0
        view = self.control_client.view(self.view.generation)
        return 0 if view is None else view.generation

    def loses_supervisor(self) -> bool:
        """Whether the supervisor is lost, or has ended the job, while this process can still write a checkpoint."""
        return self.control_client is not None and not sys.is_finalizing() and self.control_client.is_ending()

    def stop_reason(self) -> str | None:
        """Why the supervisor asks training to stop; None if it does not, or there is no supervisor."""
        return None if self.control_client is None else self.control_client.stop

    @property
    def writes_last(self) -> bool:
        """Where training has failed: whether the last checkpoint is this worker's. The leader's, or as told."""
        told = None if self.control_client is None else self.control_client.writes_last
        return self.group.rank == 0 if told is None else told

    def ask_supervisor(self, what: str, **fields: int) -> None:
        """Sends the supervisor, if there is one, a request of rank 0; other ranks' requests are dropped.

        what: "resize" (`workers`), "replace" (`worker`: its number, not its rank).
        """
        if self.group.rank == 0:
            self.send(what, **fields)

    def send(self, message: str, **fields: Any) -> None:
        """Sends the supervisor, if there is one, a message. If it is lost, `check` raises at the next step boundary."""
        if self.control_client is not None:
            with contextlib.suppress(ControlError):
                self.control_client.send(message, **fields)

    # -- views ----------------------------------------------------------------------------------------------------

    def ensure_joined(self) -> None:
        """If a supervisor started this worker: reports that it is ready, and waits for the first view with it.

        Whatever takes time (imports, data, model, optimizer) is best done before: others may be training.
        """
        if (client := self.control_client) is not None and self.view is None:
            client.send("ready")
            self._enter(client.await_view(0), new=True)  # no time limit: the others may train for long before

    def switch(self, generation: int) -> bool:
        """Moves to the view of `generation`, at the same step boundary on every worker; False if this one leaves.

        Raises CommError if the view cannot be formed.
        """
        return self._enter(self.client.await_view(generation - 1, self.group.timeout_s))

    def recover(self, error: CommError) -> bool:
        """After `error`: waits for the supervisor's next view and moves to it; False if this worker is not in it.

        Raises CommError if a worker of that view is lost too, ControlError if no view comes.
        """
        client, generation = self.client, self._generation
        if client.view(generation, recovers=True) is None:
            client.send("broken", generation=generation, why=str(error))
        return self._enter(self._await_recovery())

    def _enter(self, view: View, new: bool = False) -> bool:
        """Ends the group before, and forms that of `view`; False if this worker is not in it.

        To a planned view all workers of the group before come, at the same step boundary. To one that recovers some of
        them do not: then the group before has no further message.
        """
        client = self.client
        rank = view.rank_of(client.worker)
        self._generation = view.generation
        old = self.group
        if view.recovers:
            old.abort()
        else:
            if self.view is not None:  # what leaving workers have alone goes to those that stay
                members = enumerate(self.view.members)
                _call(self._leave_takers, [rank for rank, each in members if view.rank_of(each.worker) is None])
            old.finish()
        if rank is None:
            client.send("left")  # until then it is in each view that recovers from a loss
            self.left = True
            return False
        group = rendezvous.form_group(view, rank, old, self.check, new)
        try:
            group.connect_lanes(max(1, self.lanes_used))
            if self.comm.tree == "latency":  # it follows this view's links
                from kfuse.comm.topology import measure  # few jobs need it

                measure(group)
        except CommError:
            group.retire()
            raise
        self.group = group
        old.retire()
        self.view, self.apart = view, False
        self.log_view()
        _call(self._listeners, group)
        client.send("joined", generation=view.generation)
        return True

    def log_view(self) -> None:
        """Logs one line about the active view, on rank 0."""
        if (view := self.view) is not None and self.group.rank == 0:
            told = (view.generation, view.reason, view.size, self.comm.transport())
            _LOG.info("view %d (%s): workers %d, configured transport %s", *told)

    def check(self) -> None:
        """Raises CommError if the supervisor has formed a view after a lost worker, ControlError if it is lost."""
        client = self.client
        client.check()
        if client.view(self._generation, recovers=True) is not None:
            raise CommError("a worker was lost: the supervisor has formed another view")

    def meet(self, step: int, applied: int) -> Met:
        """Stands still after `step` steps until all workers of the view do (see `kfuse.elastic.meetings`).

        applied: number of the newest announcement that this worker has applied.
        Raises CommError if one of them is lost meanwhile, or none of the others makes a step for long,
        ControlError if the supervisor is lost.
        """
        client = self.client
        timeout_s = max(self.group.timeout_s, 2 * client.silence_s)  # who is cut off may come back until it is killed
        try:
            met = client.meet(self._generation, step, self.workers, applied, timeout_s)
        except TimeoutError:
            silent = f"{self.group.whom()} made no step for {timeout_s:.0f} s"
            raise CommError(f"meeting of all workers after step {step}: {silent}") from None
        if met is None:
            self.check()
        assert met is not None
        return met

    def finish(self) -> bool:
        """Waits until the supervisor has the job's results; False if a worker was lost before that."""
        return self.control_client is None or self.control_client.await_over(self._generation)

    @property
    def client(self) -> ControlClient:
        """The connection to the supervisor, in a job that has one."""
        assert self.control_client is not None, "this job has no supervisor"
        return self.control_client

    def evict(self, worker: int, why: str, event: dict[str, Any]) -> None:
        """Has the supervisor end a worker of this view, and waits for the view without it. Every worker calls it.

        The one that is to end only waits for that. why: what it did, for the event of its loss; event: to record too.
        Raises ControlError if the supervisor is lost, or forms no view.
        """
        if worker != self.worker:
            self.client.send("evict", worker=worker, why=why, event=event)
        self._await_recovery()

    def _await_recovery(self) -> View:
        return self.client.await_view(self._generation, 2 * self.group.timeout_s + 10, recovers=True)

    def give_up(self, why: str, event: dict[str, Any] | None = None, lines: Sequence[str] = ()) -> None:
        """Has the supervisor, if there is one, end the job, this process too: no other worker could go on either.

        event, lines: to record and to show; of several workers that give up, only the first one's are.
        """
        self.send("fatal", why=why, event=event, lines=list(lines))
        if self.elastic:
            time.sleep(_ENDED_S)  # what this process would print, as others would, is said by the supervisor

    def begin_training(self) -> None:
        """A training starts. Raises RuntimeError for a second one in an elastic job."""
        if self.elastic and self.has_trained:
            raise RuntimeError(
                "under kfuse-run a script trains once, as a worker that joins runs it from its start: train all epochs "
                "in one kf.fit or kf.DataLoader, or run a script for each training"
            )
        self.has_trained = self.in_training = True

    def end_training(self, failed_at: int | None) -> None:
        """Tells the supervisor that this worker's training loop has ended, at this step if by an error."""
        self.in_training = False
        if not sys.is_finalizing():
            self.send("loop_ended", failed_at=failed_at)

    @property
    def is_recorded(self) -> bool:
        """Whether records that are reported reach a run directory."""
        return self._record is not None or self.elastic

    def report(self, kind: str, data: dict[str, Any]) -> None:
        """Sends a record to the process that keeps the run directory: the supervisor, or rank 0 under torchrun."""
        if self._record is not None:
            self._record(kind, data)
        self.send("record", kind=kind, data=data)
