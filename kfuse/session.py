"""This process's place among the workers: its group, its rank, and what the leader is asked to announce.

`init()` finds out from the environment how the process was started: by a kfuse supervisor (the group may change while
training), by torchrun (a fixed group), or plainly (one worker).
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import logging
import operator
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from kfuse.comm import transports
from kfuse.comm.group import CommError, Group, drop_retired
from kfuse.comm.plan import CommOptions
from kfuse.comm.tail import Control
from kfuse.elastic import protocol
from kfuse.elastic.client import ControlClient, ControlError
from kfuse.elastic.protocol import Member, View
from kfuse.elastic.rendezvous import Rendezvous, own_address
from kfuse.observe.logs import set_up_logging

if TYPE_CHECKING:
    from kfuse.optim.base import DistributedOptimizer

Record = Callable[[str, dict[str, Any]], None]

_LOG = logging.getLogger("kfuse")

_ARRIVED = "arrived"  # in a view's store, once somebody comes from the view before
_POLL_S = 0.01
_MOST_LANES = 8  # only optimizers that take part in one backward need different ones
_CLOSE_S = 5.0  # at the end of a process, for the others to come to theirs
STOP_REASONS = ("", "interrupted", "terminated")  # Control.stop is an index into these


class ViewChanged(CommError):
    """The group is no more: a worker of it was lost."""


class Session:
    """One worker's membership. Made by `init`."""

    def __init__(
        self, group: Group, comm: CommOptions, control: ControlClient | None = None, record: Record | None = None
    ) -> None:
        """`record`: who keeps what is reported where there is no supervisor; None: nobody."""
        self.group, self.comm, self.control_client, self._record = group, comm, control, record
        self.view: View | None = None
        self.topology: str | None = None
        """The transport that a decision chose; None: the configured one."""
        self.tree: str | None = None
        """The same of the tree transport's shape."""
        self.latest_optimizer: Callable[[], DistributedOptimizer | None] = lambda: None
        self._optimizers: list[weakref.ref[DistributedOptimizer]] = []  # in the order in which they were made
        self.lanes = self._optimizers_made = 0
        """How many of the group's lanes this worker's optimizers use."""
        self._pending = Control()
        self._announced = Control()
        """The part of `_pending` that the step under way carries."""
        self.lr: tuple[float, float] | None = None
        """The training loop's learning rate and the part of it that is lr_scale."""
        self.workers_asked = 0
        """How many workers were last asked for, by a policy or kf.resize."""
        self.stop_asked = ""
        """Why to stop at the next step boundary (one of STOP_REASONS), where there is no supervisor to say it."""
        self.absorbs = False
        self.failure: CommError | None = None
        self.lost = False
        """The others cannot be reached any more."""
        self.left = False
        """A view was formed without this worker."""
        self._generation = 0  # of the view in force, or of the one being entered
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
    def workers(self) -> list[int]:
        """The numbers of the view's workers, in rank order."""
        return list(range(self.group.size)) if self.view is None else [member.worker for member in self.view.members]

    @property
    def elastic(self) -> bool:
        """Whether the number of workers can change."""
        return self.control_client is not None

    def register(self, optimizer: DistributedOptimizer) -> None:
        self._optimizers = [known for known in self._optimizers if known() is not None] + [weakref.ref(optimizer)]
        self.latest_optimizer = weakref.ref(optimizer)

    def new_lane(self) -> int:
        """The number of a lane for a new optimizer; the same on every rank, if they make the same optimizers.

        In turns, so that a process that makes many optimizers, one after another, does not hold ever more connections.
        """
        self._optimizers_made += 1
        self.lanes = min(self._optimizers_made, _MOST_LANES)
        return (self._optimizers_made - 1) % _MOST_LANES

    # -- the control word -----------------------------------------------------------------------------------------

    def ask(
        self,
        *,
        batch_size: int | None = None,
        lr_scale: float | None = None,
        topology: str | None = None,
        tree: str | None = None,
        sync: int | None = None,
        workers: int | None = None,
        replace: int | None = None,
    ) -> None:
        """What the leader announces with the next step. Only rank 0's requests are sent; other ranks' are dropped.

        `replace`: the number, not the rank, of a worker whose place a new one is to take.
        Raises TypeError where `workers` is not a whole number, ValueError for a topology or tree that does not exist,
        and for what reproducible sums rule out.
        """
        if batch_size is not None:
            self._pending = dataclasses.replace(self._pending, batch_size=batch_size)
        if lr_scale is not None:
            self._pending = dataclasses.replace(self._pending, lr_scale=lr_scale)
        if topology is not None:
            name = transports.choose(topology, self.comm.reproducible)
            if name not in transports.NAMES:
                raise ValueError(f"topology {name!r}: allowed are {', '.join(transports.NAMES)}")
            self._pending = dataclasses.replace(self._pending, transport=1 + transports.NAMES.index(name))
        if tree is not None:
            if tree not in transports.TREES:
                raise ValueError(f"tree {tree!r}: allowed are {', '.join(transports.TREES)}")
            self._pending = dataclasses.replace(self._pending, tree=1 + transports.TREES.index(tree))
        if sync is not None:
            if sync > 1 and self.comm.reproducible:
                raise ValueError(f"sync {sync}: comm.reproducible=true synchronises at every step")
            self._pending = dataclasses.replace(self._pending, sync_every=sync)
        if workers is not None:
            self.workers_asked = operator.index(workers)
            self._order("resize", workers=self.workers_asked)
        if replace is not None:
            self._order("replace", worker=replace)

    def _order(self, what: str, **fields: int) -> None:
        """Tells the supervisor, if this is the leader of an elastic job."""
        if self.control_client is not None and self.group.rank == 0:
            with contextlib.suppress(ControlError):  # as in `report`
                self.control_client.send(what, **fields)

    def state_dict(self) -> dict[str, Any]:
        """What was decided, and what is asked for and not yet announced: a resumed run must decide alike."""
        return {
            "topology": self.topology,
            "tree": self.tree,
            "workers_asked": self.workers_asked,
            "asked": dataclasses.asdict(dataclasses.replace(self._pending, generation=0, stop=0)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what another worker, or a checkpoint, has decided and asked for."""
        self._restore_transport(state["topology"], state["tree"])
        self.workers_asked = state["workers_asked"]
        self._pending = Control(**state["asked"])

    def take_control(self) -> Control:
        """The control word of the step under way (engine, on the leader)."""
        self._announced = self._pending
        client = self.control_client
        generation = 0
        if client is not None and self.view is not None:
            generation = client.proposed(self.view.generation)
        stop = self.stop_asked if client is None else client.stop_reason()
        index = STOP_REASONS.index(stop) if stop in STOP_REASONS else 0
        return dataclasses.replace(self._announced, generation=generation, stop=index)

    def take_asked(self) -> Control:
        """What is asked for, which the caller applies itself: it is not announced."""
        asked, self._pending = self._pending, Control()
        return asked

    def control_sent(self) -> None:
        """The step that carried the control word is complete; what was asked for since then waits for the next."""
        asked, announced = vars(self._pending), vars(self._announced)
        self._pending = Control(**{name: value for name, value in asked.items() if value != announced[name]})
        self._announced = Control()

    # -- views ----------------------------------------------------------------------------------------------------

    def ensure_joined(self) -> None:
        """Joins the others, if a supervisor started this worker and it has not joined yet."""
        if self.control_client is not None and self.view is None:
            self.join()

    def absorb(self, error: CommError) -> bool:
        """Whether a training loop will deal with this error: then the step under way just ends."""
        if self.absorbs:
            self.failure = error
        return self.absorbs

    def join(self) -> None:
        """Tells the supervisor that this worker is ready, and waits to be taken into a view.

        Whatever takes time (imports, data, model, optimizer) is best done before: others may be training.
        """
        client = self._client()
        client.send("ready")
        self._enter(client.await_first_view(), new=True)

    def switch(self, generation: int) -> bool:
        """Moves to the view of `generation`, at the same step boundary on every worker; False if this one leaves.

        Raises CommError if the view does not come about.
        """
        return self._enter(self._client().await_view(generation, self.group.timeout_s))

    def recover(self, error: CommError) -> bool:
        """After `error`: waits for the supervisor's verdict and moves to the view it gives; False if not in it.

        Raises CommError if that view breaks too, ControlError if no view comes.
        """
        client, generation = self._client(), self._generation
        if client.recovery(generation) is None:
            client.send("broken", generation=generation, why=str(error))
        return self._enter(client.await_recovery(generation, 2 * self.group.timeout_s + 10))

    def _enter(self, view: View, new: bool = False) -> bool:
        client = self._client()
        rank = view.rank_of(client.worker)
        self._generation = view.generation
        if rank is None:
            self.left = True
            return False
        old = self.group
        old.abort()
        group = _form_group(view, rank, old, self.check, new)
        try:
            group.connect_lanes(max(1, self.lanes))
        except CommError:
            group.retire()
            raise
        self.group = group
        old.retire()
        self.view = view
        self._regroup()
        client.forget(view.generation)
        client.send("joined", generation=view.generation)
        return True

    def check(self) -> None:
        """Raises ViewChanged if the supervisor replaced the view, ControlError if it is gone."""
        client = self._client()
        client.check()
        if client.recovery(self._generation) is not None:
            raise ViewChanged("a worker was lost: the supervisor has formed another view")

    def finish(self) -> bool:
        """Waits until the supervisor has the job's results; False if a worker was lost before that."""
        return self.control_client is None or self.control_client.await_over(self._generation)

    def _client(self) -> ControlClient:
        assert self.control_client is not None, "this job has no supervisor"
        return self.control_client

    def use_transport(self, name: str | None, tree: str | None) -> None:
        """Switches every optimizer to this transport and tree (None: the configured ones), between steps."""
        self.topology, self.tree = name, tree
        self._regroup()

    def _restore_transport(self, name: str | None, tree: str | None) -> None:
        """As `use_transport`; where nothing changes, a step that another training loop has begun goes on."""
        if (name, tree) != (self.topology, self.tree):
            self.use_transport(name, tree)

    def _regroup(self) -> None:
        if self.group.rank == 0:
            name = self.topology or transports.choose(self.comm.schedule, self.comm.reproducible)
            _LOG.info("view %d: workers %d, transport %s", self._generation, self.group.size, name)
        for known in self._optimizers:
            if (optimizer := known()) is not None:
                optimizer.engine.set_group(self.group, self.topology, self.tree)

    def give_up(self, why: str) -> None:
        """Tells the supervisor, if there is one, that the job must end: no other worker could go on either."""
        if self.control_client is not None:
            with contextlib.suppress(ControlError):
                self.control_client.send("fatal", why=why)

    def begin_training(self) -> None:
        """A training starts: what was asked for in an earlier one of this process, and its transport, are not this
        one's.

        Raises RuntimeError if another one is under way in an elastic job.
        """
        if self.elastic and self.in_training:
            raise RuntimeError(
                "another kf.fit or kf.DataLoader of this process is under way: in a job whose workers may change, let "
                "one end before the next begins"
            )
        self.training += 1
        self.in_training = True
        self._pending, self._announced = Control(), Control()
        self._restore_transport(None, None)

    def end_training(self, failed_at: int | None) -> None:
        """Tells the supervisor that this worker's training loop has ended, at this step if by an error."""
        self.in_training = False
        if self.control_client is not None and not sys.is_finalizing():
            with contextlib.suppress(ControlError):
                self.control_client.send("loop_ended", training=self.training, failed_at=failed_at)

    def report(self, kind: str, data: dict[str, Any]) -> None:
        """Sends a record to the supervisor, which keeps the run directory.

        If it is gone, that is no news for here: `check` says so at the next step boundary.
        """
        if self.control_client is not None:
            with contextlib.suppress(ControlError):
                self.control_client.send("record", kind=kind, data=data)
        elif self._record is not None:
            self._record(kind, data)


_current: Session | None = None


def init(comm: CommOptions | None = None, timeout_s: float | None = None) -> Session:
    """Joins the other workers and returns the session; a second call returns the first one's.

    comm: how gradients are reduced. timeout_s: how long any wait for another worker may take (60 s by default). With
    comm.reproducible torch is set to one CPU thread, since a matrix product's bits depend on the number of threads.
    The first optimizer calls it, if nothing has before.
    Raises RuntimeError if a session exists with other options, ControlError or CommError if joining fails.
    """
    global _current
    comm_options = comm or CommOptions()
    if _current is not None:
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
    if protocol.ENV_CONTROL in os.environ:
        return connect(ControlClient(timeout_s), comm_options, timeout_s)
    meeting = Rendezvous.of_environment()
    if meeting is not None and meeting.size > 1:
        return meet(meeting, comm_options, timeout_s)
    _current = Session(Group(device=_device(), timeout_s=timeout_s), comm_options)
    return _current


def connect(client: ControlClient, comm: CommOptions, timeout_s: float) -> Session:
    """The session of a worker that a supervisor started; it is alone until `join`."""
    global _current
    if "observe" in client.job:
        set_up_logging(client.job["observe"]["log_level"], f"worker {client.worker}")
    _leave_sigterm_to_the_supervisor()
    _current = Session(Group(device=_device(), timeout_s=timeout_s), comm, client)
    _close_at_exit(_current)
    return _current


def _leave_sigterm_to_the_supervisor() -> None:
    """Where a whole job gets SIGTERM (Slurm, systemd), the supervisor sees to a checkpoint first."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: None)
        os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def meet(meeting: Rendezvous, comm: CommOptions, timeout_s: float, record: Record | None = None) -> Session:
    """The session of a worker of a job of fixed size, in its only view. Raises CommError if the others do not come."""
    global _current
    try:
        store = meeting.store(timeout_s)
        store.set(f"member/{meeting.rank}", json.dumps([meeting.rank, os.getpid(), socket.gethostname()]))
        members = tuple(Member(*json.loads(store.get(f"member/{rank}"))) for rank in range(meeting.size))
        address = own_address(meeting.host, meeting.port)
    except (RuntimeError, OSError) as error:
        raise CommError(f"meeting {meeting.size} workers at {meeting.host}:{meeting.port}: {error}") from error
    hosts = [member.host for member in members]
    group = Group(meeting.rank, meeting.size, PrefixStore("view", store), _device(), timeout_s, address, hosts=hosts)
    _current = Session(group, comm, record=record)
    _current.view = View(1, members, (meeting.host, meeting.port), "start")
    _current._regroup()
    _close_at_exit(_current, meeting)
    return _current


def close(session: Session, meeting: Rendezvous | None = None) -> None:
    """Ends the session's groups, when the process is about to end.

    meeting: of a job of fixed size. Its workers agree that all are done, within `_CLOSE_S`; one that has failed does
    not wait for the others.
    """
    failed = session.lost or getattr(sys, "last_value", None) is not None
    if meeting is not None and not failed:
        others = [rank for rank in range(meeting.size) if rank != meeting.rank]
        with contextlib.suppress(RuntimeError):  # the others take longer, or are gone
            store = meeting.store(_CLOSE_S)
            store.set(f"done/{meeting.rank}", "")
            store.wait([f"done/{rank}" for rank in others])
            store.set(f"gone/{meeting.rank}", "")
            if meeting.rank == 0 and not meeting.agent_hosts:  # the store ends with this process
                store.wait([f"gone/{rank}" for rank in others])
    session.group.close(0.0 if failed else _CLOSE_S)
    drop_retired()


def _close_at_exit(session: Session, meeting: Rendezvous | None = None) -> None:
    process = os.getpid()

    def act() -> None:
        if os.getpid() == process:  # and not a child that was forked
            close(session, meeting)

    atexit.register(act)


def current() -> Session:
    """The session; made with default options if there is none yet."""
    return _current or init()


def reset() -> None:
    """Forgets the session, so that `init` may be called anew in the same process."""
    global _current
    if _current is not None and _current.control_client is not None:
        _current.control_client.close()
    _current = None


def _form_group(view: View, rank: int, old: Group, check: Callable[[], None], new: bool) -> Group:
    """The group of a view, with the old group's device and timeout.

    `new`: this worker was in no view before. It learns of one that takes it in as soon as that is proposed; the others
    come when they have made the steps until then, however long those take.
    """
    if view.size == 1:
        return Group(device=old.device, timeout_s=old.timeout_s, check=check)
    host, port = view.store
    try:
        store = TCPStore(host, port, None, False, timedelta(seconds=old.timeout_s), wait_for_workers=False)
        address = own_address(host, port)
        if not new:
            store.set(_ARRIVED, "")
        while new and view.reason in ("grow", "replace") and not store.check([_ARRIVED]):
            check()
            time.sleep(_POLL_S)  # not `wait`: cut into slices it fails after some hundred
    except (CommError, ControlError):
        raise
    except (RuntimeError, OSError) as error:
        raise CommError(f"view {view.generation}: no store at {host}:{port}") from error
    hosts = [member.host for member in view.members]
    return Group(rank, view.size, store, old.device, old.timeout_s, address, check, hosts)


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", os.environ.get(protocol.ENV_WORKER, "0"))) % torch.cuda.device_count()
    return torch.device("cuda", index)
