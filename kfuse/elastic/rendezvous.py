"""How workers find each other, over a store: those of a job of fixed size, and those of a view.

A job of fixed size has the store of torch's process group, where the script has initialised one, or the one that
torchrun's environment variables name. The supervisor opens a store for each view.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from kfuse.comm import devices
from kfuse.comm.group import EARLY, CommError, Group, in_thread, settled
from kfuse.elastic.protocol import ControlError, Member, View, place

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_JOB_TIMEOUT_S = 600.0  # rank 0 loads the data before it announces the job

# Keys in a view's store: a worker of the view before is at the switch; "comes/RANK": this rank is about to connect.
_ARRIVED, _COMES = "arrived", "comes/"
_POLL_S = 0.01
_CONNECT_S = 1.0  # an attempt to reach a view's store, which is there before the view is announced


@dataclass(frozen=True)
class Rendezvous:
    """This process's rank among `size` workers, and the address of the store over which they connect."""

    rank: int
    size: int
    host: str
    port: int
    torchs: Store | None = None  # the store of torch's default process group; None: no such group has been initialised

    @staticmethod
    def of_torch() -> Rendezvous | None:
        """That of torch's default process group; None where the script has initialised none."""
        if not (dist.is_available() and dist.is_initialized()):
            return None
        found = store = dist.distributed_c10d._get_default_store()
        while isinstance(found, PrefixStore):
            found = found.underlying_store
        host, port = (found.host, found.port) if isinstance(found, TCPStore) else ("", 0)
        return Rendezvous(dist.get_rank(), dist.get_world_size(), host, port, store)

    @staticmethod
    def of_environment() -> Rendezvous | None:
        """None where no such environment was set. Raises RuntimeError where a part of it is missing."""
        missing = [name for name in _VARIABLES if name not in os.environ]
        if missing:
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise RuntimeError(f"WORLD_SIZE={os.environ['WORLD_SIZE']}, but not set: {', '.join(missing)}")
            return None
        rank, size, host, port = (os.environ[name] for name in _VARIABLES)
        return Rendezvous(int(rank), int(size), host, int(port))

    def store(self, timeout_s: float) -> Store:
        """The store, without the keys of torchrun's earlier attempts. Raises RuntimeError if nobody hosts it."""
        # A clone has a timeout of its own.
        store = _connect(self) if self.torchs is None else self.torchs.clone()  # type: ignore[attr-defined]
        store.set_timeout(timedelta(seconds=timeout_s))
        return PrefixStore(f"kfuse/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)

    @property
    def hosts_store(self) -> bool:
        """Whether the store is this process's: rank 0's, unless torchrun's agent hosts it."""
        return self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

    def form_group(self, device: torch.device, timeout_s: float) -> tuple[Group, View]:
        """The group of all workers, and the job's only view. Raises CommError if the others do not connect."""
        limit_s = EARLY * timeout_s  # one worker may import, or read data, for longer than the others
        try:
            store = self.store(limit_s)
            store.set(f"member/{self.rank}", json.dumps([self.rank, os.getpid(), socket.gethostname()]))
            members = tuple(Member(*json.loads(store.get(f"member/{rank}"))) for rank in range(self.size))
            address = own_address(self.host, self.port) if self.host else None
        except (RuntimeError, OSError) as error:
            what = f"connecting {self.size} workers at {self.host}:{self.port}"
            raise CommError(f"{what}, for at most {limit_s:g} s ({EARLY} times comm.timeout_s): {error}") from error
        group = _new_group(self.rank, members, PrefixStore("view", store), device, timeout_s, address)
        return group, View(1, members, (self.host, self.port), "start")

    def await_others_at_end(self, timeout_s: float) -> None:
        """Waits until all workers have come to their end. Raises RuntimeError after the timeout."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        store = self.store(timeout_s)
        store.set(f"done/{self.rank}", "")
        store.wait([f"done/{rank}" for rank in others])
        store.set(f"gone/{self.rank}", "")
        if self.hosts_store:  # it ends with this process
            store.wait([f"gone/{rank}" for rank in others])

    def announce(self, job: dict[str, Any]) -> None:
        """Rank 0: sends the job's configuration (plain JSON values) to the others."""
        self.store(_JOB_TIMEOUT_S).set("job", json.dumps({"job": job}))

    def dismiss(self, status: int) -> None:
        """Rank 0, at its end: if no job was announced, the others exit with this status."""
        self.store(_JOB_TIMEOUT_S).compare_set("job", "", json.dumps({"status": status}))

    def await_job(self) -> dict[str, Any] | int:
        """The job that rank 0 sends, or the status to exit with. Raises CommError if it sends nothing in time."""
        try:
            message: dict[str, Any] = json.loads(self.store(_JOB_TIMEOUT_S).get("job"))
        except RuntimeError as error:
            alone = "torchrun sets RANK and WORLD_SIZE: for a run without it unset both"
            where = place(self.host, self.port)
            raise CommError(f"rank 0, at {where}, has announced no job ({alone}): {error}") from error
        return message["job"] if "job" in message else int(message["status"])


@functools.cache
def _connect(rendezvous: Rendezvous) -> Store:
    """One connection per process. Where rank 0 hosts the store, torch can open it too (multi_tenant)."""
    master = rendezvous.hosts_store
    timeout = timedelta(seconds=_JOB_TIMEOUT_S)
    return TCPStore(
        rendezvous.host, rendezvous.port, None, master, timeout, wait_for_workers=False, multi_tenant=master
    )


def own_address(host: str, port: int) -> str:
    """The address of this machine that connections to host:port leave from: the process there can reach it.

    Raises OSError where no way leads there.
    """
    family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # a datagram socket: nothing is sent
        return str(probe.getsockname()[0])


def _new_group(
    rank: int,
    members: Sequence[Member],
    store: Store,
    device: torch.device,
    timeout_s: float,
    address: str | None,
    check: Callable[[], None] | None = None,
) -> Group:
    """The group of several workers, over what their device takes. address: this machine's for gloo, or None."""
    size, hosts = len(members), [member.host for member in members]
    if devices.of(device).asynchronous:
        from kfuse.comm.nccl import NcclGroup  # only where there is a GPU

        return NcclGroup(rank, size, store, device, timeout_s, check, hosts)
    from kfuse.comm.gloo import GlooGroup

    return GlooGroup(rank, size, store, device, timeout_s, check, hosts, hostname=address)


def form_group(
    view: View, rank: int, old: Group, check: Callable[[], None], new: bool, early: Future[Group] | None = None
) -> Group:
    """The group of a view, with the old group's device and timeout. `check`: called while waiting; raises to end it.

    new: this worker was in no view before. It waits without a time limit until the others come, after the steps that
    they make before the switch. early: the future of `connected`. Raises CommError if the store or another worker
    cannot be reached, and what `check` raises.
    """
    if view.size == 1:
        return Group(device=old.device, timeout_s=old.timeout_s, check=check)
    joins = new and view.reason in ("grow", "replace")
    if early is None:
        group = connected(view, rank, old, check, meets=joins)
    else:
        try:
            group = settled(early, check, old.timeout_s).result()
        except TimeoutError:
            late = f"its workers {view.workers} did not connect within {old.timeout_s:.0f} s (comm.timeout_s)"
            raise CommError(f"view {view.generation}: {late}") from None
    with _needs_store(view):
        if not new:
            group.store.set(_ARRIVED, "")
        elif joins:
            _await_keys(group.store, [_ARRIVED], check, _POLL_S / 5)  # often: from then on the others wait for this one
    return group


def connected(view: View, rank: int, old: Group, check: Callable[[], None], meets: bool) -> Group:
    """The group, connected. The arguments: as of `form_group`.

    meets: waits in the store first, without a limit, until all are there: they come at different times.
    """
    host, port = view.store
    with _needs_store(view):
        # In a thread: torch waits for an answer of a store that is closed meanwhile.
        connecting = in_thread(partial(connect_store, host, port, old.timeout_s, check))
        store: Store = settled(connecting, check, 2 * old.timeout_s).result()
        store = PrefixStore(view.prefix, store) if view.prefix else store
        address = own_address(host, port)
        store.set(f"{_COMES}{rank}", "")
        if meets:
            _await_keys(store, [f"{_COMES}{each}" for each in range(view.size)], check, _POLL_S)
    return _new_group(rank, view.members, store, old.device, old.timeout_s, address, check)


@contextlib.contextmanager
def _needs_store(view: View) -> Iterator[None]:
    """Context: raises CommError where the view's store is not there, or not any more."""
    try:
        yield
    except (CommError, ControlError):
        raise
    except (RuntimeError, OSError) as error:
        host, port = view.store
        raise CommError(f"view {view.generation}: no store at {host}:{port}") from error


def _await_keys(store: Store, keys: list[str], check: Callable[[], None], pause_s: float) -> None:
    while not store.check(keys):
        check()
        time.sleep(pause_s)  # not `wait`: cut into slices it fails after some hundred


def connect_store(host: str, port: int, timeout_s: float, check: Callable[[], None]) -> TCPStore:
    """A view's store, connected to in short attempts: it may be closed, as another worker is lost and `check` raises.

    Raises RuntimeError or OSError after the timeout.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        check()
        try:
            attempt_s = min(timeout_s, _CONNECT_S)
            socket.create_connection((host, port), attempt_s).close()  # torch prints a trace where it cannot connect
            store = TCPStore(host, port, None, False, timedelta(seconds=attempt_s), wait_for_workers=False)
            store.set_timeout(timedelta(seconds=timeout_s))
            return store
        except (RuntimeError, OSError):
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_S)
