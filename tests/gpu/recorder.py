"""A double of a GPU's streams, events and memory, which finds missing order. It stands for hardware and runs none.

Whole steps run on real CPU tensors that pretend to lie on cuda:1. `kfuse.comm.devices.of` returns a RecordedDevice; a
TorchDispatchMode sees each operation of torch with the memory that it reads and writes; a few methods of torch that
are no operations on the CPU (`Tensor.to`, `.cpu()`, `.tolist()`, factories) are replaced. Each stream, and the host,
has a vector clock (Fidge 1988, Mattern 1989): what happened before what.

README.md beside this file has the rules, with their sources.

What lies on the host: pinned memory, what torch's factories make without `device=` or with the string "cpu", and what
is computed from those. All other memory is the device's; so models and batches are made before recording begins.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from gpu.order import OURS, Order, RecordedDevice, patched, site
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from kfuse.comm import devices

_WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim"}
_FACTORIES = ["zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint"]
_FROM_THE_HOST = ["tensor", "as_tensor", "from_numpy"]


class Recorder(Order):
    """Context: what torch does inside is recorded. At its end, and whenever asked, `errors` says what was wrong."""

    def __init__(self, lag: int | None = None) -> None:
        super().__init__(lag)
        self._making: str | None = None  # where a factory's memory lies, while it runs
        self._exit, self._plain_sleep = contextlib.ExitStack(), time.sleep

    def __enter__(self) -> Recorder:
        self._exit.enter_context(patched(devices, "of", self._of))
        for name in [*_FACTORIES, *_FROM_THE_HOST]:
            self._exit.enter_context(patched(torch, name, self._factory(name, getattr(torch, name))))
        for name in ("to", "cpu", "tolist", "numpy"):
            self._exit.enter_context(patched(Tensor, name, getattr(self, f"_{name}")(getattr(Tensor, name))))
        self._exit.enter_context(patched(time, "sleep", self._sleep))
        self._exit.enter_context(_Operations(self))
        return self

    def __exit__(self, *error: object) -> None:
        self.look_for_freed(everywhere=True)
        self._exit.close()

    def _sleep(self, seconds: float) -> None:
        """In place of time.sleep: what is asked for next has happened meanwhile."""
        if threading.get_ident() != self._thread:
            self._plain_sleep(seconds)
            return
        if not self.slept:
            self.host_waits_for({}, "polling")
        self.slept = True

    def operation(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        is_view, written = _effects(function)
        if is_view:
            return function(*args, **kwargs)
        self.look_for_freed()
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        for name, value in [*enumerate(args), *kwargs.items()]:
            (writes if name in written else reads).extend(tensors_in(value))
        result = function(*args, **kwargs)
        if function._schema.name == "aten::set_":  # unpickled: the memory came from another process
            self.memory_of(result, "host")
            return result
        known = {t.untyped_storage()._cdata for t in (*reads, *writes)}
        fresh = [t for t in tensors_in(result) if t.untyped_storage()._cdata not in known]
        if not (reads or writes or fresh):
            return result
        self._record(function._schema.name.removeprefix("aten::"), args, kwargs, reads, writes, fresh)
        return result

    def _record(self, name: str, args: Any, kwargs: Any, reads: Any, writes: Any, fresh: Any) -> None:
        place, in_kernel = site()
        what = f"{name} ({place})"
        given = [t for t in (*reads, *writes) if t.numel()]
        on_host = [t for t in given if self.memory_of(t).kind != "device"]
        kind = "host" if given and len(on_host) == len(given) else "device"
        if not given and self._making is not None:
            kind = self._making
        for tensor in fresh:
            self.memory_of(tensor, kind)
        if kind == "host":
            self.by_host(reads, [*writes, *fresh], what)
            return
        if in_kernel and self.current_device != OURS and torch._C._current_graph_task_id() < 0:
            self.error(
                f"{what}: a kernel is launched on cuda:{self.current_device}, and its tensors lie on cuda:{OURS}"
            )
        if on_host and name in ("copy_", "_foreach_copy_"):
            non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            self.transfer(reads[0], writes[0], bool(non_blocking), name)
            return
        for tensor in on_host:
            if tensor.dim() or any(tensor is w for w in writes):
                self.error(f"{what}: an operand of shape {tuple(tensor.shape)} lies on the host, others on the device")
        numbers = {id(tensor) for tensor in on_host}
        self.by_host(on_host, [], what)
        self.enqueue(self.current, [t for t in reads if id(t) not in numbers], [*writes, *fresh], what, in_kernel)
        mask = name.startswith("index") and any(t.dtype in (torch.bool, torch.uint8) for t in reads[1:])
        if (name in _WAITING or mask) and not in_kernel:
            self.host_waits_for(self.current.clock, name)

    def _of(self, name: torch.device) -> RecordedDevice:
        if name.type != "cpu":
            self.error(f"devices.of({name}): tensors lie on cuda:{OURS}")
        return self.device

    def _factory(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            in_kernel = site()[1]
            self._making = "device" if in_kernel or isinstance(kwargs.get("device"), torch.device) else "host"
            try:
                made = original(*args, **kwargs)
            finally:
                kind, self._making = self._making, None
            if name == "as_tensor" and args and isinstance(args[0], Tensor):
                return made
            self.memory_of(made, kind)
            if kind == "device" and name in _FROM_THE_HOST and not in_kernel:
                self.host_waits_for(self.current.clock, f"torch.{name}(..., device=): a copy from pageable memory")
            return made

        return make

    def _to(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            device = kwargs.get("device", args[0] if args else None)
            if isinstance(device, str):
                target = "host"
            elif isinstance(device, torch.device):
                target = "device"
            elif isinstance(device, Tensor):
                target = self.memory_of(device).kind
            else:
                return original(tensor, *args, **kwargs)
            if (self.memory_of(tensor).kind == "device") == (target == "device"):
                return original(tensor, *args, **kwargs)
            with _disable_current_modes():
                copy = original(tensor, *args, **kwargs).clone()
            self.memory_of(copy, target)
            self.transfer(tensor, copy, bool(kwargs.get("non_blocking")), "Tensor.to")
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
                self.error(f"numpy() of a tensor on the device ({site()[0]})")
            self._read_on_host(tensor, "numpy")
            return original(tensor, **kwargs)

        return numpy

    def _read_on_host(self, tensor: Tensor, name: str) -> None:
        what = f"{name} ({site()[0]})"
        if self.memory_of(tensor).kind == "device":
            self.enqueue(self.current, [tensor], [], what)
            self.host_waits_for(self.current.clock, name)
        else:
            self.by_host([tensor], [], what)


class _Operations(TorchDispatchMode):
    """Sees each operation, in hooks of a backward too: that of CPU tensors runs in the calling thread."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recorder.operation(func, args, kwargs or {})


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


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []
