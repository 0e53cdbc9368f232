"""A double of a GPU's streams, events and memory, which finds missing order. It stands for hardware and runs none.

Whole steps run on real CPU tensors that pretend to lie on cuda:1. `kfuse.comm.devices.of` returns a RecordedDevice; a
TorchDispatchMode sees each operation of torch with the memory that it reads and writes; a few methods of torch that
are no operations on the CPU (`Tensor.to`, `.cpu()`, `.tolist()`, factories) are replaced. Each stream, and the host,
has a vector clock (Fidge 1988, Mattern 1989): what happened before what.

Rules, each with its source in torch 2.13:
1. An operation is enqueued on the current stream, after all that the host has done. Streams order nothing between them
   but by event.wait, wait_stream, and a collective (torch/cuda/streams.py).
2. Memory that is dropped is used again at once by the stream that allocated it. Other streams' uses must be ordered
   before, or announced by record_stream (c10/cuda/CUDACachingAllocator.cpp, `free`). Pinned memory is kept until the
   copies that use it are over (aten/src/ATen/core/CachingHostAllocator.h).
3. A copy between host and device waits for the stream, unless it is `non_blocking` and the host's side is pinned
   (aten/src/ATen/native/cuda/Copy.cu, `copy_kernel_cuda`). `torch.tensor(..., device=)` is such a copy.
4. `.item()`, `.tolist()`, `.cpu()`, `bool()`, `nonzero`, boolean indices and `equal` wait for the stream.
5. Triton launches on the current device (triton/runtime/jit.py), which is 0 until somebody sets another. During
   backward it is that of the tensors (torch/csrc/autograd/engine.cpp, `set_device`). Kernels of `kfuse.kernels` run in
   their PyTorch form here; what those read on the host is no wait.
6. A message belongs to the communicator's own stream. Its Work holds its tensors until `synchronize` (TensorShelf in
   torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp), and no longer than it lives: who drops it has to hold them.

What lies on the host: pinned memory, what torch's factories make without `device=` or with the string "cpu", and what
is computed from those. All other memory is the device's; so models and batches are made before recording begins.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from kfuse.comm import devices

Clock = dict[int, int]
"""By stream (0: the host), how many of its actions have happened."""

_HOST = 0
_OURS = 1
"""The index of the device that tensors pretend to lie on."""

_WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim"}
_FACTORIES = (
    "zeros",
    "ones",
    "empty",
    "full",
    "tensor",
    "as_tensor",
    "arange",
    "rand",
    "randn",
    "randint",
    "from_numpy",
)
_BARE = ("Stream", "Event", "current_stream", "stream", "synchronize", "set_device", "current_device", "manual_seed")


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
    """One allocation."""

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


class RecordedStream:
    """Double of torch.cuda.Stream."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder, self.name = recorder, name
        self.number = len(recorder.streams) + 1
        self.clock: Clock = {}
        recorder.streams.append(self)

    def wait_stream(self, stream: RecordedStream) -> None:
        """As torch's."""
        self._recorder.act()
        _join(self.clock, stream.clock)


class RecordedEvent:
    """Double of torch.cuda.Event. It has happened when the host has waited for it, or after `Recorder.lag` steps."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self.clock = recorder, Clock()
        self._step = 0

    def record(self, stream: RecordedStream | None = None) -> None:
        """As torch's."""
        self._recorder.act()
        self.clock = dict((stream or self._recorder.current).clock)
        self._step = self._recorder.step

    def wait(self, stream: RecordedStream | None = None) -> None:
        """As torch's."""
        self._recorder.act()
        _join((stream or self._recorder.current).clock, self.clock)

    def query(self) -> bool:
        """As torch's."""
        return self._recorder.happened(self.clock, self._step)

    def synchronize(self) -> None:
        """As torch's."""
        if not self._recorder.happened(self.clock, self._step):
            self._recorder.host_waits_for(self.clock, "event.synchronize")

    def elapsed_time(self, end: RecordedEvent) -> float:
        """Always 1 ms. Both must have happened."""
        if not (self.query() and end.query()):
            self._recorder.error("elapsed_time of an event that has not happened")
        return 1.0


class RecordedDevice(devices.Device):
    """Double of a GPU: `kfuse.comm.devices.CudaDevice`."""

    asynchronous = True

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(torch.device("cpu"))
        self._recorder = recorder

    def make_current(self) -> None:
        self._recorder.current_device = _OURS

    def new_stream(self, priority: int = 0) -> Any:
        return RecordedStream(self._recorder, f"stream {len(self._recorder.streams)}")

    def current_stream(self) -> Any:
        return self._recorder.current

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return self._recorder.on(stream)

    def event(self, timing: bool = False) -> Any:
        return RecordedEvent(self._recorder)

    def keep(self, tensors: Sequence[Tensor], stream: Any) -> None:
        for tensor in tensors:
            self._recorder.memory_of(tensor).kept.add(stream.number)

    def synchronize(self) -> None:
        for stream in self._recorder.streams:
            _join(self._recorder.host, stream.clock)
        self._recorder.host_waits_for({}, "device.synchronize")

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        with _disable_current_modes():
            made = _plain_empty(*shape, dtype=dtype)
        self._recorder.memory_of(made, "pinned")
        return made

    def seed(self, key: int) -> None:
        torch.manual_seed(key)


_plain_empty = torch.empty


class Recorder:
    """Context: what runs inside is recorded. At its end, and whenever asked, `errors` says what was wrong."""

    errors: list[str]
    """Uses of memory without an order, launches on another device, calls that bypass the seam."""
    host_waits: list[str]
    """Each wait of the host for the device: what waited, and where."""
    current: RecordedStream
    """The current stream."""
    lag: int | None
    """The device is so many steps behind the host (`end_step`). None: nothing happens unless the host waits."""

    def __init__(self, lag: int | None = None) -> None:
        self.errors, self.host_waits, self.lag = [], [], lag
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
        self._making: str | None = None
        self._asked, self._slept = 0, False
        self._exit, self._plain_sleep = contextlib.ExitStack(), time.sleep

    def __enter__(self) -> Recorder:
        self._exit.enter_context(patched(devices, "of", self._of))
        for name in _FACTORIES:
            self._exit.enter_context(patched(torch, name, self._factory(name, getattr(torch, name))))
        for name in ("to", "cpu", "tolist", "numpy"):
            self._exit.enter_context(patched(Tensor, name, getattr(self, f"_{name}")(getattr(Tensor, name))))
        for name in _BARE:
            self._exit.enter_context(patched(torch.cuda, name, self._bare(name)))
        self._exit.enter_context(patched(time, "sleep", self._sleep))
        self._exit.enter_context(_Operations(self))
        return self

    def __exit__(self, *error: object) -> None:
        self.look_for_freed(everywhere=True)
        self._exit.close()

    @property
    def current_device(self) -> int:
        """This thread's torch.cuda.current_device(): 0 until the thread sets another."""
        return self._current_devices.get(threading.get_ident(), 0)

    @current_device.setter
    def current_device(self, index: int) -> None:
        self._current_devices[threading.get_ident()] = index

    # -- what tests ask -------------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """Between steps."""
        self.look_for_freed()
        self.step += 1

    def waits_of(self, act: Callable[[], Any]) -> list[str]:
        """The host's waits during `act`."""
        before = len(self.host_waits)
        act()
        return self.host_waits[before:]

    def on(self, stream: RecordedStream) -> AbstractContextManager[None]:
        """Context: as torch.cuda.stream."""
        return patched(self, "current", stream)

    def error(self, text: str) -> None:
        """Takes note of an error."""
        if text not in self.errors:
            self.errors.append(text)

    # -- collectives: the observer of a double of a process group --------------------------------------------------

    def enqueued(self, work: Any, reads: list[Tensor], writes: list[Tensor]) -> None:
        """A collective is enqueued on its communicator's own stream, which waits for the current one."""
        self.act()
        owner = id(getattr(work, "communicator", None))
        if owner not in self._communicators:
            self._communicators[owner] = RecordedStream(self, "the communicator's stream")
        stream = self._communicators[owner]
        _join(stream.clock, self.current.clock)
        self._enqueue(stream, reads, writes, f"a collective ({_site()[0]})")
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
        self._slept = False
        self.look_for_freed()
        _join(self.current.clock, self.host)

    def happened(self, clock: Clock, step: int) -> bool:
        """Whether the host may know that what `clock` says has happened, without waiting. Other threads never do."""
        if threading.get_ident() != self._thread:
            return False
        past = all(self.host.get(stream, 0) >= number for stream, number in clock.items())
        if past or self._slept or (self.lag is not None and self.step - step >= self.lag):
            _join(self.host, clock)
            return True
        return False

    def host_waits_for(self, clock: Clock, what: str) -> None:
        """The host waits."""
        self.host_waits.append(f"{what} ({_site()[0]})")
        _join(self.host, clock)

    def _sleep(self, seconds: float) -> None:
        """In place of time.sleep: what is asked for next has happened meanwhile."""
        if threading.get_ident() != self._thread:
            self._plain_sleep(seconds)
            return
        if not self._slept:
            self.host_waits_for({}, "polling")
        self._slept = True

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
        """The memory that these addresses lie in."""
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
        where = "the host" if use.stream == _HOST else self.streams[use.stream - 1].name
        return f"{use.what}, which {'writes' if use.write else 'reads'} on {where}"

    # -- operations -----------------------------------------------------------------------------------------------

    def operation(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """One operation of torch: runs it and records what it does."""
        is_view, written = _effects(function)
        if is_view:
            return function(*args, **kwargs)
        self.look_for_freed()
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        for name, value in [*enumerate(args), *kwargs.items()]:
            (writes if name in written else reads).extend(_tensors(value))
        result = function(*args, **kwargs)
        if function._schema.name == "aten::set_":  # unpickled: the memory came from another process
            self.memory_of(result, "host")
            return result
        known = {t.untyped_storage()._cdata for t in (*reads, *writes)}
        fresh = [t for t in _tensors(result) if t.untyped_storage()._cdata not in known]
        if not (reads or writes or fresh):
            return result
        self._record(function, args, kwargs, reads, writes, fresh)
        return result

    def _record(
        self,
        function: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        reads: list[Tensor],
        writes: list[Tensor],
        fresh: list[Tensor],
    ) -> None:
        name = function._schema.name.removeprefix("aten::")
        site, in_kernel = _site()
        what = f"{name} ({site})"
        given = [t for t in (*reads, *writes) if t.numel()]
        on_host = [t for t in given if self.memory_of(t).kind != "device"]
        kind = "host" if given and len(on_host) == len(given) else "device"
        if not given and self._making is not None:
            kind = self._making
        for tensor in fresh:
            self.memory_of(tensor, kind)
        if kind == "host":
            self._by_host(reads, [*writes, *fresh], what)
            return
        if in_kernel and self.current_device != _OURS and torch._C._current_graph_task_id() < 0:
            self.error(
                f"{what}: a kernel is launched on cuda:{self.current_device}, and its tensors lie on cuda:{_OURS}"
            )
        if on_host and name in ("copy_", "_foreach_copy_"):
            non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            self.transfer(reads[0], writes[0], bool(non_blocking), name)
            return
        for tensor in on_host:
            if tensor.dim() or any(tensor is w for w in writes):
                self.error(f"{what}: an operand of shape {tuple(tensor.shape)} lies on the host, others on the device")
        numbers = {id(tensor) for tensor in on_host}
        self._by_host(on_host, [], what)
        self._enqueue(self.current, [t for t in reads if id(t) not in numbers], [*writes, *fresh], what)
        mask = name.startswith("index") and any(t.dtype in (torch.bool, torch.uint8) for t in reads[1:])
        if (name in _WAITING or mask) and not in_kernel:
            self.host_waits_for(self.current.clock, name)

    def transfer(self, source: Tensor, target: Tensor, non_blocking: bool, name: str) -> None:
        """A copy between host and device, on the current stream."""
        self._enqueue(self.current, [source], [target], f"{name} ({_site()[0]})")
        if not (non_blocking and "pinned" in (self.memory_of(source).kind, self.memory_of(target).kind)):
            self.host_waits_for(self.current.clock, name)

    def _enqueue(self, stream: RecordedStream, reads: Sequence[Tensor], writes: Sequence[Tensor], what: str) -> None:
        self._slept = False
        _join(stream.clock, self.host)
        stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1
        for tensor in reads:
            self._use(tensor, False, stream.number, stream.clock, what)
        for tensor in writes:
            self._use(tensor, True, stream.number, stream.clock, what)

    def _by_host(self, reads: Sequence[Tensor], writes: Sequence[Tensor], what: str) -> None:
        self.host[_HOST] = self.host.get(_HOST, 0) + 1
        for tensor in reads:
            self._use(tensor, False, _HOST, self.host, what)
        for tensor in writes:
            self._use(tensor, True, _HOST, self.host, what)

    # -- in place of torch's --------------------------------------------------------------------------------------

    def _of(self, name: torch.device) -> RecordedDevice:
        if name.type != "cpu":
            self.error(f"devices.of({name}): tensors lie on cuda:{_OURS}")
        return self.device

    def _factory(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            in_kernel = _site()[1]
            self._making = "device" if in_kernel or isinstance(kwargs.get("device"), torch.device) else "host"
            try:
                made = original(*args, **kwargs)
            finally:
                kind, self._making = self._making, None
            if name == "as_tensor" and args and isinstance(args[0], Tensor):
                return made
            self.memory_of(made, kind)
            if kind == "device" and name in ("tensor", "as_tensor") and not in_kernel:
                self.host_waits_for(self.current.clock, f"torch.{name}(..., device=): a copy from pageable memory")
            return made

        return make

    def _to(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        recorder = self

        def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            device = kwargs.get("device", args[0] if args else None)
            if isinstance(device, str):
                target = "host"
            elif isinstance(device, torch.device):
                target = "device"
            elif isinstance(device, Tensor):
                target = recorder.memory_of(device).kind
            else:
                return original(tensor, *args, **kwargs)
            kind = recorder.memory_of(tensor).kind
            if (kind == "device") == (target == "device"):
                return original(tensor, *args, **kwargs)
            non_blocking = bool(kwargs.get("non_blocking", False))
            with _disable_current_modes():
                copy = original(tensor, *args, **kwargs).clone()
            recorder.memory_of(copy, target)
            recorder.transfer(tensor, copy, non_blocking, "Tensor.to")
            return copy

        return to

    def _cpu(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda tensor, *args, **kwargs: tensor.to("cpu")

    def _tolist(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def tolist(tensor: Tensor) -> Any:
            self._read_on_host(tensor, "tolist")
            return original(tensor)

        return tolist

    def _numpy(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def numpy(tensor: Tensor, **kwargs: Any) -> Any:
            if self.memory_of(tensor).kind == "device":
                self.error(f"numpy() of a tensor on the device ({_site()[0]})")
            self._read_on_host(tensor, "numpy")
            return original(tensor, **kwargs)

        return numpy

    def _read_on_host(self, tensor: Tensor, name: str) -> None:
        what = f"{name} ({_site()[0]})"
        if self.memory_of(tensor).kind == "device":
            self._enqueue(self.current, [tensor], [], what)
            self.host_waits_for(self.current.clock, name)
        else:
            self._by_host([tensor], [], what)

    def _bare(self, name: str) -> Callable[..., Any]:
        def bare(*args: Any, **kwargs: Any) -> Any:
            self.error(f"torch.cuda.{name} is called, not the seam ({_site()[0]})")
            raise RuntimeError(f"torch.cuda.{name} while streams are recorded")

        return bare


class _Operations(TorchDispatchMode):
    """Sees each operation, in hooks of a backward too: that of CPU tensors runs in the calling thread."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recorder.operation(func, args, kwargs or {})


def _join(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        if clock.get(stream, 0) < number:
            clock[stream] = number


@cache
def _effects(function: Any) -> tuple[bool, frozenset[int | str]]:
    """Whether the operation only makes a view, and which arguments it writes, by position and name."""
    schema = function._schema
    written: set[int | str] = set()
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written |= {argument.name} if argument.kwarg_only else {position, argument.name}
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return views and not written, frozenset(written)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _site() -> tuple[str, bool]:
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
    for folder in ("/kfuse/", "/tests/"):
        if folder in file and "site-packages" not in file:
            name = file.rsplit(folder, 1)[1]
            return None if name.endswith("gpu/recorder.py") or name.endswith("stand_in.py") else name
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
