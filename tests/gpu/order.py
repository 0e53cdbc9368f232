"""The order of events on a GPU's streams and on the host, by vector clocks: doubles of streams, events and memory.

Each stream, and the host, has a clock (Fidge 1988, Mattern 1989): what happened before what. `gpu.recorder` tells what
torch does; its rules are there.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

import kfuse
from kfuse.comm import devices

Clock = dict[int, int]
"""By stream (0: the host), how many of its actions have happened."""

HOST = 0
OURS = 1
"""The index of the device that tensors pretend to lie on."""

_FOLDERS = tuple(f"{folder}/" for folder in (Path(kfuse.__file__).parent, Path(__file__).parents[1]))
"""kfuse, which may be installed, and the tests."""
_DOUBLES = ("gpu/order.py", "gpu/recorder.py", "gpu/stand_in.py")
_plain_empty = torch.empty


@dataclass(frozen=True)
class _Access:
    """A use of some bytes of a memory: the `number`-th action of `stream`."""

    stream: int
    number: int
    write: bool
    start: int
    end: int
    what: str


@dataclass
class _Memory:
    start: int
    """Its address."""
    end: int
    kind: str
    """device | host | pinned"""
    owner: int
    """The stream that allocated it."""
    accesses: list[_Access] = field(default_factory=list)
    """The last ones: what they are ordered after is left out."""
    kept: set[int] = field(default_factory=set)
    """Streams of record_stream."""


class Action(NamedTuple):
    """An operation, or a message, the `number`-th of its stream, and what has happened before it."""

    stream: int
    number: int
    clock: Clock
    what: str
    in_kernel: bool
    """Of kfuse, in its PyTorch form."""

    @property
    def is_message(self) -> bool:
        return self.what.startswith("a collective")

    def is_before(self, other: Action) -> bool:
        return other.clock.get(self.stream, 0) >= self.number


class RecordedStream:
    def __init__(self, order: Order, name: str) -> None:
        self._order, self.name = order, name
        self.number = len(order.streams) + 1
        self.clock: Clock = {}
        order.streams.append(self)

    def wait_stream(self, stream: RecordedStream) -> None:
        self._order.act()
        _join(self.clock, stream.clock)


class RecordedEvent:
    """Double of torch.cuda.Event. It has happened when the host has waited for it, or after `Order.lag` steps."""

    def __init__(self, order: Order) -> None:
        self._order, self.clock = order, Clock()
        self._step = 0

    def record(self, stream: RecordedStream | None = None) -> None:
        self._order.act()
        self.clock = dict((stream or self._order.current).clock)
        self._step = self._order.step

    def wait(self, stream: RecordedStream | None = None) -> None:
        self._order.act()
        _join((stream or self._order.current).clock, self.clock)

    def query(self) -> bool:
        return self._order.happened(self.clock, self._step)

    def synchronize(self) -> None:
        if not self._order.happened(self.clock, self._step):
            self._order.host_waits_for(self.clock, "event.synchronize")

    def elapsed_time(self, end: RecordedEvent) -> float:
        if not (self.query() and end.query()):
            self._order.error("elapsed_time of an event that has not happened")
        return 1.0


class RecordedDevice(devices.Device):
    asynchronous = True

    def __init__(self, order: Order) -> None:
        super().__init__(torch.device("cpu"))
        self._order = order

    def make_current(self) -> None:
        self._order.current_device = OURS

    def new_stream(self) -> Any:
        return RecordedStream(self._order, f"stream {len(self._order.streams)}")

    def current_stream(self) -> Any:
        return self._order.current

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return self._order.on(stream)

    def event(self, timing: bool = False) -> Any:
        return RecordedEvent(self._order)

    def keep(self, tensors: Sequence[Tensor], stream: Any) -> None:
        for tensor in tensors:
            self._order.memory_of(tensor).kept.add(stream.number)

    def synchronize(self) -> None:
        for stream in self._order.streams:
            _join(self._order.host, stream.clock)
        self._order.host_waits_for({}, "device.synchronize")

    def holds(self, *tensors: Tensor) -> bool:
        return all(self._order.memory_of(tensor).kind == "device" for tensor in tensors)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        with _disable_current_modes():
            made = _plain_empty(tuple(shape), dtype=dtype)
        self._order.memory_of(made, "pinned")
        return made

    def seed(self, key: int) -> None:
        torch.manual_seed(key)


class Order:
    """What happened before what, on one device; and what was wrong."""

    errors: list[str]
    """Uses of memory without an order, and launches on another device."""
    host_waits: list[str]
    """Each wait of the host for the device: what waited, and where."""
    actions: list[Action]
    """All that has been enqueued, in the host's order."""
    current: RecordedStream
    """The current stream."""
    lag: int | None
    """The device is so many steps behind the host (`end_step`). None: nothing happens unless the host waits."""

    def __init__(self, lag: int | None = None) -> None:
        self.errors, self.host_waits, self.actions, self.lag = [], [], [], lag
        self.streams: list[RecordedStream] = []
        self.host: Clock = {}
        self.step, self._thread = 0, threading.get_ident()
        self._current_devices: dict[int, int] = {}
        self.main = self.current = RecordedStream(self, "the default stream")
        self.device = RecordedDevice(self)
        self._storages: dict[int, tuple[StorageWeakRef, _Memory]] = {}  # by address of torch's StorageImpl
        self._used_elsewhere: set[int] = set()  # storages that another stream than their own has used
        self._crowd = 100
        self._works: weakref.WeakKeyDictionary[Any, tuple[Clock, int]] = weakref.WeakKeyDictionary()
        self._stashed: weakref.WeakKeyDictionary[Any, list[Tensor]] = weakref.WeakKeyDictionary()
        self._communicators: dict[int, RecordedStream] = {}
        self.slept = False
        """The host has paused since it last did anything: what it asks for now has happened meanwhile."""

    @property
    def current_device(self) -> int:
        """This thread's torch.cuda.current_device(): 0 until the thread sets another."""
        return self._current_devices.get(threading.get_ident(), 0)

    @current_device.setter
    def current_device(self, index: int) -> None:
        self._current_devices[threading.get_ident()] = index

    # -- what tests ask -------------------------------------------------------------------------------------------

    def end_step(self) -> None:
        self.look_for_freed()
        self.step += 1

    def waits_of(self, act: Callable[[], Any]) -> list[str]:
        before = len(self.host_waits)
        act()
        return self.host_waits[before:]

    def on(self, stream: RecordedStream) -> AbstractContextManager[None]:
        return patched(self, "current", stream)

    def error(self, text: str) -> None:
        if text not in self.errors:
            self.errors.append(text)

    def take_errors(self) -> list[str]:
        """What was wrong so far, which a negative test expects; the recorder's end does not raise for it."""
        taken, self.errors = self.errors, []
        return taken

    # -- collectives: the observer of a double of a process group --------------------------------------------------

    def enqueued(self, work: Any, reads: list[Tensor], writes: list[Tensor]) -> None:
        """A collective is enqueued on its communicator's own stream, which waits for the current one."""
        self.act()
        owner = id(getattr(work, "communicator", None))
        if owner not in self._communicators:
            self._communicators[owner] = RecordedStream(self, "the communicator's stream")
        stream = self._communicators[owner]
        _join(stream.clock, self.current.clock)
        self.enqueue(stream, reads, writes, f"a collective ({site()[0]})")
        self._works[work] = (dict(stream.clock), self.step)
        self._stashed[work] = [*reads, *writes]

    def synchronized(self, work: Any) -> None:
        """work.synchronize(): the current stream waits for the collective."""
        self.act()
        _join(self.current.clock, self._works[work][0])
        self._stashed.pop(work, None)

    def completed(self, work: Any) -> bool:
        """work.is_completed(), by a host that does not wait: polling it, with a sleep between, is a wait."""
        return self.happened(*self._works[work])

    def aborted(self) -> None:
        """The communicators are aborted: their own kernels are gone, whether what they waited for has run or not."""
        for stream in self._communicators.values():
            _join(self.host, {stream.number: stream.clock[stream.number]})

    # -- clocks ---------------------------------------------------------------------------------------------------

    def act(self) -> None:
        """Before anything that changes an order: memory may have been dropped since the last one."""
        self.slept = False
        self.look_for_freed()
        _join(self.current.clock, self.host)

    def happened(self, clock: Clock, step: int) -> bool:
        """Whether the host may know that what `clock` says has happened, without waiting. Other threads never do."""
        if threading.get_ident() != self._thread:
            return False
        past = all(self.host.get(stream, 0) >= number for stream, number in clock.items())
        if past or self.slept or (self.lag is not None and self.step - step >= self.lag):
            _join(self.host, clock)
            return True
        return False

    def host_waits_for(self, clock: Clock, what: str) -> None:
        self.host_waits.append(f"{what} ({site()[0]})")
        _join(self.host, clock)

    # -- memory ---------------------------------------------------------------------------------------------------

    def memory_of(self, tensor: Tensor, kind: str | None = None) -> _Memory:
        """The memory of a tensor. kind: what it is if it is not known yet; None: the device's."""
        storage = tensor.untyped_storage()
        known = self._storages.get(storage._cdata)
        if known is not None:
            return known[1]
        if len(self._storages) > self._crowd:
            self.look_for_freed(everywhere=True)
            self._crowd = 2 * len(self._storages) + 100
        start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        memory = self._over(start, end)
        if memory is not None:  # one that was dropped, or another storage over the same memory, from dlpack
            self.look_for_freed(everywhere=True)
            memory = self._over(start, end)
        if memory is None:
            memory = _Memory(start, end, kind or "device", self.current.number)
        self._storages[storage._cdata] = StorageWeakRef(storage), memory
        return memory

    def _over(self, start: int, end: int) -> _Memory | None:
        return next(
            (memory for _, memory in self._storages.values() if memory.start < end and start < memory.end), None
        )

    def look_for_freed(self, everywhere: bool = False) -> None:
        """Memory that was dropped: its owner may use it from now on. Else only what other streams have used matters."""
        looked_at = self._storages if everywhere else self._used_elsewhere
        for key in [key for key in looked_at if self._storages[key][0].expired()]:
            memory = self._storages.pop(key)[1]
            self._used_elsewhere.discard(key)
            if memory.kind != "device" or any(other is memory for _, other in self._storages.values()):
                continue
            clock = dict(self.host)
            for number in (memory.owner, *memory.kept):  # record_stream: it is given away after what those have by now
                _join(clock, self.streams[number - 1].clock)
            for use in memory.accesses:
                if clock.get(use.stream, 0) < use.number:
                    self.error(f"memory is dropped, and its own stream does not wait for {self._tell(use)}")

    def _use(self, tensor: Tensor, write: bool, stream: int, clock: Clock, what: str) -> None:
        if not tensor.numel():
            return
        memory = self.memory_of(tensor)
        if stream != memory.owner:
            self._used_elsewhere.add(tensor.untyped_storage()._cdata)
        span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        start = tensor.data_ptr() - memory.start
        use = _Access(stream, clock[stream], write, start, start + span * tensor.element_size(), what)
        left = []
        for old in memory.accesses:
            conflicts = (write or old.write) and old.start < use.end and use.start < old.end
            if conflicts and old.stream != stream and clock.get(old.stream, 0) < old.number:
                self.error(f"no order between {self._tell(old)} and {self._tell(use)}, on the same memory")
            covered = use.start <= old.start and old.end <= use.end
            if not covered or not (write or (old.stream == stream and not old.write)):
                left.append(old)
        memory.accesses = [*left, use]

    def _tell(self, use: _Access) -> str:
        where = "the host" if use.stream == HOST else self.streams[use.stream - 1].name
        return f"{use.what}, which {'writes' if use.write else 'reads'} on {where}"

    # -- what is done with it -------------------------------------------------------------------------------------

    def transfer(self, source: Tensor, target: Tensor, non_blocking: bool, name: str) -> None:
        place, in_kernel = site()
        self.enqueue(self.current, [source], [target], f"{name} ({place})", in_kernel)
        if not (non_blocking and "pinned" in (self.memory_of(source).kind, self.memory_of(target).kind)):
            self.host_waits_for(self.current.clock, name)

    def enqueue(
        self,
        stream: RecordedStream,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        what: str,
        in_kernel: bool = False,
    ) -> None:
        """An operation on a stream, after all that the host has done."""
        self.slept = False
        _join(stream.clock, self.host)
        stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1
        for tensor in reads:
            self._use(tensor, False, stream.number, stream.clock, what)
        for tensor in writes:
            self._use(tensor, True, stream.number, stream.clock, what)
        self.actions.append(Action(stream.number, stream.clock[stream.number], dict(stream.clock), what, in_kernel))

    def by_host(self, reads: Sequence[Tensor], writes: Sequence[Tensor], what: str) -> None:
        self.host[HOST] = self.host.get(HOST, 0) + 1
        for tensor in reads:
            self._use(tensor, False, HOST, self.host, what)
        for tensor in writes:
            self._use(tensor, True, HOST, self.host, what)


def _join(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        if clock.get(stream, 0) < number:
            clock[stream] = number


def site() -> tuple[str, bool]:
    """The line of kfuse, or of a test, that made the call, and whether it is inside a kernel in its PyTorch form."""
    frame, in_kernel = sys._getframe(1), False
    while frame is not None:
        place = _place(frame.f_code.co_filename)
        if place is not None:
            if not place.startswith("kernels/"):
                return f"{place}:{frame.f_lineno}", in_kernel
            in_kernel = in_kernel or frame.f_code.co_name == "run"
        frame = frame.f_back  # type: ignore[assignment]
    return "?", in_kernel


@cache
def _place(file: str) -> str | None:
    """A file's name below kfuse/ or tests/; None for torch's, Python's and this one."""
    for folder in _FOLDERS:
        if file.startswith(folder):
            name = file.removeprefix(folder)
            return None if name in _DOUBLES else name
    return None


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Context: owner.name is `value`, whether the owner, its class or nothing has that name."""
    own = name in vars(owner)
    before = getattr(owner, name, None)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
