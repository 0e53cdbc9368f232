"""The workers of one view as a group: collectives, and waits that a lost worker cannot block for ever.

A wait polls in short slices, so that a worker notices a timeout, or a new view from the supervisor, while a peer is
silent. (With gloo only the neighbours of a lost rank get an error, and nothing can interrupt its blocking wait.)
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

_SLICE = timedelta(milliseconds=20)
_CUDA_SLICE_S = 20e-6
_LATE_GRACE_S = 5.0  # ranks that wait for the same one time out at about the same time

_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


class CommError(RuntimeError):
    """A collective failed or timed out. The message names the collective and the ranks that were waited for."""


class Pending:
    """Messages under way, with the peer each one waits for (None: all of them)."""

    def __init__(self, group: Group, what: str, works: list[tuple[Any, int | None]]) -> None:
        self.group, self.what, self.works = group, what, works
        self.started = time.monotonic()
        group.under_way.add(self)

    def done(self) -> bool:
        """Whether all messages have completed, without waiting."""
        return all(work.is_completed() for work, _ in self.works)

    def wait(self) -> None:
        """Returns when all messages have completed. Raises CommError on failure or after the group's timeout.

        On a CUDA device this orders the current stream after the messages. The host is blocked only where the group may
        change: else parameters could be updated with an incomplete reduction that a lost worker left.
        """
        for work, peer in self.works:
            if self.group.polls:
                self._wait_one(work, peer)
            if self.group.device.type == "cuda":
                work.wait()
        self.group.under_way.discard(self)

    def _wait_one(self, work: Any, peer: int | None) -> None:
        whom = self.group.others if peer is None else f"rank {peer}"
        while True:
            if self.group.device.type == "cuda":  # NCCL's own wait has no slices
                if work.is_completed():
                    return
                time.sleep(_CUDA_SLICE_S)
            else:
                with contextlib.suppress(RuntimeError):  # a timeout, or a failure that the next lines look at
                    work.wait(_SLICE)
                    return
            if work.is_completed():
                try:
                    work.wait()  # it may have come through since: then this returns
                    return
                except RuntimeError as error:
                    raise CommError(f"{self.what}: lost contact with {whom}: {_first_line(error)}") from error
            self.group.check()
            waited = time.monotonic() - self.started
            if waited > self.group.timeout_s:
                late = self.group.late_ranks(self.what) if peer is None else ""
                raise CommError(f"{self.what}: waited {waited:.1f} s for {whom} (comm.timeout_s){late}")


class Group:
    """A fixed set of workers: collectives on one device, for one generation of the view.

    Built from a store every worker can reach; a single worker needs none.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        store: Store | None = None,
        device: torch.device | None = None,
        timeout_s: float = 60.0,
        hostname: str | None = None,
        check: Callable[[], None] | None = None,
        hosts: Sequence[str] | None = None,
    ) -> None:
        """`hostname`: the address gloo listens on. `check`: called while waiting; raises to end the wait.

        `hosts`: the name of each rank's machine; without it, they all are on one.
        """
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self.hosts = [""] * size if hosts is None else list(hosts)
        self.under_way: set[Pending] = set()
        self.device = device or torch.device("cpu")
        self._arguments = (self.device, timeout_s, hostname, check, hosts)  # of this group and its further lanes
        self._number, self._further = 0, list[Group]()
        self.check = check or (lambda: None)
        self.polls = check is not None or self.device.type != "cuda"
        """Whether a wait blocks the host, which then polls `check` for a new view."""
        self._store = store
        self._pg: Any = None
        self._share_pg: Any = None
        if size > 1:
            if store is None:
                raise ValueError(f"a group of {size} workers needs a store")
            lanes = ("main",) if self.device.type == "cuda" else ("main", "share")
            self._pg, *share = self._form(
                lambda: [
                    _process_group(PrefixStore(lane, store), rank, size, self.device, timeout_s, hostname)
                    for lane in lanes
                ]
            )
            self._share_pg = share[0] if share else self._pg

    def lane(self, number: int) -> Group:
        """The same workers over further connections: messages of different lanes may be started in any order.

        Lane 0 is this group itself. The others are connected as they are first asked for, which every rank must do at
        the same point. With NCCL all lanes are one still: there the ranks must start all messages in the same order.
        Raises CommError if the others do not come.
        """
        if number == self._number or self.size == 1 or self.device.type == "cuda":
            return self
        assert self._store is not None
        while len(self._further) < number:
            store = PrefixStore(f"lane {len(self._further) + 1}", self._store)
            lane = Group(self.rank, self.size, store, *self._arguments)
            self._further.append(lane)
            lane._number = len(self._further)
        return self._further[number - 1]

    def connect_lanes(self, count: int) -> None:
        """All lanes that any rank's `count` asks for, on every rank at the same point. Raises CommError."""
        if self.size > 1 and self.device.type != "cuda":
            counts = self.all_gather(torch.tensor([count]), "number of lanes")
            self.lane(max(int(each) for each in counts) - 1)

    @property
    def others(self) -> str:
        """The other ranks, for messages: "rank 1", "the other 3 ranks"."""
        return f"rank {1 - self.rank}" if self.size == 2 else f"the other {self.size - 1} ranks"

    def _form(self, connect: Callable[[], list[Any]]) -> list[Any]:
        """Runs `connect` in a thread, since nothing can interrupt it while it waits for a lost worker."""
        made: list[Any] = []
        errors: list[Exception] = []
        over = threading.Event()

        def run() -> None:
            try:
                made.extend(connect())
            except Exception as error:
                errors.append(error)
            over.set()

        threading.Thread(target=run, name="kfuse-connect", daemon=True).start()
        deadline = time.monotonic() + self.timeout_s
        while not over.wait(_SLICE.total_seconds()):
            self.check()
            if time.monotonic() > deadline:
                raise CommError(f"{self.others} did not connect within {self.timeout_s:.0f} s")
        if errors:
            raise CommError(f"connecting to {self.others}: {_first_line(errors[0])}")
        return made

    def abort(self) -> None:
        """Before the next group is formed: ends messages under way that would hold the device for ever (NCCL)."""
        if self.device.type == "cuda" and self._pg is not None:
            self._pg.abort()

    def retire(self) -> None:
        """Drops this group as soon as possible (see `drop_retired`): while a message is under way, dropping it blocks.

        A message to a lost peer fails at once; one between survivors fails when the other side drops its group, or
        after the timeout.
        """
        _RETIRED.extend([self, *self._further])
        drop_retired()

    def close(self, timeout_s: float) -> bool:
        """Ends the group's threads and connections; it cannot be used any more.

        To be called before the interpreter ends: a thread of gloo that has a tensor to free after that ends the process
        with SIGABRT. False if messages are still under way after the timeout: then nothing is ended, since that would
        block.
        """
        deadline = time.monotonic() + timeout_s
        lanes = [lane.close(timeout_s) for lane in self._further]
        while not all(pending.done() for pending in self.under_way):
            if time.monotonic() > deadline:
                return False
            time.sleep(_SLICE.total_seconds())
        self.under_way.clear()
        self._pg = self._share_pg = self._store = None
        return all(lanes)

    def all_reduce(self, tensor: Tensor, what: str, op: str = "sum") -> Pending:
        """Starts an in-place all-reduce; "avg" sums (the caller divides)."""
        if self.size == 1:
            return Pending(self, what, [])
        options = dist.AllreduceOptions()
        options.reduceOp = _OPS[op]
        return Pending(self, what, [(self._pg.allreduce([tensor], options), None)])

    def all_to_all(self, out: Tensor, into: Sequence[int], tensor: Tensor, cut: Sequence[int], what: str) -> Pending:
        """Starts sending `tensor` (1-D): cut[r] elements to rank r. into[r] elements of `out` come from rank r."""
        options = dist.AllToAllOptions()
        return Pending(self, what, [(self._pg.alltoall_base(out, tensor, list(into), list(cut), options), None)])

    def share(self, parts: Sequence[Tensor], what: str) -> Pending:
        """Starts giving every rank all `parts`; rank r has parts[r], and receives the others in place.

        May be started when its data are ready, whatever all_to_all and all_reduce do meanwhile: with gloo these
        messages have a lane of their own, since a lane's messages must be started in the same order on all ranks.
        (Broadcasts: gloo's own all-gather takes almost twice as long.)
        """
        works: list[tuple[Any, int | None]] = []
        for source, part in enumerate(parts):
            if part.numel():
                peer = None if source == self.rank else source
                works.append((self._share_pg.broadcast([part], _broadcast_from(source)), peer))
        return Pending(self, what, works)

    def broadcast(self, tensor: Tensor, what: str, source: int = 0) -> Pending:
        """Starts giving every rank the tensor of rank `source`, in place."""
        if self.size == 1:
            return Pending(self, what, [])
        work = self._pg.broadcast([tensor], _broadcast_from(source))
        return Pending(self, what, [(work, source if self.rank != source else None)])

    def all_gather(self, tensor: Tensor, what: str) -> list[Tensor]:
        """Every rank's tensor (one shape, one dtype), in rank order."""
        out = [torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device) for _ in range(self.size)]
        out[self.rank].copy_(tensor)
        if self.size > 1:
            self.share(out, what).wait()
        return out

    def barrier(self, what: str = "barrier") -> None:
        """Returns when every rank has come here. Raises CommError."""
        self.all_reduce(torch.zeros(1, device=self.device), what).wait()

    def late_ranks(self, what: str) -> str:
        """After a timeout: text for the error message that names the ranks which did not report a timeout too."""
        if self._store is None:
            return ""
        key = f"late/{what}"
        try:
            self._store.set(f"{key}/{self.rank}", "1")
            deadline = time.monotonic() + _LATE_GRACE_S
            late = set(range(self.size))
            while late and time.monotonic() < deadline:
                late = {r for r in late if not self._store.check([f"{key}/{r}"])}
                time.sleep(0.05)
        except RuntimeError:  # the store is lost too: the timeout is reported without names
            return ""
        if not late or len(late) == self.size:
            return ""
        return "; silent: " + ", ".join(f"rank {r}" for r in sorted(late))


_RETIRED: list[Group] = []


def drop_retired() -> None:
    """Drops the retired groups that have no message under way any more; called at step boundaries."""
    for group in [g for g in _RETIRED if all(pending.done() for pending in g.under_way)]:
        group.under_way.clear()  # each knows its group: a circle would keep both, and sockets and threads, for long
        _RETIRED.remove(group)


def _broadcast_from(source: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = source, 0
    return options


def _process_group(
    store: Store, rank: int, size: int, device: torch.device, timeout_s: float, hostname: str | None
) -> Any:
    """A process group for kfuse alone, beside any that the user has. It is not registered in torch.distributed."""
    timeout = timedelta(seconds=timeout_s)
    if device.type == "cuda":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        group = dist.ProcessGroupNCCL(store, rank, size, nccl)
        group.eager_connect_single_device(device)  # here, where waiting for the others can be given up
        return group
    backend: Any = dist.ProcessGroupGloo  # its options are not in torch's type stubs
    gloo = backend._Options()
    gloo._devices = [backend.create_device(hostname=hostname) if hostname else backend.create_default_device()]
    gloo._timeout = 2 * timeout + timedelta(seconds=30)  # our own timeout comes first, and names the late ranks
    gloo._threads = 2
    return backend(store, rank, size, gloo)


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
