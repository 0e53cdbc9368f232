"""One worker's place in a job: its group, its view, and its link to the supervisor."""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from kfuse.comm import devices
from kfuse.comm.group import CONNECT_THREAD, CommError, Group, in_thread
from kfuse.comm.settings import CommOptions
from kfuse.elastic.link import Link
from kfuse.elastic.protocol import View

if TYPE_CHECKING:
    from kfuse.elastic.replica import Replica

T = TypeVar("T")

_LOG = logging.getLogger("kfuse")

_CONNECTING_S = 1.0  # that `end_training` waits for a thread that connects
_MOST_LANES = 8  # only optimizers that take part in the same backward need different lanes


def _retire(early: tuple[int, Future[Group]] | None) -> None:
    """Drops a group that is not needed, if it is made already."""
    if early is not None and early[1].done() and early[1].exception() is None:
        early[1].result().retire()


class Session:
    """One worker of a job: its group, its view and its link. Made by `init`."""

    def __init__(
        self, group: Group, comm: CommOptions, link: Link | None = None, replica: Replica | None = None
    ) -> None:
        """comm: how gradients are reduced. link: to the supervisor; None: there is none. replica: the processes of this
        worker; None: this one alone.
        """
        self.group, self.comm, self.replica = group, comm, replica
        # This process's place among those of its worker, which share each micro-batch, and their number.
        self.part = (0, 1) if replica is None else (replica.rank, replica.size)
        self.link = link or Link(group.rank, group.store if group.size > 1 else None)
        self.worker, self.elastic = self.link.worker, self.link.elastic
        self.view: View | None = None
        self._followers: list[tuple[weakref.WeakMethod[Callable[..., None]], ...]] = []  # pairs: see `follow`
        # How many of the group's lanes (`Group.lane`) this worker's optimizers use.
        self.lanes_used = self._optimizers_made = 0
        self.lost = False  # training has failed because a worker or the supervisor was lost: exit waits for nothing
        self.left = False  # a view was formed without this worker, which therefore ends
        self._generation = 0  # of the active view, or of the one being entered
        self._early: tuple[int, Future[Group]] | None = None  # a proposed view, and its group, which is being formed
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
    def workers(self) -> list[int]:
        """The numbers of the view's workers, in rank order."""
        return list(range(self.group.size)) if self.view is None else self.view.workers

    @property
    def mirrors(self) -> bool:
        """Whether another worker repeats a worker's updates of sharded state, in case that one is lost."""
        return self.elastic and self.comm.redundancy == "mirror"

    def follow(self, leave: Callable[[Sequence[int]], None], change: Callable[[Group], None]) -> None:
        """Calls these bound methods, each until its object is deleted.

        leave: before a planned change of the view, while the group still has all workers, with the ranks that leave it.
        change: with each new group.
        """
        self._followers.append((weakref.WeakMethod(leave), weakref.WeakMethod(change)))

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
        view = None if self.view is None else self.link.view(self.view.generation)
        return 0 if view is None else view.generation

    def newest_generation(self) -> int:
        """As `proposed_generation`; that of the active view where none is proposed."""
        return self.proposed_generation() or self._generation

    def loses_supervisor(self) -> bool:
        """Whether the supervisor is lost, or has ended the job, while this process can still write a checkpoint.

        It cannot alone, where the worker has others: they may be in a forward, whatever ended the loop here.
        """
        return self.replica is None and not sys.is_finalizing() and self.link.is_ending()

    @property
    def leads(self) -> bool:
        """Whether this process decides and records for the job: the one of rank 0, or its first one."""
        return self.group.rank == 0 and self.part[0] == 0

    def together(self, act: Callable[[], T], what: str) -> T:
        """Returns what `act` returns. Where this worker has several processes they all succeed, or raise CommError."""
        return act() if self.replica is None else self.replica.together(act, what)

    @property
    def writes_last(self) -> bool:
        """Where training has failed: whether the last checkpoint is this worker's. The leader's, or as told."""
        told = self.link.writes_last
        return self.group.rank == 0 if told is None else told

    def ask_supervisor(self, what: str, **fields: int) -> None:
        """Sends the supervisor, if there is one, a request of rank 0; other ranks' requests are dropped.

        what: "resize" (`workers`), "replace" (`worker`: its number, not its rank).
        """
        if self.leads:
            self.link.send(what, **fields)

    # -- views ----------------------------------------------------------------------------------------------------

    def ensure_joined(self) -> None:
        """If a supervisor started this worker: reports that it is ready, and waits for the first view with it.

        Whatever takes time (imports, data, model, optimizer) is best done before: others may be training.
        """
        if self.elastic and self.view is None:
            if self.comm.leaves_choice:
                import kfuse.comm.cost  # noqa: F401  # at the switch the others would wait for the import

            if self.replica is not None:
                self.replica.meet("building the model")
            self.link.send("ready")
            self._enter(self.link.await_view(0), new=True)  # no time limit: the others may train for long before

    def form_early(self) -> None:
        """Between two steps: begins to connect the workers of a proposed planned view in a thread, for `_enter`.

        On CPUs only: a communicator of NCCL must not be made while another one sends.
        """
        view = self.link.view(self._generation)
        if view is None or view.recovers or self._early is not None or devices.of(self.group.device).asynchronous:
            return
        rank = view.rank_of(self.worker)
        if rank is not None and view.size > 1:
            from kfuse.elastic.rendezvous import connected

            def check() -> None:
                self.link.check()
                if self.link.view(view.generation) is not None or not self.in_training:
                    raise CommError("another view was formed, or training has ended")

            connecting = partial(connected, view, rank, self.group, check, meets=True)
            self._early = view.generation, in_thread(connecting)

    def switch(self, generation: int) -> bool:
        """Moves to the view of `generation`, at the same step boundary on every worker; False if this one leaves.

        Raises CommError if the view cannot be formed.
        """
        return self._enter(self.link.await_view(generation - 1, self.group.timeout_s))

    def recover(self, error: CommError) -> bool:
        """After `error`: waits for the supervisor's next view and moves to it; False if this worker is not in it.

        Raises CommError if a worker of that view is lost too, ControlError if no view comes.
        """
        generation = self._generation
        if self.link.view(generation, recovers=True) is None:
            self.link.bears_cuts = False  # until the next step: the others cannot do without this worker's answer
            self.link.send("broken", generation=generation, why=str(error))
        return self._enter(self._await_recovery())

    def _enter(self, view: View, new: bool = False) -> bool:
        """Ends the group before, and forms that of `view`; False if this worker is not in it.

        To a planned view all workers of the group before come, at the same step boundary. To one that recovers some of
        them do not: then the group before has no further message.
        """
        if self.replica is not None:
            view = self.replica.agreed(view)
        self._generation = view.generation
        if not self.together(partial(self._form, view, new), f"view {view.generation}"):
            self.link.send("left")  # until then it is in each view that recovers from a loss
            self.left = True
            return False
        self.log_view()
        self.link.send("joined", generation=view.generation)
        return True

    def _form(self, view: View, new: bool) -> bool:
        """As `_enter`, for this process alone; the supervisor is not told."""
        rank = view.rank_of(self.worker)
        old, early, self._early = self.group, self._early, None
        if view.recovers:
            old.abort()
        else:
            if self.view is not None:  # what leaving workers have alone goes to those that stay
                leavers = [at for at, each in enumerate(self.view.members) if view.rank_of(each.worker) is None]
                for leave, _ in self._followers:
                    if (act := leave()) is not None:
                        act(leavers)
            old.finish()
        if rank is None:
            return False
        from kfuse.elastic.rendezvous import form_group  # where a supervisor has started this worker

        if early is not None and early[0] != view.generation:
            _retire(early)
            early = None
        group = form_group(view, rank, old, self.check, new, None if early is None else early[1])
        group.check = self.check
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
        for _, change in self._followers:
            if (act := change()) is not None:
                act(group)
        return True

    def log_view(self) -> None:
        """Logs one line about the active view, on rank 0."""
        if (view := self.view) is not None and self.leads:
            told = (view.generation, view.reason, view.size, self.comm.transport())
            _LOG.info("view %d (%s): workers %d, configured transport %s", *told)

    def check(self) -> None:
        """Raises CommError if the supervisor has formed a view after a lost worker, ControlError if it is lost."""
        self.link.check()
        if self.link.view(self._generation, recovers=True) is not None:
            raise CommError("a worker was lost: the supervisor has formed another view")

    def finish(self) -> bool:
        """Waits until the supervisor has the job's results; False if a worker was lost before that."""
        over = self.link.await_over(self._generation)
        return over if self.replica is None else bool(self.replica.every([over], "the end of training")[0][0])

    def evict(self, worker: int, why: str, event: dict[str, Any]) -> None:
        """Has the supervisor end a worker of this view, and waits for the view without it. Every worker calls it.

        The one that is to end only waits for that. why: what it did, for the event of its loss; event: to record too.
        Raises ControlError if the supervisor is lost, or forms no view.
        """
        if worker != self.worker:
            self.link.send("evict", worker=worker, why=why, event=event)
        self._await_recovery()

    def _await_recovery(self) -> View:
        return self.link.await_view(self._generation, 2 * self.group.timeout_s + 10, recovers=True)

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
            self.link.send("loop_ended", failed_at=failed_at)
            for thread in threading.enumerate():  # one that goes on as the interpreter ends would abort the process
                if thread.name == CONNECT_THREAD:
                    thread.join(_CONNECTING_S)
            _retire(self._early)
            self._early = None
