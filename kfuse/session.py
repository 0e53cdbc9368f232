"""This process as one worker of a job: its group, its rank, and its connection to the supervisor.

`init()` finds out how the process was started: by a kfuse supervisor (the group may change while training), by torchrun
or with torch's process group initialised (a fixed group), or plainly (one worker).
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, ParamSpec

import torch
import torch.distributed as dist

from kfuse.comm import devices
from kfuse.comm.devices import DeviceError
from kfuse.comm.group import CommError, Group, drop_retired
from kfuse.comm.options import CommOptions

if TYPE_CHECKING:  # imported when used: `import kfuse` is quick
    from kfuse.elastic.client import ControlClient, Met
    from kfuse.elastic.protocol import View
    from kfuse.elastic.rendezvous import Rendezvous

Record = Callable[[str, dict[str, Any]], None]

_LOG = logging.getLogger("kfuse")

_MOST_LANES = 8  # only optimizers that take part in the same backward need different lanes
_CLOSE_S = 5.0  # how long an ending process waits until the others end too


class ViewChanged(CommError):
    """A worker of this group was lost, and the supervisor has formed another view."""


_Given = ParamSpec("_Given")


class _Listeners(Generic[_Given]):
    """Bound methods that are called together, in the order of registration, until their objects are deleted."""

    def __init__(self) -> None:
        self._methods: list[weakref.WeakMethod[Callable[_Given, None]]] = []

    def add(self, method: Callable[_Given, None]) -> None:
        self._methods = [*(known for known in self._methods if known() is not None), weakref.WeakMethod(method)]

    def call(self, *given: _Given.args, **named: _Given.kwargs) -> None:
        for known in self._methods:
            if (method := known()) is not None:
                method(*given, **named)


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
        self._listeners: _Listeners[[Group]] = _Listeners()
        self._leave_takers: _Listeners[[Sequence[int | None], int]] = _Listeners()
        self.lanes_used = self._optimizers_made = 0
        """How many of the group's lanes (`Group.lane`) this worker's optimizers use."""
        self.lost = False
        """Training has failed because a worker or the supervisor was lost: nothing is waited for at exit."""
        self.left = False
        """A view was formed without this worker, which therefore ends."""
        self._generation = 0  # of the active view, or of the one being entered
        self.apart = False
        """Each worker of the group is at a step of its own (pair averaging): no collective can be made."""
        self.training = 0
        """Which training of this process is under way, from 1: a script may train more than once."""
        self.in_training = False

    @property
    def local_rank(self) -> int:
        """This worker's number on its machine."""
        if self.view is None:
            return int(os.environ.get("LOCAL_RANK", self.group.rank))
        here = self.view.members[self.group.rank].host
        return sum(member.host == here for member in self.view.members[: self.group.rank])

    @property
    def worker(self) -> int:
        """This worker's number."""
        return self.group.rank if self.control_client is None else self.control_client.worker

    @property
    def workers(self) -> list[int]:
        """The numbers of the view's workers, in rank order."""
        return list(range(self.group.size)) if self.view is None else [member.worker for member in self.view.members]

    @property
    def elastic(self) -> bool:
        """Whether the number of workers can change."""
        return self.control_client is not None

    @property
    def mirrors(self) -> bool:
        """Whether the next worker repeats a worker's updates of sharded state, in case that one is lost."""
        return self.elastic and self.comm.redundancy == "mirror"

    def on_group_change(self, listener: Callable[[Group], None]) -> None:
        """Calls `listener`, a bound method, with each new group, until its object is deleted."""
        self._listeners.add(listener)

    def on_planned_change(self, listener: Callable[[Sequence[int | None], int], None]) -> None:
        """Calls `listener`, a bound method, before a planned change of the view, while the group still has all workers.

        Its arguments: of each rank of the group, its rank in the next view (None: it leaves), and that view's size.
        """
        self._leave_takers.add(listener)

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
        client, view = self.control_client, self.view
        return 0 if client is None or view is None else client.proposed(view.generation)

    def stop_reason(self) -> str | None:
        """Why the supervisor asks training to stop; None if it does not, or there is no supervisor."""
        return None if self.control_client is None else self.control_client.stop_reason()

    def ask_supervisor(self, what: str, **fields: int) -> None:
        """Sends the supervisor a request ("resize": `workers`; "replace": `worker`, its number, not its rank).

        Only rank 0's requests are sent; other ranks' are dropped, as are those of a job without a supervisor.
        """
        if self.group.rank == 0:
            self._send(what, **fields)

    def _send(self, message: str, **fields: Any) -> None:
        """Sends the supervisor, if there is one, a message. If it is lost, `check` raises at the next step boundary."""
        if self.control_client is not None:
            from kfuse.elastic.client import ControlError

            with contextlib.suppress(ControlError):
                self.control_client.send(message, **fields)

    # -- views ----------------------------------------------------------------------------------------------------

    def ensure_joined(self) -> None:
        """Joins the others, if a supervisor started this worker and it has not joined yet."""
        if self.control_client is not None and self.view is None:
            self.join()

    def join(self) -> None:
        """Tells the supervisor that this worker is ready, and waits for the first view that contains it.

        Whatever takes time (imports, data, model, optimizer) is best done before: others may be training.
        """
        client = self._client()
        client.send("ready")
        self._enter(client.await_first_view(), new=True)

    def switch(self, generation: int) -> bool:
        """Moves to the view of `generation`, at the same step boundary on every worker; False if this one leaves.

        Raises CommError if the view cannot be formed.
        """
        return self._enter(self._client().await_view(generation, self.group.timeout_s))

    def recover(self, error: CommError) -> bool:
        """After `error`: waits for the supervisor's next view and moves to it; False if this worker is not in it.

        Raises CommError if a worker of that view is lost too, ControlError if no view comes.
        """
        client, generation = self._client(), self._generation
        if client.recovery(generation) is None:
            client.send("broken", generation=generation, why=str(error))
        return self._enter(client.await_recovery(generation, 2 * self.group.timeout_s + 10))

    def _enter(self, view: View, new: bool = False) -> bool:
        """Ends the group before, and forms that of `view`; False if this worker is not in it.

        To a planned view all workers of the group before come, at the same step boundary. To one that recovers some of
        them do not: then the group before has no further message.
        """
        client = self._client()
        rank = view.rank_of(client.worker)
        self._generation = view.generation
        old = self.group
        if view.recovers:
            old.abort()
        else:
            self._take_leave(view)
            old.finish()
        if rank is None:
            client.send("left")  # until then it is in each view that recovers from a loss
            self.left = True
            return False
        from kfuse.elastic import rendezvous  # not before there are several workers: `import kfuse` is quick

        group = rendezvous.form_group(view, rank, old, self.check, new, self.comm)
        try:
            group.connect_lanes(max(1, self.lanes_used))
            _measure_links(group, self.comm)
        except CommError:
            group.retire()
            raise
        self.group = group
        old.retire()
        self.view, self.apart = view, False
        self.log_view()
        self._listeners.call(group)
        client.forget(view.generation)
        client.send("joined", generation=view.generation)
        return True

    def _take_leave(self, view: View) -> None:
        """Before a planned change to `view`: what leaving workers have alone goes to those that stay."""
        if self.view is not None:
            new_ranks = [view.rank_of(member.worker) for member in self.view.members]
            self._leave_takers.call(new_ranks, view.size)

    def log_view(self) -> None:
        """Logs one line about the active view, on rank 0."""
        if self.view is not None and self.group.rank == 0:
            name, view = self.comm.transport(), self.view
            _LOG.info(
                "view %d (%s): workers %d, configured transport %s", view.generation, view.reason, view.size, name
            )

    def check(self) -> None:
        """Raises ViewChanged if the supervisor has formed a view after a lost worker, ControlError if it is lost."""
        client = self._client()
        client.check()
        if client.recovery(self._generation) is not None:
            raise ViewChanged("a worker was lost: the supervisor has formed another view")

    def meet(self, step: int, applied: int) -> Met:
        """Stands still after `step` steps until all workers of the view do (see `kfuse.elastic.meetings`).

        applied: number of the newest announcement that this worker has applied.
        Raises ViewChanged if one of them is lost meanwhile, CommError if none of the others makes a step for long,
        ControlError if the supervisor is lost.
        """
        client = self._client()
        timeout_s = max(self.group.timeout_s, 2 * client.silence_s)  # who is cut off may come back until it is killed
        try:
            met = client.meet(self._generation, step, self.workers, applied, timeout_s)
        except TimeoutError:
            raise CommError(
                f"meeting of all workers after step {step}: {self.group.others} made no step for {timeout_s:.0f} s"
            ) from None
        if met is None:
            self.check()
        assert met is not None
        return met

    def announce(self, announcement: dict[str, Any]) -> None:
        """Sends all workers, this one too, what the leader announces, by the supervisor: `ControlClient.announced`."""
        self._send("announce", announcement=announcement)

    def publish(self, number: int, decision: dict[str, Any]) -> None:
        """Sends all other workers, by the supervisor, a decision of rank 0."""
        self._send("decision", number=number, decision=decision)

    def published(self, worker: int, number: int) -> dict[str, Any]:
        """The decision that `worker` has published. Raises TimeoutError, and ControlError if the supervisor is lost."""
        return self._client().decision(worker, number, self.group.timeout_s)

    def finish(self) -> bool:
        """Waits until the supervisor has the job's results; False if a worker was lost before that."""
        return self.control_client is None or self.control_client.await_over(self._generation)

    def _client(self) -> ControlClient:
        assert self.control_client is not None, "this job has no supervisor"
        return self.control_client

    def give_up(self, why: str, event: dict[str, Any] | None = None, lines: Sequence[str] = ()) -> None:
        """Tells the supervisor, if there is one, that the job must end: no other worker could go on either.

        event, lines: which it is to record and to show. Where several workers give up, only the first one's are.
        """
        self._send("fatal", why=why, event=event, lines=list(lines))

    def begin_training(self) -> None:
        """A training starts. Raises RuntimeError if another one is under way in an elastic job."""
        if self.elastic and self.in_training:
            raise RuntimeError(
                "another kf.fit or kf.DataLoader of this process is under way: in a job whose workers may change, let "
                "one end before the next begins"
            )
        self.training += 1
        self.in_training = True

    def end_training(self, failed_at: int | None) -> None:
        """Tells the supervisor that this worker's training loop has ended, at this step if by an error."""
        self.in_training = False
        if not sys.is_finalizing():
            self._send("loop_ended", training=self.training, failed_at=failed_at)

    @property
    def is_recorded(self) -> bool:
        """Whether records that are reported reach a run directory."""
        return self._record is not None or self.elastic

    def report(self, kind: str, data: dict[str, Any]) -> None:
        """Sends a record to the process that keeps the run directory: the supervisor, or rank 0 under torchrun."""
        if self._record is not None:
            self._record(kind, data)
        self._send("record", kind=kind, data=data)


_current: Session | None = None


def init(comm: CommOptions | None = None, timeout_s: float | None = None) -> Session:
    """Joins the other workers and returns the session; a second call returns the first one's.

    comm: how gradients are reduced. timeout_s: how long any wait for another worker may take (60 s by default). With
    comm.reproducible torch is set to one CPU thread, since a matrix product's bits depend on the number of threads.
    The first optimizer calls it, if nothing has before.
    Raises RuntimeError if a session exists with other options, DeviceError for a GPU that is not there, ControlError or
    CommError if joining fails.
    """
    global _current
    comm_options = comm or CommOptions()
    if _current is not None:
        _check_torchs_group(_current)
        has = (_current.comm, _current.group.timeout_s)
        if (comm or has[0], timeout_s or has[1]) != has:
            raise RuntimeError(
                f"kf.init: this process has a session already, with comm={has[0]} and timeout_s={has[1]:g}. Call "
                "kf.init before the first optimizer is made; for other options start the process (the notebook's "
                "kernel) anew"
            )
        return _current
    timeout_s = 60.0 if timeout_s is None else timeout_s
    if comm_options.reproducible:
        torch.set_num_threads(1)
    from kfuse.elastic import protocol

    if protocol.ENV_CONTROL in os.environ:
        from kfuse.elastic.client import ControlClient

        return connect_to_supervisor(ControlClient(timeout_s), comm_options, timeout_s)
    from kfuse.elastic.rendezvous import Rendezvous

    rendezvous = Rendezvous.of_torch() or Rendezvous.of_environment()
    if rendezvous is not None and rendezvous.size > 1:
        return join_fixed_group(rendezvous, comm_options, timeout_s)
    _current = Session(Group(device=_take_device(comm_options), timeout_s=timeout_s), comm_options)
    return _current


def connect_to_supervisor(client: ControlClient, comm: CommOptions, timeout_s: float) -> Session:
    """The session of a worker that a supervisor started. Its group has this worker only, until `join`.

    Raises ValueError for a schedule that needs a fixed number of workers.
    """
    global _current
    if comm.schedule == "symmetric":
        raise ValueError(
            "comm.schedule='symmetric': the number of workers may change: must be one of auto, allreduce, "
            "reduce_scatter, all_to_all, tree where a supervisor has started them"
        )
    if "observe" in client.job:
        from kfuse.logs import set_up_logging  # in the commands' processes only

        set_up_logging(client.job["observe"]["log_level"], f"worker {client.worker}")
    _leave_sigterm_to_the_supervisor()
    _current = Session(Group(device=_take_device(comm), timeout_s=timeout_s), comm, client)
    _close_at_exit(_current)
    return _current


def _leave_sigterm_to_the_supervisor() -> None:
    """Ignores SIGTERM: where a whole job gets it (Slurm, systemd), the supervisor has a checkpoint written first."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: None)
        os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def join_fixed_group(
    rendezvous: Rendezvous, comm: CommOptions, timeout_s: float, record: Record | None = None
) -> Session:
    """The session of a worker of a job of fixed size, in its only view. Raises CommError if others do not connect."""
    global _current
    group, view = rendezvous.form_group(_take_device(comm), timeout_s, comm)
    _measure_links(group, comm)
    _current = Session(group, comm, record=record)
    _current.view = view
    _current.log_view()
    _close_at_exit(_current, rendezvous)
    return _current


def _measure_links(group: Group, comm: CommOptions) -> None:
    """Where the tree follows them: in each view, as it forms. Raises CommError."""
    if comm.tree == "latency":
        from kfuse.comm.latency import measure

        measure(group)


def close(session: Session, rendezvous: Rendezvous | None = None) -> None:
    """Closes the session's groups, when the process is about to end.

    rendezvous: of a job of fixed size. Its workers wait until all are done, `_CLOSE_S` at most; one that has failed
    does not wait.
    """
    failed = session.lost or getattr(sys, "last_value", None) is not None
    if rendezvous is not None and not failed:
        with contextlib.suppress(RuntimeError):  # the others take longer, or are gone
            rendezvous.await_others_at_end(_CLOSE_S)
    session.group.close(0.0 if failed else _CLOSE_S)
    drop_retired()
    if session.control_client is not None:
        session.control_client.close()


def _close_at_exit(session: Session, rendezvous: Rendezvous | None = None) -> None:
    process = os.getpid()

    def act() -> None:
        if os.getpid() == process:  # and not a child that was forked
            close(session, rendezvous)

    atexit.register(act)


def current() -> Session:
    """The session; made with default options if there is none yet."""
    return init()


def _check_torchs_group(session: Session) -> None:
    """Raises RuntimeError where the script has initialised torch's process group after this session of one worker."""
    if session.control_client is None and session.group.size == 1 and dist.is_available() and dist.is_initialized():
        size = dist.get_world_size()
        if size > 1:
            raise RuntimeError(
                f"torch.distributed has {size} ranks, and kfuse was initialised before, with this process alone: call "
                "init_process_group before kf.init and before the first optimizer of kfuse is made"
            )


def reset() -> None:
    """Forgets the session, so that `init` may be called again in the same process."""
    global _current
    if _current is not None and _current.control_client is not None:
        _current.control_client.close()
    _current = None


def _take_device(comm: CommOptions) -> torch.device:
    """This worker's device, set up for `comm`, and the current one from now on. Raises DeviceError if it cannot be."""
    device = devices.of(_choose_device())
    if comm.reproducible and device.asynchronous:
        from kfuse.determinism import make_deterministic

        make_deterministic()  # before the GPU is used
    device.make_current()
    return device.name


def _choose_device() -> torch.device:
    """The GPU that LOCAL_RANK names, among those that this process sees; the CPU where it sees none.

    The launcher has set LOCAL_RANK. A process that was started plainly has the GPU that is current in it.
    Raises DeviceError for a GPU that is not there: NCCL refuses two workers on one.
    """
    gpus, given = devices.count(), os.environ.get("LOCAL_RANK")
    if gpus == 0:
        return torch.device("cpu")
    from kfuse.elastic import protocol

    if given is None and gpus > 1 and protocol.ENV_CONTROL in os.environ:
        raise DeviceError(f"LOCAL_RANK is not set: must be 0 to {gpus - 1}, the GPU that its launcher gives a worker")
    index = devices.current() if given is None else int(given)
    if index >= gpus:
        raise DeviceError(
            f"LOCAL_RANK={index}: must be below {gpus}, the number of GPUs that this process sees, as each worker "
            "needs one of its own; where each process sees its own GPU only, LOCAL_RANK=0"
        )
    return torch.device("cuda", index)
