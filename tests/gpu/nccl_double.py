"""A double of torch.distributed.ProcessGroupNCCL: its rules, over real gloo process groups between real processes.

It stands for hardware that is not here, and replaces no test on a GPU. What it keeps of the original, and where that is
written, is in README.md beside this file; each rule has a number there, and here in the code: [1] to [10].
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from nccl_messages import FOREVER_S, Meeting, Part, Parts
from torch import Tensor, nn
from torch.distributed import PrefixStore, TCPStore

from kfuse.comm import devices

LOG = "KFUSE_NCCL_DOUBLE_LOG"
_POLL_S = 0.002
LAUNCH_S = 0.0005  # for which a launch takes the communicator
_SERVERS: list[TCPStore] = []
"""Of this process's groups: each rank 0 serves its group's store until the process ends."""

HOST_IS_STREAM = True
"""On a CPU the host does the stream's work: `block_current_stream` blocks it, for as long as the work takes. So it must
for a computation to be right. It is also what a host sees that is blocked because a GPU's queue is full. False: as on
a GPU, the host goes on.
"""


@dataclass
class Faults:
    error_on: dict[int, int] = field(default_factory=dict)
    """By rank: the number of the work that fails there (from 0, connecting takes two)."""
    slow_s: dict[int, float] = field(default_factory=dict)
    """By rank: seconds by which each work completes later there than on the others."""
    loss_is_noticed: bool = False
    """A lost peer is an error (as over a network), or its messages just never end (as over NVLink)."""
    abort_blocks: bool = False
    shutdown_blocks: bool = False
    absent: int | None = None
    """The rank whose communicator is never initialised."""
    lost_in: tuple[int, int] | None = None
    """(rank, number): the process ends as it enqueues this work."""


_faults = Faults()


class _SideStream:
    """A stream other than the host's: it waits for works, and the host goes on."""

    def __init__(self) -> None:
        self.works: list[Work] = []

    def wait_stream(self, stream: Any) -> None:
        pass


class Event(devices.Event):
    """Behind the works that its stream waited for as it was recorded."""

    _works: Sequence[Work] = ()

    def record(self, stream: Any = None) -> None:
        side = _current.stream if stream is None else stream
        self._works = list(side.works) if isinstance(side, _SideStream) else ()
        super().record()

    def query(self) -> bool:
        return all(work.over.is_set() for work in self._works)

    def wait(self, stream: Any = None) -> None:
        if HOST_IS_STREAM:
            self._await_works()

    def synchronize(self) -> None:
        self._await_works()

    def _await_works(self) -> None:
        for work in self._works:
            work.over.wait()


class _Current(threading.local):
    stream: _SideStream | None = None  # None: the host's


_current = _Current()


class AsynchronousCpu(devices.Device):
    """A CPU that says it is asynchronous, so that the code takes the way that it takes on a GPU."""

    asynchronous = True

    def new_stream(self) -> _SideStream:
        return _SideStream()

    def event(self, timing: bool = False) -> devices.Event:
        return Event()

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, _current.stream = _current.stream, stream if isinstance(stream, _SideStream) else None
        try:
            yield
        finally:
            _current.stream = before


@contextlib.contextmanager
def installed(log: Path | None = None, faults: Faults | None = None) -> Iterator[None]:
    """Context: the double is torch's ProcessGroupNCCL, and every device is asynchronous."""
    global _faults
    of, before = devices.of, _faults
    install(log, faults)
    try:
        yield
    finally:
        devices.of = of  # type: ignore[assignment]
        del dist.ProcessGroupNCCL
        _faults = before


def install(log: Path | None = None, faults: Faults | None = None) -> None:
    """From now on the double is torch's ProcessGroupNCCL in this process, and every device is asynchronous.

    log: the directory that each process writes its records to.
    """
    global _faults
    if log is not None:
        os.environ[LOG] = str(log)
    _faults = faults or Faults()
    known: dict[torch.device, AsynchronousCpu] = {}
    devices.of = lambda name: known.setdefault(name, AsynchronousCpu(name))  # type: ignore[assignment]
    dist.ProcessGroupNCCL = ProcessGroupNCCL  # type: ignore[misc,assignment,attr-defined]


def record(what: str, **fields: Any) -> None:
    if directory := os.environ.get(LOG):
        path = Path(directory)
        path.mkdir(exist_ok=True, parents=True)
        with (path / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps({"what": what, **fields}) + "\n")


def records(log: Path, what: str | None = None) -> list[dict[str, Any]]:
    """All processes' records, each one's in its order; of one kind, or of all."""
    lines = [json.loads(line) for path in sorted(log.glob("*.jsonl")) for line in path.read_text().splitlines()]
    return [line for line in lines if what in (None, line["what"])]


def messages(log: Path) -> dict[str, dict[int, list[str]]]:
    found: dict[str, dict[int, list[str]]] = {}
    for line in records(log, "enqueued"):
        found.setdefault(line["group"], {}).setdefault(line["rank"], []).append(line["message"])
    return found


def nonblocking_timeout() -> float:
    return float(os.environ.get("TORCH_NCCL_NONBLOCKING_TIMEOUT") or 30 * 60)


class Options:
    def __init__(self) -> None:
        self.is_high_priority_stream = False
        self.config = SimpleNamespace(blocking=None)  # ncclConfig_t


class Work:
    def __init__(
        self,
        group: ProcessGroupNCCL,
        number: int,
        message: str,
        run: Callable[[Any], Any],
        meets: Sequence[Meeting | Part],
    ) -> None:
        self.group, self.number, self.message, self.run, self.meets = group, number, message, run, meets
        self.over = threading.Event()
        """The kernel has ended: its data are there, or it was aborted."""
        self.error: str | None = None
        self.handled = False
        """Somebody has seen the error."""

    def is_completed(self) -> bool:
        """True on an error too, and after an abort. [1] It asks the communicator. [9]"""
        with self.group.alone("is_completed"):
            return self.error is not None or self.over.is_set()

    def get_future_result(self) -> Any:
        """A future: without a watchdog only an error sets it, to WorkResult::COMM_ERROR. [1]"""
        failed = self.error is not None
        self.handled = self.handled or failed
        return SimpleNamespace(done=lambda: failed, value=lambda: 2)

    def block_current_stream(self) -> None:
        """The current stream waits; it raises nothing, and after an abort the data are not there. [3]"""
        if _current.stream is not None:
            _current.stream.works = [work for work in (*_current.stream.works, self) if not work.over.is_set()]
        elif HOST_IS_STREAM:
            self.over.wait()

    def wait(self) -> None:
        """Waits on the host, for an error too; then aborts the communicator and raises. [2] [3]"""
        while not self.is_completed():
            time.sleep(_POLL_S)
        if self.error is not None:
            self.handled = True
            self.group._end_communicator()
            raise dist.DistBackendError(self.error)


class ProcessGroupNCCL:
    """The double. Collectives are taken by one thread, the communicator's stream, in the order of their calls."""

    Options = Options

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        self.rank, self.size, self.options = rank, size, options
        self._given = PrefixStore("double", store)  # for init alone, as ncclGetUniqueId's: the job may close it then
        self._store: Any = None
        self._mutex = threading.RLock()  # NCCLComm's
        self._parts: list[Part] | None = None
        self._sent = Counter[tuple[int, int]]()  # messages to each rank, and from each
        self._meetings = 0
        self._connected = set[str]()  # the ways of sending that have been used
        self._inside: dict[int, str] = {}  # what each thread calls that is in the communicator
        self._ready, self._aborted, self._ended = threading.Event(), threading.Event(), threading.Event()
        self._queue: queue.Queue[Work] = queue.Queue()
        self._works: list[Work] = []
        self._gloo: Any = None
        self.name = ""
        watchdog = os.environ.get("TORCH_NCCL_BLOCKING_WAIT") != "1"  # [4]
        record("constructed", rank=rank, watchdog=watchdog, high_priority=options.is_high_priority_stream)

    # -- init -----------------------------------------------------------------------------------------------------

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Gets the communicator's id from the store; then initialises it, here or, without blocking, meanwhile. [5]"""
        if self.rank == 0:
            server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
            _SERVERS.append(server)
            self._given.set("id", f"{uuid.uuid4()} {server.port}")
        self.name, port = self._given.get("id").decode().split()
        self._store = TCPStore("127.0.0.1", int(port), None, False, wait_for_workers=False)
        blocking = self.options.config.blocking not in (False, 0)
        record("init", rank=self.rank, group=self.name, blocking=blocking)
        threading.Thread(target=self._initialise, daemon=True).start()
        threading.Thread(target=self._stream, daemon=True).start()

    def _initialise(self) -> None:
        if _faults.absent == self.rank:
            return
        self._store.set(f"init/{self.rank}", "1")
        if not self._await([f"init/{r}" for r in range(self.size)]):
            return
        backend: Any = dist.ProcessGroupGloo
        gloo = backend._Options()
        gloo._devices = [backend.create_device(hostname="127.0.0.1")]
        gloo._timeout, gloo._threads = timedelta(seconds=FOREVER_S), 1
        try:
            self._gloo = backend(PrefixStore("gloo", self._store), self.rank, self.size, gloo)
        except RuntimeError:
            return  # a peer has ended meanwhile: init never ends
        self._ready.set()

    def _communicator(self) -> None:
        """NCCLComm::getNcclComm: raises after an abort; waits until the communicator is ready, and not for ever. [5]"""
        with self._mutex:
            if self._aborted.is_set():
                raise dist.DistBackendError(f"NCCL communicator was aborted on rank {self.rank}.")
            if not self._ready.wait(nonblocking_timeout()):
                raise dist.DistBackendError("NCCL timeout in: NCCLUtils.cpp, waitReady")

    @contextlib.contextmanager
    def alone(self, what: str) -> Iterator[None]:
        """Context: this thread is in the communicator, where no second one may be. [9]"""
        me = threading.get_ident()
        others = [name for thread, name in list(self._inside.items()) if thread != me]
        if others and (what, others[0]) != ("abort", "connecting"):
            record("two threads", rank=self.rank, second=what, first=others[0])
        before, self._inside[me] = self._inside.get(me), what
        try:
            yield
        finally:
            if before is None:
                del self._inside[me]
            else:
                self._inside[me] = before

    # -- collectives ----------------------------------------------------------------------------------------------

    def allreduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Work:
        name = next(name for name in ("SUM", "MIN", "MAX") if op == getattr(dist.ReduceOp, name))
        message = f"allreduce {tensor.numel()} {tensor.dtype} {name}"
        return self._collective(message, [tensor], lambda gloo: gloo.allreduce(tensor, op))

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        message = f"broadcast {tensor.numel()} {tensor.dtype} from {root}"
        return self._collective(message, [tensor], lambda gloo: gloo.broadcast(tensor, root))

    def _allgather_base(self, out: Tensor, mine: Tensor) -> Work:
        assert out.numel() == self.size * mine.numel() and out.dtype == mine.dtype
        message = f"allgather {mine.numel()} {mine.dtype}"
        return self._collective(message, [mine, out], lambda gloo: gloo._allgather_base(out, mine.clone()))

    def _reduce_scatter_base(self, out: Tensor, tensor: Tensor) -> Work:
        """In place NCCL allows `out` where the rank's part of `tensor` is, only."""
        assert tensor.numel() == self.size * out.numel() and out.dtype == tensor.dtype
        start = out.data_ptr() - tensor.data_ptr()
        assert not 0 <= start < tensor.nbytes or start == self.rank * out.nbytes
        message = f"reducescatter {out.numel()} {out.dtype}"
        return self._collective(message, [tensor, out], lambda gloo: gloo._reduce_scatter_base(out, tensor.clone()))

    def reduce(self, tensor: Tensor, root: int) -> Work:
        message = f"reduce {tensor.numel()} {tensor.dtype} to {root}"
        return self._collective(message, [tensor], lambda gloo: gloo.reduce(tensor, root))

    def alltoall_base(self, out: Tensor, tensor: Tensor, into: list[int], cut: list[int]) -> Work:
        assert into and cut, "equal parts, as without lists, would take another way"
        assert sum(into) == out.numel() and sum(cut) == tensor.numel()

        def run(gloo: Any) -> Any:
            return gloo.alltoall_base(out, tensor, into, cut)

        return self._collective(f"alltoall {tensor.dtype}", [tensor, out], run, sends=cut, receives=into)

    def _start_coalescing(self) -> None:
        self._parts = []

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        self._part(True, tensors, self.rank, peer)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        self._part(False, tensors, peer, self.rank)

    def _part(self, is_send: bool, tensors: list[Tensor], source: int, target: int) -> None:
        if self._parts is None:
            raise RuntimeError("a send waits for its receive, and holds up what follows: both in one group")
        (tensor,) = tensors
        self._parts.append(Part(is_send, tensor, source, target, self._sent[source, target]))
        self._sent[source, target] += 1

    def _end_coalescing(self) -> Work:
        """Sends and receives in one group: they run at once, and no rank but their peers meets them. [6]"""
        parts, self._parts = self._parts, None
        assert parts
        message = ", ".join(part.key for part in parts)
        return self._enqueue(message, [part.tensor for part in parts], lambda gloo: Parts(gloo, parts), parts)

    def _collective(self, message: str, tensors: list[Tensor], run: Callable[[Any], Any], **splits: list[int]) -> Work:
        """All ranks meet, also those that have nothing for each other. [6]"""
        self._meetings += 1
        told = json.dumps({"message": message, **splits})
        return self._enqueue(message, tensors, run, [Meeting(self._meetings, self.rank, self.size, told)])

    def _enqueue(
        self, message: str, tensors: list[Tensor], run: Callable[[Any], Any], meets: Sequence[Meeting | Part]
    ) -> Work:
        assert all(tensor.is_contiguous() for tensor in tensors)
        self._communicator()
        with self.alone("connecting"):
            self._connect({each.connection: each for each in meets})
        with self.alone("a launch"):
            return self._launch(Work(self, len(self._works), message, run, meets))

    def _connect(self, connections: dict[str, Meeting | Part]) -> None:
        """Where a way of sending is used for the first time, the launch waits for those at its other ends. [10]"""
        new = [(name, meets) for name, meets in connections.items() if name not in self._connected]
        for name, _ in new:
            self._store.set(f"connect/{name}/{self.rank}", "1")
        deadline = time.monotonic() + nonblocking_timeout()
        for name, meets in new:
            while not self._await([f"connect/{name}/{rank}" for rank in meets.ends], deadline):
                if time.monotonic() > deadline or name == "alltoall":
                    raise dist.DistBackendError("NCCL timeout when waiting for nonblocking call to become successful.")
                time.sleep(_POLL_S)  # an abort goes unnoticed: torch's loop asks a communicator that is not there
            self._connected.add(name)

    def _launch(self, work: Work) -> Work:
        time.sleep(LAUNCH_S)
        if _faults.lost_in is not None and tuple(_faults.lost_in) == (self.rank, work.number):
            os.kill(os.getpid(), 9)
        kind = "enqueued for few" if isinstance(work.meets[0], Part) else "enqueued"
        record(kind, rank=self.rank, group=self.name, message=work.message)
        self._works.append(work)
        with contextlib.suppress(RuntimeError):
            for meets in work.meets:
                self._store.set(meets.key, meets.told)
        self._queue.put(work)
        return work

    # -- the communicator's stream --------------------------------------------------------------------------------

    def _stream(self) -> None:
        """Runs the works one after the other. One that never ends holds up all that follow. [6]"""
        while not self._aborted.is_set() and not self._ended.is_set():
            try:
                work = self._queue.get(timeout=_POLL_S * 10)
            except queue.Empty:
                continue
            ended = False
            with contextlib.suppress(RuntimeError):  # rank 0, which has the store, is lost
                ended = self._execute(work)
            if not ended:
                self._aborted.wait()
        for work in self._works:
            work.over.set()  # kernels end as they see the abort flag; no error says so [1]

    def _execute(self, work: Work) -> bool:
        """Whether the work has ended, with or without an error; False: it never does, until an abort."""
        if _faults.error_on.get(self.rank) == work.number:
            work.error = "NCCL error: unhandled system error, NCCL version 2.30"
            return False
        if not self._await([key for meets in work.meets for key in meets.awaited]):
            return False
        told = [(meets, [self._store.get(key).decode() for key in meets.awaited]) for meets in work.meets]
        if difference := next(filter(None, (meets.difference(theirs) for meets, theirs in told)), None):
            work.error = f"the ranks' messages differ: {difference}"
            record("wrong order", rank=self.rank, difference=difference)
            return False
        running = work.run(self._gloo)
        while not self._aborted.is_set():
            with contextlib.suppress(RuntimeError):  # a timeout, or a failure
                running.wait(timedelta(seconds=0.05))
                break
            if running.is_completed():
                try:
                    running.wait()  # it may have come through since
                    break
                except RuntimeError:
                    if _faults.loss_is_noticed:
                        work.error = "NCCL error: remote process exited or there was a network error"
                    return False
        if delay := _faults.slow_s.get(self.rank):
            # This rank still receives: a peer that aborts now takes along the bytes that its proxy has not sent. [8]
            self._aborted.wait(delay)
            for peer in range(self.size):
                if peer != self.rank and self._store.check([f"aborted/{peer}"]):
                    record("bytes lost", rank=self.rank, peer=peer, message=work.message)
                    return False
        if self._aborted.is_set():
            return False
        work.over.set()
        return True

    def _await(self, keys: list[str], deadline: float = math.inf) -> bool:
        pause = _POLL_S / 4
        while not self._aborted.is_set() and not self._ended.is_set() and time.monotonic() < deadline:
            try:
                if self._store.check(keys):
                    return True
            except RuntimeError:  # rank 0, which has the store, is lost
                return False
            time.sleep(pause)
            pause = min(2 * pause, 5 * _POLL_S)
        return False

    # -- the end --------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Ends all kernels of this rank. May block for ever. [7] [8]"""
        record("abort", rank=self.rank, group=self.name, healthy=self._is_healthy())
        with self.alone("abort"):
            self._abort()

    def _abort(self) -> None:
        if _faults.abort_blocks:
            time.sleep(FOREVER_S)
        self._end_communicator()

    def _is_healthy(self) -> bool:
        return self._ready.is_set() and all(work.over.is_set() and work.error is None for work in self._works)

    def _end_communicator(self) -> None:
        self._tell_unhandled()
        with self._mutex, contextlib.suppress(RuntimeError):
            if self._store is not None:
                self._store.set(f"aborted/{self.rank}", "1")
        self._aborted.set()

    def shutdown(self) -> None:
        """Finalizes: waits for all works, here and on the other ranks; then ends. May block for ever. [7] [8]"""
        record("shutdown", rank=self.rank, group=self.name)
        if _faults.shutdown_blocks:
            time.sleep(FOREVER_S)
        self._communicator()
        for work in self._works:
            work.over.wait()
        with contextlib.suppress(RuntimeError):
            self._store.set(f"finalized/{self.rank}", "1")
        self._await([f"finalized/{r}" for r in range(self.size)])
        self._tell_unhandled()
        self._ended.set()
        record("ended", rank=self.rank, group=self.name)

    def _tell_unhandled(self) -> None:
        for work in self._works:
            if work.error is not None and not work.handled:
                record("unhandled error", rank=self.rank, message=work.message, error=work.error)


class Classifier(nn.Module):
    """For data=digits, in jobs: installs the double before the worker joins. log: where records go; None: gloo."""

    def __init__(self, log: str | None = None) -> None:
        super().__init__()
        if log is not None:
            install(Path(log))
        self.first, self.dropout, self.last = nn.Linear(64, 24), nn.Dropout(0.1), nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.dropout(torch.relu(self.first(x.flatten(1)))))
        return out
