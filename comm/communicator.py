"""A group's communicator of NCCL: how it is made, watched, launched into and ended, over torch's ProcessGroupNCCL.

What torch and NCCL do (named by function, so that another version's line is found too; torch 2.13, NCCL 2.30):

1) A work counts as completed when it failed (WorkNCCL::isCompleted), and asking for that asks the communicator
   (ncclCommGetAsyncError), which another thread may be launching into: NCCL allows no two threads in one communicator.
   So an event of kfuse's own says when a work is over, and the communicator is asked for errors, and aborted, only
   under the lock that launches hold. After an abort each work looks as if it came through: a failure is kept before.
2) work.block_current_stream() orders the current stream and never blocks the host; work.wait() blocks it, and aborts
   (WorkNCCL::wait). abort() and shutdown() may block for ever (abort waits for a std::async, whose future joins it), so
   each runs in a thread of its own.
3) A communicator takes messages in one order on all ranks, and two communicators at once are no way out.
4) Only TORCH_NCCL_BLOCKING_WAIT, read as a process group is constructed, keeps torch from starting a watchdog and a
   heartbeat monitor, which end the process (ProcessGroupNCCL's constructor, workEnqueue). All timeouts are kfuse's.
5) A communicator that is made without blocking can be aborted while it waits for other ranks, until the first message
   waits for it: that holds the communicator's mutex, for at most TORCH_NCCL_NONBLOCKING_TIMEOUT, 30 minutes by default
   (NCCLComm::waitReady). A shutdown holds it too.
6) alltoall_base sends every rank its part, be it empty (all2all_single_unequal_split), and so meets them all. Sends and
   receives do not. In one group they run at once; after eager_connect_single_device they use this communicator too
   (ProcessGroupNCCL::pointToPoint).
7) The first message that takes an algorithm connects to the ranks that it needs (NCCL's group.cc, ncclCollPreconnect
   and ncclP2PPreconnectFunc), and its launch waits for theirs. torch asks the communicator in a loop whether it has
   ended, for at most that timeout (C10D_NCCL_CHECK_TIMEOUT), and the loop does not notice an abort. So messages of a
   new kind are launched in a thread, which is left behind where this rank gives up. An abort waits half a second for a
   launch. Then it goes in beside it, as the device's queue may be full, and nothing else would empty it; NCCLComm's own
   mutex keeps the abort and that loop apart.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from kfuse.comm import devices
from kfuse.comm.devices import DeviceError, Event
from kfuse.comm.group import EARLY, CommError, Group, Pending, first_line
from kfuse.comm.settings import BUSY

_LOG = logging.getLogger("kfuse")

_SLICE_S = 50e-6  # between two looks of the host's wait
_WATCH_S = 0.1  # between two looks of the thread
_END_S = 10.0  # for an abort, or a shutdown: it may hang
_LAUNCH_S = 0.5  # for a launch to end before an abort: one that takes longer waits for other ranks, 7)
_BLOCKING_WAIT, _NONBLOCKING_TIMEOUT = "TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_NONBLOCKING_TIMEOUT"
_FOLLOWED = "what is no message"
_CONSTRUCTING = threading.Lock()


class NcclPending(Pending):
    """Messages on the communicator's own stream, which takes them in the order in which they were started.

    events: the device has computed what they send; they have come through. held: keeps their tensors, which torch lets
    go of as the stream of the second event waits for them.
    """

    def __init__(
        self, group: Communicator, what: str, works: list[Any], peer: int | None, events: tuple[Event, Event], held: Any
    ) -> None:
        self._nccl, self.peer, (self._ready, self._over), self._held = group, peer, events, held
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
        self._held = None  # their memory is used again behind this

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


class Communicator(Group):
    """Workers that NCCL connects: one communicator, on a stream of its own. `NcclGroup` has its messages.

    The host waits for messages in `Pending.wait`, and in `settle` where the group may change. A thread looks at the
    oldest message too, since the host can be blocked without a wait: because the device's queue is full, or as it reads
    a value. The thread ends the communicator when that message fails or takes longer than the timeout, or when `check`
    raises.
    """

    def __init__(self, *place: Any, **more: Any) -> None:
        """Arguments as of `Group`. Raises CommError if others do not connect, DeviceError where torch is too old."""
        if problem := devices.problem():
            raise DeviceError(problem)
        super().__init__(*place, **more)
        self.waits_each_step = not self.fixed
        self._device = devices.of(self.device)
        self._follower = self._device.new_stream()  # waits for each work, and records that it is over
        self._launching = threading.Lock()  # while a thread calls NCCL for this communicator
        self._lock = threading.RLock()  # of the following, and of `under_way`: the group's thread changes them too
        self._ended = threading.Event()  # ends that thread
        self._failure = ""  # why the group cannot be used any more; set before the communicator is ended
        self._ending: threading.Event | None = None  # set when the communicator has ended; None before that begins
        self._pg: Any  # torch's process group; None once it has ended
        self._launched: set[Hashable] = {_FOLLOWED}  # kinds of messages that NCCL has connected for
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
        os.environ.setdefault(_NONBLOCKING_TIMEOUT, str(math.ceil(EARLY * self.timeout_s)))  # `limit_s` of first steps
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
            first = torch.zeros(1, dtype=torch.float32, device=self._device.name)
            return group, group.allreduce(first)  # waits: 5) above
        except BaseException:
            _abort(group)
            raise

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
            elif late_s > message.limit_s:
                late = self.late_ranks("a message")  # others may wait in another one
                self._fail(f"{message.what}: waited {late_s:.1f} s for {whom} (comm.timeout_s){late}; {BUSY}")

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
            self.raise_failure()
            yield
        finally:
            self._launching.release()

    def _fail(self, failure: str, work: Any = None) -> None:
        self._failure = self._failure or failure  # before the abort: after it every message looks completed
        self.abort(work)

    def _watch(self) -> None:
        self._device.make_current()
        while not self._ended.wait(_WATCH_S):
            self._look()
            try:
                self.check()
            except RuntimeError as error:  # the supervisor has formed another view, or is lost
                self._fail(first_line(error))

    def abort(self, failed: Any = None) -> None:
        """Ends all messages on this rank; waits at most some seconds, since NCCL's abort may hang. failed: a work whose
        error is added to the failure's text.
        """
        self._failure = self._failure or "the group was ended after a loss"
        group = self._pg

        def end() -> None:
            alone = self._launching.acquire(timeout=_LAUNCH_S)
            try:
                if failed is not None and alone:
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
            self._ended.set()
            if self._ending is None:
                self._ending = threading.Event()
                arguments = what, act, self._ending
                threading.Thread(target=self._run_end, args=arguments, name=f"kfuse-nccl-{what}", daemon=True).start()
            ending = self._ending
        return ending.wait(seconds)

    def _run_end(self, what: str, act: Callable[[], None], over: threading.Event) -> None:
        self._device.make_current()
        try:
            act()
        except RuntimeError as error:
            _LOG.warning("NCCL's %s: %s", what, first_line(error))
        self.under_way.clear()
        self._pg = None
        over.set()

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
        return self._end("shutdown", lambda: group.shutdown(), seconds)  # no abort behind it: 5) above

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

    def _start(
        self, what: str, kind: Hashable, enqueue: Callable[[Any], list[Any]], peer: int | None = None
    ) -> Pending:
        """Enqueues messages by `enqueue`, which is given the process group and returns torch's works; it may return
        none, where it has put on the current stream what is to be watched.

        kind: the same for messages that take the same connections. Raises CommError if that fails (the thread may end
        the group meanwhile), or if an earlier message has failed.
        """
        group = self._pg  # before the failure is looked at, which is known before this is None
        self.raise_failure()
        ready, over = self._device.event(), self._device.event()
        try:
            ready.record()
            self._drop_completed()
            works = self._enqueue(what, kind, lambda: enqueue(group))
            with self._device.on(self._follower) if works else contextlib.nullcontext():
                for work in works:
                    work.block_current_stream()
                over.record()
        except CommError as error:  # of a launch that is left behind
            self._fail(str(error))
            raise
        except Exception as error:
            self._fail(f"{what}: starting it with {self.whom()}: {first_line(error)}")
            self.raise_failure()
            raise
        with self._lock:
            self.raise_failure()  # else the end of the group, which drops all messages, may have come before this one
            return NcclPending(self, what, works, peer, (ready, over), enqueue)

    def _enqueue(self, what: str, kind: Hashable, enqueue: Callable[[], list[Any]]) -> list[Any]:
        """What `enqueue` returns. Where NCCL may connect for it, a thread calls it, and this rank can leave that."""
        if kind in self._launched:
            with self._launch():
                return enqueue()
        stream = self._device.current_stream()

        def act() -> list[Any]:
            self._device.make_current()
            with self._launch(), self._device.on(stream):
                return enqueue()

        works = self.connect(act, lambda works: None, f"{what}: connecting", f"start {what}")
        self._launched.add(kind)
        return works

    def follow(self, what: str, enqueue: Callable[[], None]) -> Pending:
        def run(pg: Any) -> list[Any]:
            enqueue()
            return []

        return self._start(what, _FOLLOWED, run)


def _abort(group: Any) -> None:
    with contextlib.suppress(RuntimeError):
        group.abort()
