"""A double of Triton's driver for two GPUs: records each launch's device, stream, grid and arguments. Nothing runs.

README.md beside this file says what is real and what is doubled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from gpu.host_stub import Binary, Device, Driver, triton_stood_in
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.runtime.jit import JITFunction

from kfuse.comm import devices
from kfuse.comm.group import Group, Pending
from kfuse.kernels.dispatch import Kernel

GPU = torch.device("cuda", 1)
"""Where tensors are pretended to lie: not on the device that is current by default."""


@dataclass(frozen=True)
class Started:
    """One launch, as the driver saw it."""

    kernel: str
    device: int
    stream: int
    devices: set[int | None]
    """Where its tensors lie."""


@dataclass
class SeenLaunches(Driver):
    """Triton's driver, and torch.cuda's current device."""

    started: list[Started] = field(default_factory=list)
    compiled: list[tuple[str, str]] = field(default_factory=list)
    """(kernel, Triton's cache key)."""
    uploads: list[tuple[torch.device, bool]] = field(default_factory=list)
    """Tables copied to a device: which one, and whether from pinned memory."""
    device: int = 0
    """The current one."""

    def get_current_device(self) -> int:
        return self.device

    def exchange(self, device: int) -> int:
        """As torch.cuda._exchange_device: makes `device` current (not for a negative one), returns the one before."""
        before = self.device
        self.device = device if device >= 0 else before
        return before


class _Pretence(TorchFunctionMode):
    """Tensors say that they are on `GPU`. Calls that name it are made on the CPU."""

    def __init__(self, seen: SeenLaunches, on: torch.device) -> None:
        super().__init__()
        self._seen, self._on = seen, on

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            return self._on
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return True
        if func is torch.Tensor.backward:
            with self:  # it has ended for the time of this call, and hooks run in it
                engine, loss = torch.autograd.Variable._execution_engine, args[0]
                return engine.run_backward(
                    (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
                )
        if func is torch.Tensor.pin_memory:
            _PINNED.append(args[0])
            return args[0]
        kwargs = dict(kwargs or {})
        named = [value for value in (*args, kwargs.get("device")) if isinstance(value, torch.device)]
        if func is torch.Tensor.to and any(value.type == "cuda" for value in named):
            self._seen.uploads.append((named[0], any(args[0] is each for each in _PINNED)))
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        return func(*(torch.device("cpu") if isinstance(each, torch.device) else each for each in args), **kwargs)


_PINNED: list[Tensor] = []


class Echo(Group):
    """A double of a group over NCCL: every other rank sends nothing, or zeros."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        super().__init__(device=device)
        self.rank, self.size, self.hosts = rank, size, [""] * size

    def all_to_all(self, out: Tensor, into: Sequence[int], tensor: Tensor, cut: Sequence[int], what: str) -> Pending:
        out.zero_()
        start, mine = sum(into[: self.rank]), sum(cut[: self.rank])
        out[start : start + into[self.rank]] = tensor[mine : mine + cut[self.rank]]
        return Pending(self, what, [])


def _run(kernel: Kernel[..., Any, Any], given: Any, run: Any = Kernel.run) -> Any:
    """A kernel's launches; its result, and its writes, are PyTorch's."""
    with torch.no_grad():
        result = run(kernel, given)
        if not getattr(given, kernel._device_of).is_cuda:
            return result
        with torch._C.DisableTorchFunction():  # with tensors of the CPU: nothing is launched
            return kernel._by_torch(given)


@contextlib.contextmanager
def recorded(on: torch.device = GPU) -> Iterator[SeenLaunches]:
    """Context: every tensor is on `on`, and device 0 is current. Yields what is launched meanwhile."""
    seen = SeenLaunches()

    def compile_(jit: JITFunction[Any], key: str, *rest: Any) -> Any:
        def launched(x: int, y: int, z: int, stream: int, *more: Any) -> None:
            devices = {value.device.index for value in more[-1] if isinstance(value, Tensor)}
            seen.started.append(Started(jit.__name__, seen.device, stream, devices))

        seen.compiled.append((jit.__name__, key))
        binary = jit.device_caches[rest[-5]][0][key] = Binary(launched)
        return binary

    with pytest.MonkeyPatch.context() as patch, _Pretence(seen, on), triton_stood_in(seen, compile_):
        patch.setattr(torch.cuda, "current_device", seen.get_current_device)
        for name in ("_exchange_device", "_maybe_exchange_device"):
            patch.setattr(torch.cuda, name, seen.exchange)
        patch.setattr(devices, "of", lambda name: Device(name))
        patch.setattr(Kernel, "run", _run)
        yield seen
    _PINNED.clear()
