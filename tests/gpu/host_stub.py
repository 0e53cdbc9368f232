"""A GPU's path through kfuse on a machine without one, at what it costs the host: Triton's launcher over a driver that
runs nothing. README.md beside this file says what is real and what is doubled.

Tensors are the CPU's. Kernels leave them as they are, so that values mean nothing. `benchmarks/fixed_cost.py` takes
the time of steps on it, `test_launches.py` counts their launches and calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kfuse.comm import devices
from kfuse.kernels import dispatch, triton_normalisation, triton_orthogonal, triton_reduction, triton_updates
from kfuse.models import GPT

BUCKET_MB = 0.046
"""The GPT of `gpt_steps` then has 16 buckets, as one of 85 M parameters has with 25 MB."""
FAMILIES = (triton_normalisation, triton_orthogonal, triton_reduction, triton_updates)


class Driver:
    """Triton's driver of device 0."""

    @staticmethod
    def get_current_target() -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    @staticmethod
    def get_current_device() -> int:
        return 0

    get_current_stream = (1000).__add__
    """Of a device its current stream. Triton's own is no function of Python's either."""


class Binary(CompiledKernel):
    """A compiled kernel whose launch calls `launched` in place of CUDA's driver; else it is Triton's own."""

    def __init__(self, launched: Callable[..., None]) -> None:
        self.module = self.function = object()  # it is loaded
        self._module_pid = None  # of Triton 3.9: nobody unloads it
        self.src, self.name, self.packed_metadata = None, "", ()
        launcher: Any = object.__new__(CudaLauncher)
        launcher.launch = launched
        launcher.global_scratch_size = launcher.profile_scratch_size = 0
        launcher.global_scratch_align = launcher.profile_scratch_align = 1
        launcher.launch_cooperative_grid = launcher.launch_pdl = launcher.gsan_enabled = False
        launcher.arg_annotations = launcher.kernel_signature = None
        self._run = launcher


@contextlib.contextmanager
def triton_stood_in(active: Any, compile_: Callable[..., Any]) -> Iterator[None]:
    """Context: Triton's driver is `active`, its compiler `compile_`, and no kernel is compiled yet."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(driver, "_active", active))
        stack.enter_context(patch.object(JITFunction, "_do_compile", compile_))
        for kernel in (value for module in FAMILIES for value in vars(module).values()):
            if isinstance(kernel, JITFunction):  # an empty cache, as in a new process
                caches = type(kernel.device_caches)(kernel.create_binder)
                stack.enter_context(patch.object(kernel, "device_caches", caches))
        triton_reduction._uploaded_program.cache_clear()
        yield


class Device(devices.Device):
    """A GPU for which each operation is over when its call returns."""

    asynchronous = True


@contextlib.contextmanager
def no_gpu() -> Iterator[list[str]]:
    """Context: tensors of the CPU go a GPU's way. Yields the names of the kernels that are launched meanwhile."""
    names: list[str] = []

    def compile_(jit: JITFunction[Any], key: str, *rest: Any) -> Any:
        name = jit.__name__
        binary = jit.device_caches[0][0][key] = Binary(lambda *_: names.append(name))
        return binary

    device = Device(torch.device("cpu"))
    with (
        triton_stood_in(Driver, compile_),
        patch.object(dispatch, "INTERPRETED", True),  # so CPU tensors are Triton's
        patch.object(devices, "of", lambda name: device),
    ):
        yield names


def gpt_steps(make: Callable[..., Any]) -> Callable[[int], None]:
    """Makes so many steps of 2 micro-batches of a GPT of 148 tensors, by kfuse's optimizer or in a loop by hand."""
    torch.manual_seed(0)
    model = GPT(vocab_size=64, block_size=8, layers=12, heads=1, width=32, dropout=0.0)
    tokens, opt = torch.randint(0, 64, (1, 9)), make(model.parameters(), lr=1e-3)

    def loss() -> Tensor:
        return torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[0, 1:])

    def steps(number: int) -> None:
        for _ in range(number):
            for last in (False, True):
                if hasattr(opt, "micro_batch"):
                    with opt.micro_batch(samples=1, last=last):
                        loss().backward()  # type: ignore[no-untyped-call]
                else:
                    (loss() / 2).backward()  # type: ignore[no-untyped-call]
            opt.step()
            opt.zero_grad()

    return steps
