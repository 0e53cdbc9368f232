"""Groups of several workers on GPUs, over torch's ProcessGroupNCCL. Imported only where the device is a GPU.

`nccl_library` makes and ends the process group. What torch and NCCL do (named by function, so that another version's
line is found too; torch 2.13, NCCL 2.30):

1) A work counts as completed when it failed (WorkNCCL::isCompleted), and after an abort it looks like one that came
   through. So an error is looked for before success is believed, and one of ours is kept before the abort.
2) work.synchronize() orders the current stream and never blocks the host; work.wait() blocks it, and aborts
   (WorkNCCL::wait). abort() and shutdown() may block for ever (abort waits for a std::async, whose future joins it), so
   each runs in a thread of its own.
3) A communicator takes messages in one order on all ranks, and two communicators at once are no way out.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.futures import Future

from kfuse.comm import devices
from kfuse.comm import nccl_library as library
from kfuse.comm.buckets import ALIGN
from kfuse.comm.collective_options import all_reduce_by, broadcast_from, reduce_to
from kfuse.comm.devices import Event
from kfuse.comm.group import CommError, Group, Pending, first_line
from kfuse.comm.options import CommOptions

_LOG = logging.getLogger("kfuse")

_SLICE_S = 50e-6  # between two looks of the host's wait
_WATCH_S = 0.1  # between two looks of the thread
_END_S = 10.0  # for an abort, or a shutdown: it may hang


class NcclPending(Pending):
    """Messages on the communicator's own stream, which takes them in the order in which they were started."""

    def __init__(self, group: NcclGroup, what: str, works: list[tuple[Any, int | None]], ready: Event) -> None:
        """ready: happens when the device has computed what the messages send."""
        self._nccl, self._ready = group, ready
        self._since: float | None = None
        super().__init__(group, what, works)

    def wait(self) -> None:
        self.wait_on_stream()
        self._nccl.wait_for(self)

    def wait_on_stream(self) -> None:
        self._nccl.raise_failure()
        for work, _ in self.works:
            work.synchronize()

    def failed(self) -> Any:
        """The work that has ended with an error; None if there is none. Never waits."""
        for work, _ in self.works:
            # Without a watchdog only an error sets this future (WorkNCCL::checkAndSetException), as one asks whether
            # the work is completed. Work::exception and is_success cannot be asked from Python.
            if work.is_completed() and (result := work.get_future_result()).done() and int(result.value()):
                return work
        return None

    def waited_s(self) -> float:
        """Seconds for which this message has waited for other ranks: not for messages before it, or for its data."""
        if self._since is None:
            if not self._ready.query():
                return 0.0
            self._since = time.monotonic()
        return time.monotonic() - self._since


class _Followed:
    """Work on a stream, of no process group, in the place of a Work of torch's."""

    def __init__(self, over: Event) -> None:
        self._over = over

    def is_completed(self) -> bool:
        return self._over.query()

    def synchronize(self) -> None:
        self._over.wait()

    def get_future_result(self) -> Any:
        return Future()  # it never tells of an error: one of the device is raised by `query`


class NcclGroup(Group):
    """Workers that NCCL connects: one communicator, on a stream of its own.

    The host waits for messages in `Pending.wait`, and in `settle` where the group may change. A thread looks at the
    oldest message too, since the host can be blocked without a wait: because the device's queue is full, or as it reads
    a value. The thread ends the communicator when that message fails or takes longer than the timeout, or when `check`
    raises.
    """

    in_one_order = False
    """Several optimizers use this group. `lane` sets it."""
    adds_up = True
    _pg: Any
    """torch's process group; None once it has ended."""
    _failure: str
    """Why the group cannot be used any more; empty while it can. Set before the communicator is ended."""
    _ending: threading.Event | None
    """Is set when the communicator has ended; None before its end has begun."""
    _over: threading.Event
    """Ends the thread that looks at the messages."""
    _lock: threading.RLock
    """Of these, and of `under_way`: the host and the group's thread change them."""

    def __init__(
        self,
        rank: int,
        size: int,
        store: Store,
        device: torch.device,
        timeout_s: float = 60.0,
        check: Callable[[], None] | None = None,
        hosts: Sequence[str] | None = None,
        options: CommOptions | None = None,
    ) -> None:
        """check: given where the group may change. Raises CommError if the others do not connect.

        Raises ValueError for an option that this NCCL does not have.
        """
        super().__init__(rank, size, store, device, timeout_s, check, hosts)
        self.waits_each_step = check is not None
        self._device = devices.of(device)
        self._lock, self._over = threading.RLock(), threading.Event()
        self._failure, self._ending = "", None
        nccl = library.options_of(options or CommOptions(), timeout_s)
        make = partial(library.connected, PrefixStore("main", store), rank, size, self._device, nccl, timeout_s)
        self._pg, first = self.connect(make, lambda made: library.abort(made[0]))
        threading.Thread(target=self._watch, name="kfuse-nccl", daemon=True).start()
        try:
            self.barrier("connecting")
        except BaseException:
            self.abort()
            raise
        del first  # it holds the first message's tensor, which has come through only now

    def lane(self, number: int) -> Group:
        self.in_one_order = self.in_one_order or number > 0
        return self

    # -- failures -------------------------------------------------------------------------------------------------

    def raise_failure(self) -> None:
        """Raises CommError if a message has failed or is late: then no other can be started or waited for."""
        if not self._failure:
            return
        with self._lock:  # the abort is over, or hangs
            if self.waits_each_step:
                raise CommError(self._failure)
        raise CommError(f"{self._failure}; parameters may have been updated with incomplete sums: use a checkpoint")

    def _look(self) -> None:
        """Drops the messages that have come through. If the next one has failed, or is late, ends the group."""
        with self._lock:
            while self.under_way and not self._failure:
                message = next(iter(self.under_way))
                assert isinstance(message, NcclPending)
                peers = {peer for _, peer in message.works}
                whom = f"rank {peers.pop()}" if len(peers) == 1 and None not in peers else self.others
                try:
                    completed, failed = message.done(), message.failed()
                    late_s = 0.0 if completed else message.waited_s()
                except RuntimeError as error:  # of the device: an earlier kernel has failed
                    self._fail(f"{message.what}: {first_line(error)}")
                    return
                if failed is not None:
                    self._fail(f"{message.what}: lost contact with {whom}", failed)
                elif late_s > self.timeout_s:
                    late = self.late_ranks(message.what)
                    self._fail(f"{message.what}: waited {late_s:.1f} s for {whom} (comm.timeout_s){late}")
                elif completed:
                    del self.under_way[message]
                else:
                    return

    def _fail(self, failure: str, work: Any = None) -> None:
        """Keeps the failure; then ends the communicator, so that neither the host nor the device stays blocked."""
        self._failure = self._failure or failure  # before the abort: after it every message looks completed
        self.abort(work)

    def _watch(self) -> None:
        self._device.make_current()
        while not self._over.wait(_WATCH_S):
            self._look()
            try:
                self.check()
            except RuntimeError as error:  # the supervisor has formed another view, or is lost
                self._fail(first_line(error))

    def abort(self, failed: Any = None) -> None:
        """Ends all messages on this rank, at once. Waits for that at most some seconds, since NCCL's abort may hang.

        failed: a work whose error is added to the failure's text.
        """
        self._failure = self._failure or "the group was ended after a loss"
        group = self._pg

        def end() -> None:
            if failed is not None:
                try:
                    with self._device.on(self._device.new_stream()):  # wait() has the current stream wait too
                        failed.wait()
                except RuntimeError as error:
                    self._failure += f": {first_line(error)}"
            library.abort(group)

        self._end("abort", end, _END_S)

    def _end(self, what: str, act: Callable[[], None], seconds: float) -> bool:
        """Runs `act` in a thread, the first time. Whether the group has ended within so many seconds."""
        with self._lock:
            self._over.set()
            if self._ending is None:
                self._ending = self._in_thread(what, act)
            ending = self._ending
        ended = ending.wait(seconds)
        if ended:
            self.under_way.clear()
            self._pg = None
        return ended

    def _in_thread(self, what: str, act: Callable[[], None]) -> threading.Event:
        over = threading.Event()

        def run() -> None:
            self._device.make_current()
            try:
                act()
            except RuntimeError as error:
                _LOG.warning("NCCL's %s: %s", what, first_line(error))
            over.set()

        threading.Thread(target=run, name=f"kfuse-nccl-{what}", daemon=True).start()
        return over

    def finish(self) -> None:
        """Before a planned change of the view, on every rank: see `Group.finish`.

        A kernel of NCCL returns before its last bytes have left this machine, so an abort could lose what a slower rank
        still waits for. After the barrier no rank waits for anything but the barrier; `shutdown` then sends all.
        """
        self.barrier("end of the view")
        self._shut_down(_END_S)

    def _shut_down(self, seconds: float) -> bool:
        group = self._pg  # None where the thread has ended the group meanwhile: `_end` runs nothing then
        self._failure = self._failure or "the group was closed"
        ended = self._end("shutdown", lambda: group.shutdown(), seconds)
        if not ended:
            self._in_thread("abort", lambda: library.abort(group))
        return ended

    def retire(self) -> None:
        """Ends the group, unless `finish` or `abort` has."""
        if self._ending is None:
            self.abort()

    def close(self, timeout_s: float) -> bool:
        """Before the process ends: ends the communicator, by an abort where messages are under way."""
        deadline = time.monotonic() + timeout_s
        while not self._failure and self.under_way and time.monotonic() < deadline:
            self._look()
            time.sleep(_SLICE_S)
        if self._failure or self.under_way:
            self.abort()
            return False
        return self._shut_down(max(0.0, deadline - time.monotonic()))

    # -- waits ----------------------------------------------------------------------------------------------------

    def wait_for(self, message: Pending) -> None:
        """The host waits until the message has come through. Raises CommError, and what `check` raises."""
        self._wait_until(lambda: message not in self.under_way)

    def settle(self) -> None:
        if self.waits_each_step:
            self._wait_until(lambda: not self.under_way)
        self.raise_failure()

    def _wait_until(self, done: Callable[[], bool]) -> None:
        while True:
            self._look()
            self.raise_failure()
            if done():
                self.raise_failure()  # the thread may just have ended the group, with all of its messages
                return
            self.check()
            time.sleep(_SLICE_S)

    # -- messages -------------------------------------------------------------------------------------------------

    def _start(self, what: str, enqueue: Callable[[Any], list[tuple[Any, int | None]]]) -> Pending:
        """Enqueues messages: enqueue(process group). Raises CommError if that fails, or if an earlier one has failed.

        The thread may end the group meanwhile: then the process group's methods raise.
        """
        group = self._pg  # before the failure is looked at, which is known before this is None
        self.raise_failure()
        ready = self._device.event()
        ready.record()
        try:
            works = enqueue(group)
        except RuntimeError as error:
            self._fail(f"{what}: starting it with {self.others}: {first_line(error)}")
            self.raise_failure()
            raise
        with self._lock:
            return NcclPending(self, what, works, ready)

    def follow(self, what: str, enqueue: Callable[[], None]) -> Pending:
        def run(pg: Any) -> list[tuple[Any, int | None]]:
            enqueue()
            over = self._device.event()
            over.record()
            return [(_Followed(over), None)]

        return self._start(what, run)

    def all_reduce(self, tensor: Tensor, what: str, op: str = "sum") -> Pending:
        return self._start(what, lambda pg: [(pg.allreduce([tensor], all_reduce_by(op)), None)])

    def all_to_all(self, out: Tensor, into: Sequence[int], tensor: Tensor, cut: Sequence[int], what: str) -> Pending:
        options = dist.AllToAllOptions()
        return self._start(what, lambda pg: [(pg.alltoall_base(out, tensor, list(into), list(cut), options), None)])

    def exchange(self, sent: Tensor, received: Tensor, peer: int, what: str) -> None:
        """An all-to-all in which this rank has something for `peer` alone: NCCL then calls no other rank."""
        into = [received.numel() if r == peer else 0 for r in range(self.size)]
        cut = [sent.numel() if r == peer else 0 for r in range(self.size)]
        self.all_to_all(received, into, sent, cut, what).wait()

    def shards(self, numel: int, unit: int = ALIGN, size: int | None = None) -> list[slice]:
        """Aligned and equal, but the last one has what is left: an all-gather takes equal parts."""
        size = size or self.size
        step = numel // (size * unit) * unit
        ends = [step * (r + 1) for r in range(size - 1)] + [numel]
        return [slice(step * r, end) for r, end in enumerate(ends)]

    def share(self, flat: Tensor, what: str, unit: int = ALIGN) -> Pending:
        """One all-gather in place, and a broadcast of what the last rank has beyond its equal part."""
        step = self.shards(flat.numel(), unit)[0].stop
        equal, rest = flat[: step * self.size], flat[step * self.size :]

        def enqueue(pg: Any) -> list[tuple[Any, int | None]]:
            works: list[tuple[Any, int | None]] = []
            if step:
                mine = equal[step * self.rank : step * (self.rank + 1)]
                works.append((pg._allgather_base(equal, mine), None))
            if rest.numel():
                works.append((pg.broadcast([rest], broadcast_from(self.size - 1)), None))
            return works

        return self._start(what, enqueue)

    def reduce_scatter(self, flat: Tensor, what: str, unit: int = ALIGN) -> Pending:
        """One reduce-scatter of equal parts, and the sum of what the last rank has beyond its part."""
        step = self.shards(flat.numel(), unit)[0].stop
        equal, rest = flat[: step * self.size], flat[step * self.size :]

        def enqueue(pg: Any) -> list[tuple[Any, int | None]]:
            works: list[tuple[Any, int | None]] = []
            if step:  # in place, as NCCL allows it: the result is the rank's own part of what it sends
                mine = equal[step * self.rank : step * (self.rank + 1)]
                works.append((pg._reduce_scatter_base(mine, equal), None))
            if rest.numel():
                works.append((pg.reduce([rest], reduce_to(self.size - 1)), None))
            return works

        return self._start(what, enqueue)

    def broadcast(self, tensor: Tensor, what: str, source: int = 0) -> Pending:
        peer = source if self.rank != source else None
        return self._start(what, lambda pg: [(pg.broadcast([tensor], broadcast_from(source)), peer)])

    def all_gather(self, tensor: Tensor, what: str) -> list[Tensor]:
        out = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype, device=self.device)
        mine = tensor.reshape(-1).contiguous()
        self._start(what, lambda pg: [(pg._allgather_base(out.view(-1), mine), None)]).wait()
        return list(out.unbind(0))
