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
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kfuse.comm import devices
from kfuse.comm.group import Group, Pending
from kfuse.comm.nccl import NcclGroup
from kfuse.kernels import (
    normalisation,
    orthogonal,
    reduction,
    triton_normalisation,
    triton_orthogonal,
    triton_reduction,
    triton_updates,
    updates,
)
from kfuse.kernels.dispatch import Launches

GPU = torch.device("cuda", 1)
"""Where tensors are pretended to lie: not on the device that is current by default."""
IMPLEMENTATIONS = {
    triton_reduction: (reduction, ["pack", "reduce", "block_sumsq", "sum_partials"]),
    triton_updates: (updates, ["adamw", "sgd", "lamb"]),
    triton_normalisation: (normalisation, ["norm_forward", "norm_backward"]),
    triton_orthogonal: (orthogonal, ["orthogonalise"]),
}


@dataclass(frozen=True)
class Started:
    """One launch, as the driver saw it."""

    kernel: str
    device: int
    stream: int
    devices: set[int | None]
    """Where its tensors lie."""


@dataclass
class SeenLaunches:
    """Triton's driver, and torch.cuda's current device."""

    started: list[Started] = field(default_factory=list)
    compiled: list[tuple[str, str]] = field(default_factory=list)
    """(kernel, Triton's cache key)."""
    uploads: list[tuple[torch.device, bool]] = field(default_factory=list)
    """Tables copied to a device: which one, and whether from pinned memory."""
    device: int = 0
    """The current one."""

    @staticmethod
    def get_current_target() -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self.device

    @staticmethod
    def get_current_stream(device: int) -> int:
        """The stream that is current on a device: another number for each."""
        return 1000 + device

    def exchange(self, device: int) -> int:
        """As torch.cuda._exchange_device: makes `device` current (not for a negative one), returns the one before."""
        before = self.device
        self.device = device if device >= 0 else before
        return before


class _Binary:
    """A compiled kernel that records its launches: of triton's CompiledKernel, what JITFunction.run uses."""

    function, packed_metadata = None, None

    def __init__(self, seen: SeenLaunches, kernel: JITFunction[Any]) -> None:
        self._seen, self._kernel = seen, kernel

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(self, x: int, y: int, z: int, stream: int, *rest: Any) -> None:
        arguments = dict(zip(self._kernel.arg_names, rest[-len(self._kernel.arg_names) :], strict=True))
        devices = {value.device.index for value in arguments.values() if isinstance(value, Tensor)}
        self._seen.started.append(Started(self._kernel.__name__, self._seen.device, stream, devices))


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


class _Device(devices.Device):
    """A GPU for which each operation is over when its call returns."""

    asynchronous = True


class Echo(Group):
    """A double of a group over NCCL: every other rank sends nothing, or zeros."""

    shards = NcclGroup.shards

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        super().__init__(device=device)
        self.rank, self.size, self.hosts = rank, size, [""] * size

    def all_to_all(self, out: Tensor, into: Sequence[int], tensor: Tensor, cut: Sequence[int], what: str) -> Pending:
        out.zero_()
        start, mine = sum(into[: self.rank]), sum(cut[: self.rank])
        out[start : start + into[self.rank]] = tensor[mine : mine + cut[self.rank]]
        return Pending(self, what, [])


def _computed(implementation: Callable[[Any], Launches], by_torch: Callable[[Any], Any]) -> Callable[[Any], Launches]:
    """The launches of a Triton implementation; its result, and its writes, are PyTorch's."""

    def run(given: Any) -> Launches:
        yield from implementation(given)
        with torch._C.DisableTorchFunction():  # with tensors of the CPU: nothing is launched
            return by_torch(given)  # type: ignore[no-any-return]

    return run


@contextlib.contextmanager
def recorded(on: torch.device = GPU) -> Iterator[SeenLaunches]:
    """Context: every tensor is on `on`, and device 0 is current. Yields what is launched meanwhile."""
    seen = SeenLaunches()
    with pytest.MonkeyPatch.context() as patch, _Pretence(seen, on):
        patch.setattr(torch.cuda, "current_device", seen.get_current_device)
        for name in ("_exchange_device", "_maybe_exchange_device"):
            patch.setattr(torch.cuda, name, seen.exchange)
        patch.setattr(driver, "_active", seen)

        def compile_(jit: JITFunction[Any], key: str, *rest: Any) -> Any:
            device = rest[-5]
            seen.compiled.append((jit.__name__, key))
            binary = jit.device_caches[device][0][key] = _Binary(seen, jit)
            return binary

        patch.setattr(JITFunction, "_do_compile", compile_)
        patch.setattr(devices, "of", lambda name: _Device(name))
        for module, (by_torch, names) in IMPLEMENTATIONS.items():
            for name in names:
                both = getattr(module, name), getattr(by_torch, f"{name}_by_torch")
                patch.setattr(module, name, _computed(*both))
            for kernel in vars(module).values():
                if isinstance(kernel, JITFunction):  # an empty cache, as in a new process
                    patch.setattr(kernel, "device_caches", type(kernel.device_caches)(kernel.create_binder))
        triton_reduction._uploaded_program.cache_clear()
        yield seen
    _PINNED.clear()
