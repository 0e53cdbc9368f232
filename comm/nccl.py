"""Groups of several workers on GPUs, over torch's ProcessGroupNCCL. Imported only where the device is a GPU.

What torch and NCCL do (named by function, so that another version's line is found too; torch 2.13, NCCL 2.30):

1) A work counts as completed when it failed (WorkNCCL::isCompleted), and asking for that asks the communicator
   (ncclCommGetAsyncError), which another thread may be launching into: NCCL allows no two threads in one communicator.
   So an event of kfuse's own says when a work is over, and the communicator is asked for errors, and aborted, only
   under the lock that launches hold. After an abort each work looks like one that came through: a failure is kept
   before it.
2) work.synchronize() orders the current stream and never blocks the host; work.wait() blocks it, and aborts
   (WorkNCCL::wait). abort() and shutdown() may block for ever (abort waits for a std::async, whose future joins it), so
   each runs in a thread of its own.
3) A communicator takes messages in one order on all ranks, and two communicators at once are no way out.
4) Only TORCH_NCCL_BLOCKING_WAIT, read as a process group is constructed, keeps torch from starting a watchdog and a
   heartbeat monitor, which end the process (ProcessGroupNCCL's constructor, workEnqueue). All timeouts are kfuse's.
5) A communicator that is made without blocking can be aborted while it waits for other ranks. The first message then
   waits for it, at most TORCH_NCCL_NONBLOCKING_TIMEOUT, 30 minutes by default (NCCLComm::waitReady).
6) alltoall_base sends every rank its part, be it empty (all2all_single_unequal_split), and so meets them all. Sends and
   receives do not. In one group they run at once; after eager_connect_single_device they use this communicator too
   (ProcessGroupNCCL::pointToPoint).
7) The first message of a kind connects to the ranks that it needs (NCCL's group.cc, ncclCollPreconnect and
   ncclP2PPreconnect). Its launch waits for their launches, in a loop that asks the communicator whether it has ended
   (NCCL_CHECK_TIMEOUT in torch/csrc/cuda/nccl.cpp), for at most that timeout. An abort ends that loop: it sets the
   flag that NCCL's own thread looks at before it frees anything (ncclCommAbort), so here, and only here, a second
   thread goes in.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from kfuse.comm import devices
from kfuse.comm.buckets import ALIGN
from kfuse.comm.devices import DeviceError, Event
from kfuse.comm.group import REDUCE_OPS, CommError, Group, Pending, first_line

_LOG = logging.getLogger("kfuse")

_SLICE_S = 50e-6  # between two looks of the host's wait
_WATCH_S = 0.1  # between two looks of the thread
_END_S = 10.0  # for an abort, or a shutdown: it may hang
_LAUNCH_S = 0.5  # for a launch to end before an abort: one that takes longer waits for other ranks: 7)
_BLOCKING_WAIT, _READY_TIMEOUT = "TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_NONBLOCKING_TIMEOUT"
_CONSTRUCTING = threading.Lock()


class NcclPending(Pending):
    """Messages on the communicator's own stream, which takes them in the order in which they were started.

    ready: happens when the device has computed what the messages send. over: happens when they have come through.
    held: keeps their tensors, which torch lets go of as the stream that records `over` waits for them.
    """

    def __init__(
        self, group: NcclGroup, what: str, works: list[Any], peer: int | None, ready: Event, over: Event, held: object
    ) -> None:
        self._nccl, self.peer, self._ready, self._over, self._held = group, peer, ready, over, held
        self._since: float | None = None
        super().__init__(group, what, [(work, peer) for work in works])

    def done(self) -> bool:
        return self._over.query()

    def wait(self) -> None:
        self.wait_on_stream()
        self._nccl.wait_until(lambda: self not in self._nccl.under_way)

    def wait_on_stream(self) -> None:
        self._nccl.raise_failure()
        self._over.wait()

    def failed(self) -> Any:
        """The work that has ended with an error; None if there is none. Never waits. Under the lock of launches."""
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


class NcclGroup(Group):
    """Workers that NCCL connects: one communicator, on a stream of its own.

    The host waits for messages in `Pending.wait`, and in `settle` where the group may change. A thread looks at the
    oldest message too, since the host can be blocked without a wait: because the device's queue is full, or as it reads
    a value. The thread ends the communicator when that message fails or takes longer than the timeout, or when `check`
    raises.
    """

    adds_up = True

    def __init__(
        self,
        rank: int,
        size: int,
        store: Store,
        device: torch.device,
        timeout_s: float = 60.0,
        check: Callable[[], None] | None = None,
        hosts: Sequence[str] | None = None,
    ) -> None:
        """check: given where the group may change.

        Raises CommError if the others do not connect, DeviceError where torch is too old.
        """
        if problem := devices.problem():
            raise DeviceError(problem)
        super().__init__(rank, size, store, device, timeout_s, check, hosts)
        self.waits_each_step = check is not None
        self._device = devices.of(device)
        self._follower = self._device.new_stream()  # waits for each work, and records that it is over
        self._launching = threading.Lock()  # while a thread calls NCCL for this communicator
        self._lock = threading.RLock()  # of the following, and of `under_way`: the group's thread changes them too
        self._over = threading.Event()  # ends that thread
        self._failure = ""  # why the group cannot be used any more; set before the communicator is ended
        self._ending: threading.Event | None = None  # set when the communicator has ended; None before that begins
        self._pg: Any  # torch's process group; None once it has ended
        self._pg, first = self.connect(self._connected, lambda made: _abort(made[0]))
        threading.Thread(target=self._watch, name="kfuse-nccl", daemon=True).start()
        try:
            self.barrier("connecting")
        except BaseException:
            self.abort()
            raise
        del first  # it holds the first message's tensor, which has come through only now

    def _connected(self) -> tuple[Any, Any]:
        """Returns a process group for kfuse alone, connected, and its first work, which may be under way."""
        self._device.make_current()
        os.environ.setdefault(_READY_TIMEOUT, str(math.ceil(10 * self.timeout_s)))  # `limit_s` of first steps
        options = dist.ProcessGroupNCCL.Options()
        options.is_high_priority_stream = True  # messages go before kernels that wait for a place on the GPU
        options._timeout, options.config.blocking = timedelta(seconds=self.timeout_s), False
        with _CONSTRUCTING:
            before = os.environ.get(_BLOCKING_WAIT)
            os.environ[_BLOCKING_WAIT] = "1"
            try:
                group: Any = dist.ProcessGroupNCCL(PrefixStore("main", self.store), self.rank, self.size, options)
            finally:
                os.environ.pop(_BLOCKING_WAIT)
                if before is not None:
                    os.environ[_BLOCKING_WAIT] = before
        try:
            group.eager_connect_single_device(self._device.name)  # returns at once; the communicator can be aborted
            return group, group.allreduce(torch.zeros(1, device=self._device.name))  # waits: 5) above
        except BaseException:
            _abort(group)
            raise

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
            if self._failure or not self.under_way:
                return
            message = next(iter(self.under_way))
            assert isinstance(message, NcclPending)
            try:
                if self._drop_completed() is not message:
                    return
                failed, late_s = self._failed(message), message.waited_s()
            except RuntimeError as error:  # of the device: an earlier kernel has failed
                self._fail(f"{message.what}: {first_line(error)}")
                return
            whom = self.whom(message.peer)
            if failed is not None:
                self._fail(f"{message.what}: lost contact with {whom}", failed)
            elif late_s > self.limit_s:
                late = self.late_ranks(message.what)
                self._fail(f"{message.what}: waited {late_s:.1f} s for {whom} (comm.timeout_s){late}")

    def _drop_completed(self) -> Pending | None:
        """Drops the messages that have come through, and what they hold. Returns the first that is still under way."""
        with self._lock:
            for message in list(self.under_way):
                if not message.done():
                    return message
                self.under_way.pop(message, None)  # the end of the group clears all
            return None

    def _failed(self, message: NcclPending) -> Any:
        """The message's work that has ended with an error; None while there is none, or another thread launches."""
        if not self._launching.acquire(blocking=False):
            return None
        try:
            return message.failed()
        finally:
            self._launching.release()

    @contextlib.contextmanager
    def _launch(self) -> Iterator[None]:
        """Context: no other thread calls NCCL for this communicator. Raises CommError where an abort does, or hangs."""
        while not self._launching.acquire(timeout=_WATCH_S):
            self.raise_failure()
        try:
            yield
        finally:
            self._launching.release()

    def _fail(self, failure: str, work: Any = None) -> None:
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
        """Ends all messages on this rank; waits at most some seconds, since NCCL's abort may hang.

        failed: a work whose error is added to the failure's text.
        """
        self._failure = self._failure or "the group was ended after a loss"
        group = self._pg

        def end() -> None:
            alone = self._launching.acquire(timeout=_LAUNCH_S)
            try:
                if failed is not None:
                    try:
                        with self._device.on(self._follower):  # wait() has the current stream wait too
                            failed.wait()
                    except RuntimeError as error:
                        self._failure += f": {first_line(error)}"
                group.abort()
            finally:
                if alone:
                    self._launching.release()

        self._end("abort", end, _END_S)

    def _end(self, what: str, act: Callable[[], None], seconds: float) -> bool:
        """Runs `act` in a thread, the first time. Whether the group has ended within so many seconds."""
        with self._lock:
            self._over.set()
            if self._ending is None:
                self._ending = self._in_thread(what, act)
            ending = self._ending
        return ending.wait(seconds)

    def _in_thread(self, what: str, act: Callable[[], None]) -> threading.Event:
        over = threading.Event()

        def run() -> None:
            self._device.make_current()
            try:
                act()
            except RuntimeError as error:
                _LOG.warning("NCCL's %s: %s", what, first_line(error))
            self.under_way.clear()
            self._pg = None
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
            self._in_thread("abort", group.abort)
        return ended

    def retire(self) -> None:
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

    def settle(self) -> None:
        if self.waits_each_step:
            self.wait_until(lambda: not self.under_way)
        self.raise_failure()

    def wait_until(self, done: Callable[[], bool]) -> None:
        """The host waits. Raises CommError, and what `check` raises."""
        while True:
            self._look()
            self.raise_failure()
            if done():
                self.raise_failure()  # the thread may just have ended the group, with all of its messages
                return
            self.check()
            time.sleep(_SLICE_S)

    # -- messages -------------------------------------------------------------------------------------------------

    def _start(self, what: str, enqueue: Callable[[Any], list[Any]], peer: int | None = None) -> Pending:
        """Enqueues messages by `enqueue`, which is given the process group and returns torch's works; it may return
        none, where it has put on the current stream what is to be watched.

        Raises CommError if that fails (the thread may end the group meanwhile), or if an earlier message has failed.
        """
        group = self._pg  # before the failure is looked at, which is known before this is None
        self.raise_failure()
        ready, over = self._device.event(), self._device.event()
        ready.record()
        try:
            self._drop_completed()
            with self._launch():
                works = enqueue(group)
            with self._device.on(self._follower) if works else contextlib.nullcontext():
                for work in works:
                    work.synchronize()
                over.record()
        except RuntimeError as error:
            self._fail(f"{what}: starting it with {self.whom()}: {first_line(error)}")
            self.raise_failure()
            raise
        with self._lock:
            return NcclPending(self, what, works, peer, ready, over, enqueue)

    def follow(self, what: str, enqueue: Callable[[], None]) -> Pending:
        def run(pg: Any) -> list[Any]:
            enqueue()
            return []

        return self._start(what, run)

    def all_reduce(self, tensor: Tensor, what: str, op: str = "sum") -> Pending:
        return self._start(what, lambda pg: [pg.allreduce(tensor, REDUCE_OPS[op])])

    def all_to_all(self, out: Tensor, into: Sequence[int], tensor: Tensor, cut: Sequence[int], what: str) -> Pending:
        return self._start(what, lambda pg: [pg.alltoall_base(out, tensor, list(into), list(cut))])

    def to_few(self, out: Tensor, into: Sequence[int], tensor: Tensor, cut: Sequence[int], what: str) -> Pending:
        """Sends and receives in one group of NCCL's: 6) above."""
        brings = [(peer, part) for peer, part in enumerate(out.split_with_sizes(list(into))) if part.numel()]
        sends = [(peer, part) for peer, part in enumerate(tensor.split_with_sizes(list(cut))) if part.numel()]

        def enqueue(pg: Any) -> list[Any]:
            if not (brings or sends):
                return []
            pg._start_coalescing()
            try:
                for peer, part in brings:
                    pg.recv([part], peer, 0)
                for peer, part in sends:
                    pg.send([part], peer, 0)
            except RuntimeError:
                with contextlib.suppress(RuntimeError):
                    pg._end_coalescing()  # else this thread's later messages, of any communicator, would never begin
                raise
            return [pg._end_coalescing()]

        return self._start(what, enqueue)

    def exchange(self, sent: Tensor, received: Tensor, peer: int, what: str) -> None:
        self.to_few(received, self._for_one(received, peer), sent, self._for_one(sent, peer), what).wait()

    def shards(self, numel: int, unit: int = ALIGN) -> list[slice]:
        """Aligned and equal, but the last one has what is left: an all-gather takes equal parts."""
        step = numel // (self.size * unit) * unit
        ends = [step * (r + 1) for r in range(self.size - 1)] + [numel]
        return [slice(step * r, end) for r, end in enumerate(ends)]

    def _parts(self, flat: Tensor, unit: int) -> tuple[Tensor, Tensor, Tensor]:
        """All ranks' equal parts of `flat`, this rank's among them, and what the last rank has beyond its own."""
        step = self.shards(flat.numel(), unit)[0].stop
        return flat[: step * self.size], flat[step * self.rank : step * (self.rank + 1)], flat[step * self.size :]

    def share(self, flat: Tensor, what: str, unit: int = ALIGN) -> Pending:
        """One all-gather in place, and a broadcast of what the last rank has beyond its equal part."""
        equal, mine, rest = self._parts(flat, unit)

        def enqueue(pg: Any) -> list[Any]:
            works = [pg._allgather_base(equal, mine)] if equal.numel() else []
            return [*works, pg.broadcast(rest, self.size - 1)] if rest.numel() else works

        return self._start(what, enqueue)

    def reduce_scatter(self, flat: Tensor, what: str, unit: int = ALIGN) -> Pending:
        """One reduce-scatter of equal parts, and the sum of what the last rank has beyond its part."""
        equal, mine, rest = self._parts(flat, unit)

        def enqueue(pg: Any) -> list[Any]:
            # In place, as NCCL allows it: the result is the rank's own part of what it sends.
            works = [pg._reduce_scatter_base(mine, equal)] if equal.numel() else []
            return [*works, pg.reduce(rest, self.size - 1)] if rest.numel() else works

        return self._start(what, enqueue)

    def broadcast(self, tensor: Tensor, what: str, source: int = 0) -> Pending:
        peer = source if self.rank != source else None
        return self._start(what, lambda pg: [pg.broadcast(tensor, source)], peer)

    def all_gather(self, tensor: Tensor, what: str) -> list[Tensor]:
        out = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype, device=self.device)
        mine = tensor.reshape(-1).contiguous()
        self._start(what, lambda pg: [pg._allgather_base(out.view(-1), mine)]).wait()
        return list(out.unbind(0))


def _abort(group: Any) -> None:
    with contextlib.suppress(RuntimeError):
        group.abort()
