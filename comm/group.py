"""The workers of one view as a group: collectives, and waits that a lost worker cannot block for ever.

`Group` is one worker alone. Several are connected by gloo (`gloo.GlooGroup`) or by NCCL (`nccl.NcclGroup`).
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from kfuse.comm.buckets import ALIGN
from kfuse.comm.settings import BUSY

SLICE_S = 0.02  # between two looks of a wait
EARLY = 10  # times comm.timeout_s: the limit until each optimizer has made two steps
CONNECT_THREAD = "kfuse-connect"
GRACE_S = 5.0  # for others to say that they timed out too: ranks that wait for one rank time out together
_OPS = dist.ReduceOp
# The operations of `Group.all_reduce`, as torch has them; for "avg" the caller divides.
REDUCE_OPS: dict[str, Any] = {"sum": _OPS.SUM, "avg": _OPS.SUM, "min": _OPS.MIN, "max": _OPS.MAX}

Made = TypeVar("Made")


class CommError(RuntimeError):
    """A collective failed or timed out. The message names the collective and the ranks that were waited for."""


def in_thread(act: Callable[[], Made], drop: Callable[[Made], object] = lambda made: None) -> Future[Made]:
    """Runs `act` in a thread: nothing can interrupt one that waits for a process that is lost.

    drop: called with what `act` has made after the future was cancelled.
    """
    outcome: Future[Made] = Future()

    def run() -> None:
        made: list[Made] = []
        try:
            made.append(act())
            outcome.set_result(made[0])
        except InvalidStateError:  # it was cancelled: nobody waits any more
            drop(made[0])
        except Exception as error:
            with contextlib.suppress(InvalidStateError):
                outcome.set_exception(error)

    threading.Thread(target=run, name=CONNECT_THREAD, daemon=True).start()
    return outcome


def settled(outcome: Future[Made], check: Callable[[], None], limit_s: float) -> Future[Made]:
    """The future, once it is done. Raises TimeoutError, and what `check` raises; then it is cancelled."""
    deadline = time.monotonic() + limit_s
    try:
        while not futures.wait([outcome], SLICE_S).done:
            check()
            if time.monotonic() > deadline:
                raise TimeoutError
    finally:
        outcome.cancel()
    return outcome


class Pending:
    """Messages under way, with the peer each one waits for (None: all of them)."""

    def __init__(self, group: Group, what: str, works: list[tuple[Any, int | None]]) -> None:
        self.group, self.what, self.works = group, what, works
        self.limit_s = group.limit_s  # after which it is late; a GPU may run it when the host is steps ahead
        group.under_way[self] = None

    def done(self) -> bool:
        """Whether all messages have ended, without waiting. One that failed has ended too: `wait` tells."""
        return all(work.is_completed() for work, _ in self.works)

    def wait(self) -> None:
        """The host waits for all messages. Raises CommError on failure or after the group's timeout."""
        self.group.under_way.pop(self, None)

    def release(self) -> None:
        """All messages have ended: only how is kept for `wait`, since each of them keeps its connection open."""
        self.works.clear()

    def wait_on_stream(self) -> None:
        """Later work on the device's current stream begins when all messages have completed. Raises CommError.

        With gloo the host waits. With NCCL it does not, and `Group.settle` tells of a later failure.
        """
        self.wait()


@dataclass(frozen=True)
class Links:
    """The measured links of a view, by rank and rank. Both matrices are symmetric, and the same on every worker."""

    latencies: tuple[tuple[float, ...], ...]  # seconds of a message of a few bytes; 0.0 from a rank to itself
    throughputs: tuple[tuple[float | None, ...], ...]  # bytes a second beyond that; None from a rank to itself

    def seconds(self, nbytes: int) -> list[list[float]]:
        """By rank and rank: seconds that a message of `nbytes` takes, latency + bytes / throughput."""
        return [
            [0.0 if rate is None else latency + nbytes / rate for latency, rate in zip(*row, strict=True)]
            for row in zip(self.latencies, self.throughputs, strict=True)
        ]


@dataclass(frozen=True)
class Costs:
    """A group's constants, as `cost.probe` fits them: alpha and beta of each schedule (`cost.SCHEDULES`)."""

    alpha: Mapping[str, float]
    beta: Mapping[str, float]
    largest_bytes: float = float("inf")  # of the messages that were measured: nothing is known of much larger ones
    probe_s: float = 0.0
    hosts: Sequence[str] = ()  # names of the machines on which they were measured, sorted


class Group:
    """A fixed set of workers: collectives on one device, for one generation of the view. This class: one worker."""

    links: Links | None = None  # between the workers, once they have been measured (`topology.measure`)
    waits_each_step: bool = False  # whether `settle` blocks the host until all messages have ended (NCCL)
    costs: Costs | None = None  # what its messages cost, once a probe has measured them (`comm.schedule=auto`)
    in_one_order: bool = False  # whether messages of all optimizers must be started in one order on all ranks
    adds_up: bool = False  # whether it has `reduce_scatter`
    swap_below: int = 0  # bytes below which two workers exchange a tensor in one message; 0: never

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        store: Store | None = None,
        device: torch.device | None = None,
        timeout_s: float = 60.0,
        check: Callable[[], None] | None = None,
        hosts: Sequence[str] | None = None,
    ) -> None:
        """store: one that every worker can reach. check: given where the group may change; is called while waiting, and
        raises to end the wait. hosts: the name of each rank's machine; without it all ranks are on one.
        """
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self.hosts = [""] * size if hosts is None else list(hosts)
        self.after = [(r + 1) % size for r in range(size)]  # by rank, the one that `pass_on` sends to
        if len({*self.hosts}) > 1:
            from kfuse.comm.copies import ranks_after

            self.after = ranks_after(self.hosts)
        self.before = sorted(range(size), key=self.after.__getitem__)  # and the one that it receives from
        self.device = device or torch.device("cpu")
        self.check = check or (lambda: None)
        self.fixed = check is None  # whether the workers stay the same until the job ends
        self.under_way: dict[Pending, None] = {}  # what has not been waited for, in the order of the starts
        self.numbers: Sequence[int] = range(size)  # what errors call each rank: in a part of a group, its rank there
        self._store = store
        # What has not made its first two steps in this group yet: engines; of a fixed job itself, until one is made.
        self.first_steps = WeakSet[object]()
        self._meetings = Counter[str]()

    @property
    def limit_s(self) -> float:
        """Seconds after which a message is late: in first steps, where one worker may compile or read for longer than
        the others, ten times as many.
        """
        return EARLY * self.timeout_s if self.first_steps else self.timeout_s

    def whom(self, peer: int | None = None) -> str:
        """Names a rank in messages; None: all other ranks ("rank 1", "the other 3 ranks")."""
        if peer is None and self.size != 2:
            return f"the other {self.size - 1} ranks"
        return f"rank {self.numbers[1 - self.rank if peer is None else peer]}"

    @property
    def store(self) -> Store:
        """What all workers of the view can reach. Only where there are several."""
        assert self._store is not None
        return self._store

    # -- its connections ------------------------------------------------------------------------------------------

    def connect(
        self, act: Callable[[], Made], drop: Callable[[Made], None], what: str = "connecting", late: str = "connect"
    ) -> Made:
        """What `act` returns, which runs in a thread.

        drop: called with what `act` has made after this method gave up. what: what `act` does, and late: what the
        others did not do in time, for errors. Raises CommError if `act` fails or is late, and what `check` raises.
        """
        limit_s = self.limit_s
        self.check()
        try:
            outcome = settled(in_thread(act, drop), self.check, limit_s)
        except TimeoutError:
            raise CommError(f"{self.whom()} did not {late} within {limit_s:.0f} s (comm.timeout_s)") from None
        if error := outcome.exception():
            raise CommError(f"{what} to {self.whom()}: {first_line(error)}")
        return outcome.result()

    def lane(self, number: int) -> Group:
        """The same workers over further connections: messages of different lanes may be started in any order.

        Lane 0 is this group. The others are connected as they are first asked for, by every rank at the same point.
        With NCCL all lanes are one, and `in_one_order` is set. Raises CommError.
        """
        return self

    def connect_lanes(self, count: int) -> None:
        """All lanes that any rank's `count` asks for, on every rank at the same point. Raises CommError."""

    def finish(self) -> None:
        """Before a planned change of the view, on every rank at the same step boundary: returns when all that this rank
        sent has arrived. No message follows. Raises CommError.
        """

    def abort(self) -> None:
        """After a loss, before the next group is formed: ends messages that would hold the device for ever (NCCL)."""

    def retire(self) -> None:
        """Drops this group once no message is under way (see `drop_retired`): dropping it earlier would block."""
        _RETIRED.append(self)
        drop_retired()

    def disconnect(self) -> None:
        """Ends the connections. No message is under way, and none follows."""

    def close(self, timeout_s: float) -> bool:
        """Ends threads and connections before the process ends. False if messages are still under way in the end."""
        return True

    # -- messages -------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Before a step's sums are used: raises CommError if a message has failed.

        With NCCL the host waits here for all messages, where the group may change: else parameters could be updated
        with an incomplete sum that a lost worker left.
        """

    def follow(self, what: str, enqueue: Callable[[], None]) -> Pending:
        """`enqueue` puts work on the current stream that waits for other ranks, and is no message of this group. It is
        watched as a message is: if it takes longer than the timeout, the group ends.
        """
        enqueue()
        return Pending(self, what, [])

    def all_reduce(self, tensor: Tensor, what: str, op: str = "sum") -> Pending:
        """Starts an in-place all-reduce; "avg" sums (the caller divides)."""
        return Pending(self, what, [])

    def all_to_all(self, out: Tensor, into: Sequence[int], tensor: Tensor, cut: Sequence[int], what: str) -> Pending:
        """Starts sending `tensor` (1-D): cut[r] elements to rank r. into[r] elements of `out` come from rank r."""
        out.copy_(tensor)
        return Pending(self, what, [])

    def to_few(self, out: Tensor, into: Sequence[int], tensor: Tensor, cut: Sequence[int], what: str) -> Pending:
        """As `all_to_all`, where most ranks have nothing for each other."""
        return self.all_to_all(out, into, tensor, cut, what)

    def shards(self, numel: int, unit: int = ALIGN) -> list[slice]:
        """Parts of a flat buffer that this group exchanges in the least time: rank r's is the r-th.

        Their lengths are multiples of `unit` (but for the end), and equal but for the last ones, which may be smaller
        or empty.
        """
        step = -(-numel // (self.size * unit)) * unit
        return [slice(min(r * step, numel), min((r + 1) * step, numel)) for r in range(self.size)]

    def share(self, flat: Tensor, what: str, cuts: Sequence[slice]) -> Pending:
        """Starts giving every rank all of `flat` (1-D), in place: rank r has the part cuts[r].

        With gloo it may be started when its data are ready, whatever all_to_all and all_reduce do meanwhile.
        """
        return Pending(self, what, [])

    def pass_on(self, out: Tensor, tensor: Tensor, what: str) -> Pending:
        """Starts sending `tensor` (1-D) to the rank `after` this one; what the one `before` it sends comes to `out`.

        Several ranks. May be started when its data are ready, in the order of all that `share` and this one start.
        """
        into, cut = self._for_one(out, self.before[self.rank]), self._for_one(tensor, self.after[self.rank])
        return self.to_few(out, into, tensor, cut, what)

    def _for_one(self, tensor: Tensor, peer: int) -> list[int]:
        """The split sizes of a message with this rank alone."""
        return [tensor.numel() if r == peer else 0 for r in range(self.size)]

    def reduce_scatter(self, flat: Tensor, what: str, cuts: Sequence[slice]) -> Pending:
        """Starts giving rank r the part cuts[r], which is one of `shards`, of the sum of all ranks' `flat` (1-D), in
        place; the other parts are undefined then. Only where the group `adds_up`.
        """
        return Pending(self, what, [])

    def sum_among(self, flat: Tensor, ranks: Sequence[int], what: str) -> Iterator[Pending]:
        """The messages that sum `flat` (1-D) over these ranks, in ascending order, in place. Every rank runs it.

        Each message is to be waited for before the next one is asked for. Here the other ranks add zeros.
        """
        yield self.all_reduce(flat if self.rank in ranks else torch.zeros_like(flat), what)

    def broadcast(self, tensor: Tensor, what: str, source: int = 0) -> Pending:
        """Starts giving every rank the tensor of rank `source`, in place."""
        return Pending(self, what, [])

    def all_gather(self, tensor: Tensor, what: str) -> list[Tensor]:
        """Every rank's tensor (one shape, one dtype), in rank order. The host waits. Raises CommError."""
        return [tensor.to(self.device, copy=True)]

    def in_pairs(self, act: Callable[[], None], what: str) -> None:
        """Runs `act`, whose messages are those of `exchange`. Raises CommError."""
        act()

    def exchange(self, sent: Tensor, received: Tensor, peer: int, what: str) -> None:
        """Sends `sent` to rank `peer` and receives `received` from it, both 1-D, of one dtype. The host waits.

        Inside `in_pairs` only. Raises CommError or RuntimeError.
        """

    def take_links(self, links: Links) -> None:
        """Sets `links`, of all lanes."""
        self.links = links

    def barrier(self, what: str = "barrier") -> None:
        """Returns when every rank has come here, and all messages before have completed. Raises CommError."""
        self.all_reduce(torch.zeros(1, dtype=torch.float32, device=self.device), what).wait()

    def meet(self, what: str) -> None:
        """Returns when every rank has called it with this `what`; it sends no message. Before a collective of the
        user's code: a rank that starts one alone would get the others' messages as its own. Raises CommError.
        """
        if self._store is None or self.size == 1:
            return
        number, deadline = self._meetings[what], time.monotonic() + self.timeout_s
        self._meetings[what] += 1
        while missing := self._missing(f"meet/{what}/{number}", what):
            self.check()
            if time.monotonic() > deadline:
                whom = ", ".join(f"rank {rank}" for rank in missing)
                raise CommError(f"{what}: waited {self.timeout_s:.1f} s for {whom}: every worker must call it; {BUSY}")
            time.sleep(SLICE_S / 10)
        if number:  # all have left the meeting before, as they are here
            with contextlib.suppress(RuntimeError):
                self._store.delete_key(f"meet/{what}/{number - 1}/{self.rank}")

    def late_ranks(self, what: str) -> str:
        """After a timeout: text for the error message that names the ranks which did not report a timeout too."""
        late, deadline = list(range(self.size)), time.monotonic() + GRACE_S
        with contextlib.suppress(CommError):  # the store may be lost too
            while late and time.monotonic() < deadline:
                late = self._missing(f"late/{what}", what)
                time.sleep(0.05)
        return "; silent: " + ", ".join(self.whom(r) for r in late) if 0 < len(late) < self.size else ""

    def _missing(self, key: str, what: str) -> list[int]:
        """Sets this rank's `key` in the store. Returns the ranks that have not set theirs. Raises CommError."""
        keys = [f"{key}/{rank}" for rank in range(self.size)]
        try:
            self.store.set(keys[self.rank], "1")
            return [rank for rank, each in enumerate(keys) if not self.store.check([each])]
        except RuntimeError as error:
            raise CommError(f"{what}: lost contact with the store of {self.whom()}: {first_line(error)}") from error


_RETIRED: list[Group] = []


def drop_retired() -> None:
    """Drops the retired groups that have no message under way any more; called at step boundaries."""
    for group in [g for g in _RETIRED if all(pending.done() for pending in g.under_way)]:
        for pending in group.under_way:
            pending.release()
        group.under_way.clear()
        _RETIRED.remove(group)
        threading.Thread(target=group.disconnect, name="kfuse-disconnect").start()  # gloo takes tens of milliseconds


def keep_for_ever(group: Group) -> None:
    """Keeps this group and all retired ones until the process has ended. Freeing a group of gloo whose messages are
    under way can take longer than the interpreter's end, which aborts the process.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object([group, *_RETIRED]))


def first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
