"""A worker's device: its streams, its events, pinned memory and random numbers.

Only this module calls torch.cuda, but for two: `kernels`, which asks for the device and stream of a launch, and
`kfuse.tools.doctor.self_test`, which looks at the machine.

On the CPU an operation is over when its call returns, so streams order nothing there and every event has happened.
On a GPU the host only enqueues work. Code that must wait for it, or order it, asks `of(device)`, and reads the same for
both kinds of device; tests put a recorder in its place.
"""

from __future__ import annotations

import contextlib
import platform
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.cpu import Stream as Stream  # the host's: it orders nothing

from kfuse.kernels.private_names import need


class DeviceError(RuntimeError):
    """This worker's GPU is not there, or cannot be set up as the options ask. The message is one line."""


class Event:
    """A point in a stream's work: of torch.cuda.Event's methods, those that are used. This class: the host's."""

    _at = 0.0

    def record(self, stream: Any = None) -> None:
        """Puts the event behind the work enqueued so far on `stream` (None: the current stream)."""
        self._at = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Later work on `stream` (None: the current stream) begins after the event. The host does not wait."""

    def query(self) -> bool:
        """Whether the event has happened. The host does not wait."""
        return True

    def synchronize(self) -> None:
        """The host waits for the event."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this event to `end`, both made with `timing` and both past."""
        return 1000 * float(end._at - self._at)


_HOST_STREAM, _NO_CONTEXT = Stream(), contextlib.nullcontext()


class Device:
    """The CPU."""

    name: torch.device
    asynchronous = False  # work may be under way when the call that started it has returned
    number: int | None = None  # of a GPU, in this process

    def __init__(self, name: torch.device) -> None:
        self.name = name

    def model(self) -> str:
        """The kind of hardware: two devices of one kind compute the same bits."""
        with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:  # Linux
            for line in lines:
                if line.startswith("model name"):
                    return f"{line.partition(':')[2].strip()} ({torch.backends.cpu.get_cpu_capability()})"
        return f"{platform.machine()} ({torch.backends.cpu.get_cpu_capability()})"

    def make_current(self) -> None:
        """Has this thread use this device from now on, unless told otherwise."""

    def new_stream(self) -> Stream:
        """A stream of its own."""
        return Stream()

    def current_stream(self) -> Stream:
        return _HOST_STREAM

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Context: this thread's work is enqueued on `stream`."""
        return _NO_CONTEXT

    def event(self, timing: bool = False) -> Event:
        """timing: the event can tell the time to another one."""
        return Event()

    def keep(self, tensors: Sequence[Tensor], stream: Stream) -> None:
        """`stream` uses these tensors of another one: once they are dropped, their memory is not used again before the
        work that `stream` has by then is over (torch.Tensor.record_stream).
        """

    def synchronize(self) -> None:
        """The host waits for all work on the device."""

    def holds(self, *tensors: Tensor) -> bool:
        return {tensor.device for tensor in tensors} == {self.name}

    def reads(self, number: int) -> bool:
        """Whether kernels on this device can read the memory of the GPU of that number."""
        return False

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialised memory of the host, from and to which the device copies while the host goes on."""
        return torch.empty(tuple(shape), dtype=dtype)

    def seed(self, key: int) -> None:
        """Seeds the GPU's random numbers."""

    def random_state(self) -> Tensor | None:
        """The state of the GPU's random numbers; None on the CPU."""
        return None

    def set_random_state(self, state: Tensor | None) -> None:
        """Takes back what `random_state` returned."""


class CudaDevice(Device):
    """One GPU, by its index: nothing here depends on which device is current."""

    asynchronous = True

    def __init__(self, name: torch.device) -> None:
        super().__init__(name)
        self.number = name.index
        need("torch._C._cuda_getCurrentStream" * torch.cuda.is_available())
        self._streams: dict[tuple[int, int, int], torch.cuda.Stream] = {}  # by torch's own name of each

    def model(self) -> str:
        return torch.cuda.get_device_name(self.name)

    def make_current(self) -> None:
        torch.cuda.set_device(self.name)

    def new_stream(self) -> Any:
        return torch.cuda.Stream(self.name)  # type: ignore[no-untyped-call]

    def current_stream(self) -> Any:
        """Every bucket asks: torch.cuda.current_stream takes some 10 us, since it makes a Stream each time."""
        stream = torch._C._cuda_getCurrentStream(self.name.index)
        if stream not in self._streams:
            self._streams[stream] = torch.cuda.current_stream(self.name)
        return self._streams[stream]

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return _NO_CONTEXT if stream == self.current_stream() else torch.cuda.stream(stream)

    def event(self, timing: bool = False) -> Event:
        return _CudaEvent(self, timing)

    def keep(self, tensors: Sequence[Tensor], stream: Any) -> None:
        for tensor in tensors:
            tensor.record_stream(stream)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.name)

    def reads(self, number: int) -> bool:
        return number < torch.cuda.device_count() and torch.cuda.can_device_access_peer(self.name, number)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def seed(self, key: int) -> None:
        with torch.cuda.device(self.name):
            torch.cuda.manual_seed(key)

    def random_state(self) -> Tensor | None:
        return torch.cuda.get_rng_state(self.name)

    def set_random_state(self, state: Any) -> None:
        torch.cuda.set_rng_state(state, self.name)


def count() -> int:
    """How many GPUs this process sees. 0: its device is the CPU."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def started() -> bool:
    """Whether this process has used a GPU: some settings of the environment are too late then."""
    return torch.cuda.is_initialized()  # type: ignore[no-any-return, no-untyped-call]


def problem() -> str | None:
    """What keeps several GPUs from training together, in one line; None: nothing does."""
    major, minor, *_ = torch.__version__.split(".")
    if (int(major), int(minor)) >= (2, 10):
        return None
    return f"torch {torch.__version__}: several GPUs need torch 2.10 or later, whose NCCL calls take a lock"


def current() -> int:
    """The number of the GPU that this thread uses unless told otherwise; no GPU is used to find out."""
    return torch.cuda.current_device() if started() else 0


class StreamOrder:
    """The streams of a GPU that a step's work lies on, and its order where they are several.

    Autograd runs a layer's backward, and its hooks, on the stream of that layer's forward.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._used: list[Stream] = []

    @property
    def several(self) -> bool:
        """Whether the step's work so far lies on several streams."""
        return len(self._used) > 1

    def add(self) -> None:
        """What is on the current stream so far belongs to the step."""
        if (current := self._device.current_stream()) not in self._used:
            self._used.append(current)

    def go_on_here(self, reads: Sequence[Tensor | None] = ()) -> None:
        """Later work on the current stream begins after all of the step's work so far.

        reads: memory of the other streams that it uses, and that may be dropped before it has run.
        """
        current = self._device.current_stream()
        others = [stream for stream in self._used if stream != current]
        for stream in others:
            current.wait_stream(stream)
        if others:
            self._device.keep([tensor for tensor in reads if tensor is not None], current)
        self._used = [*others, current]

    def end(self) -> None:
        """The step is over."""
        self._used = []


Place = Tensor | NDArray[Any]  # see `quick`


def quick(tensor: Tensor) -> Place:
    """Numbers that a step reads and writes one by one: on the CPU an array, whose calls take a fraction of the time."""
    return tensor if of(tensor.device).asynchronous else tensor.numpy()


@cache
def of(name: torch.device) -> Device:
    """The device of this name. A GPU without an index is the one that is current at the first call."""
    if name.type != "cuda":
        return Device(name)
    return CudaDevice(name if name.index is not None else torch.device("cuda", torch.cuda.current_device()))


class _CudaEvent(Event):
    """Recorded on its own device's current stream, whichever device is current."""

    def __init__(self, device: CudaDevice, timing: bool) -> None:
        self._device = device
        self._event = torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]

    def record(self, stream: Any = None) -> None:
        self._event.record(stream or self._device.current_stream())

    def wait(self, stream: Any = None) -> None:
        self._event.wait(stream or self._device.current_stream())

    def query(self) -> bool:
        happened: bool = self._event.query()  # type: ignore[no-untyped-call]
        return happened

    def synchronize(self) -> None:
        self._event.synchronize()

    def elapsed_time(self, end: Any) -> float:
        milliseconds: float = self._event.elapsed_time(end._event)
        return milliseconds


@contextlib.contextmanager
def generators_restored(device: torch.device) -> Iterator[None]:
    """On exit, restores the state of the global generators of torch, numpy and random: they belong to the user."""
    cpu, numpy_state, python_state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    on_device = of(device).random_state()
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        of(device).set_random_state(on_device)
