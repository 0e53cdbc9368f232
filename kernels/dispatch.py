"""Chooses a kernel's implementation, Triton for GPU tensors, PyTorch for all others; and Triton's launches.

`TRITON_INTERPRET=1` sends CPU tensors to the Triton code as well, which then runs in Triton's interpreter.

A kernel is declared by one dataclass of arguments, which checks them as it is made. The public function, the PyTorch
implementation, the Triton launcher and the table of kernels to compile ahead of time all use that dataclass, so that
its fields are written once. A step keeps the arguments of each bucket, and runs them without a further check.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

P = ParamSpec("P")
Given = TypeVar("Given")
Result = TypeVar("Result")


def require(what: str, tensor: Tensor | None, shape: Sequence[int], *dtypes: torch.dtype) -> None:
    """Raises ValueError where a tensor that is given is not contiguous, of this shape and one of these dtypes."""
    if tensor is not None and not (tensor.shape == shape and tensor.dtype in dtypes and tensor.is_contiguous()):
        wanted = f"contiguous {' or '.join(str(each).removeprefix('torch.') for each in dtypes)} {list(shape)}"
        raise ValueError(f"{what} must be {wanted}, got {tensor.dtype} {list(tensor.shape)}")


class Kernel(Generic[P, Given, Result]):
    """The public function of a kernel. It takes the fields of `arguments` and runs an implementation."""

    def __init__(
        self, name: str, arguments: Callable[P, Given], device_of: str, by_torch: Callable[[Given], Result]
    ) -> None:
        """device_of: the field whose device decides which implementation runs.

        by_torch: the PyTorch implementation. In the module `triton_M` beside its own, M, the Triton one is called
            `name` and yields its launches. It is imported when the first GPU tensor arrives: importing kfuse must not
            need Triton.
        """
        self.__name__, self.__doc__ = name, arguments.__doc__
        self._arguments, self._device_of, self._by_torch = arguments, device_of, by_torch
        package, _, family = by_torch.__module__.rpartition(".")
        self._triton_module = f"{package}.triton_{family}"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Result:
        return self.run(self._arguments(*args, **kwargs))

    def run(self, given: Given) -> Result:
        """Runs on arguments that were checked as they were made."""
        if torch.is_grad_enabled():  # entering no_grad where it holds already, as in a hook, takes microseconds
            with torch.no_grad():
                return self.run(given)
        if not (getattr(given, self._device_of).is_cuda or INTERPRETED):
            return self._by_torch(given)
        kept: Launch | None = getattr(given, "kept", None)
        if kept is not None and kept.again(given):
            return None  # type: ignore[return-value]  # a kernel whose launches are kept has no result
        module = import_module(self._triton_module)
        launches: Generator[Launch, None, Result] = getattr(module, self.__name__)(given)
        while True:
            try:
                launch = next(launches)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            launch.run()
            if launch.binary is not None:
                vars(given)["kept"] = launch


# -- Triton's launches ------------------------------------------------------------------------------------------------

WARP_SIZE = 64 if torch.version.hip else 32
REGISTERS = 65536  # of a multiprocessor, from sm_80 on: a program whose threads need more cannot be launched


@cache  # nobody changes what it returns
def options(threads: int, warp_size: int = WARP_SIZE) -> dict[str, int | bool]:
    """Compiler options for `threads` threads a program, of at most 128 registers each: fewer where all would not fit.

    Nothing is autotuned: another shape would add in another order. Multiplications and additions are not fused, so that
    each is rounded as the source says, and as the PyTorch implementation rounds it. (ptxas 12.9, which Triton 3.6 uses
    for Blackwell, fuses packed pairs all the same: there, accumulating bf16 gradients with a scale can differ in a bit,
    and so can a sum of squares between `reduce` and `block_sumsq`.)
    """
    shape: dict[str, int | bool] = {"num_warps": threads // warp_size, "enable_fp_fusion": False}
    if warp_size == 32:
        # Without a limit of its own, ptxas for sm_100 would rather spill a register than lose occupancy.
        # It is also the only limit: with it, ptxas does not ask whether all threads' registers exist.
        shape["maxnreg"] = min(128, REGISTERS // threads)
    return shape


@dataclass(slots=True)  # not frozen: one is made for each launch, and a frozen one takes three times as long
class Launch:
    """One launch of a kernel. `run` performs it; `kfuse.tools.kernels_aot` compiles it.

    Args:
        given: runtime arguments by the kernel's own names for them: tensors, numbers, and None for an optional tensor.
            Names that the kernel does not have are ignored, so that a launcher can pass all of its fields.
        constants: the kernel's compile-time constants.
        threads: of each program.
        later: what later launches may have in place of some of the arguments and constants. It is compiled with the
            first launch, so that no later step waits for the compiler.
        varying: the launch is kept with its object of arguments, and made `again` for it without the launcher and
            Triton's binder. Returns, from that object, the arguments and constants that may have changed since: tensors
            aligned as the first ones. None where the launch has to be made anew. For a launcher of one launch.
    """

    kernel: Any
    grid: tuple[int, ...]
    given: dict[str, Any]
    constants: dict[str, Any]
    threads: int = 256
    later: tuple[dict[str, Any], ...] = ()
    varying: Callable[[Any], Mapping[str, Any] | None] | None = None
    device: torch.device | None = None  # its tensors'
    # Of one that is kept: the compiled kernel, and all that it takes.
    binary: Any = None
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def arguments(self) -> dict[str, Any]:
        """The runtime arguments, in the kernel's order."""
        given, constants = self.given, self.constants
        return {name: given[name] for name in self.kernel.arg_names if name not in constants}

    def run(self) -> None:
        """Starts the kernel on its tensors' device, on the stream that is current there. An empty grid starts nothing.

        Raises ValueError where tensors lie on several devices.
        """
        if not all(self.grid):
            return
        on = [value.device for value in self.arguments.values() if isinstance(value, Tensor)]
        if on.count(on[0]) < len(on):
            where = [f"{name} is on {each.device}" for name, each in self.arguments.items() if isinstance(each, Tensor)]
            raise ValueError(f"{self.kernel.__name__}: {', '.join(where)}: must be the same")
        self.device = on[0]
        self._start_there()

    def again(self, given: Any) -> bool:
        """Performs the launch again, for its object of arguments; False where it has to be made anew."""
        if self.varying is None or (changes := self.varying(given)) is None:
            return False
        for name, value in changes.items():
            before = self.values[name]
            if (value is None) is not (before is None) or (name in self.constants and value is not before):
                return False  # of another binary
            self.values[name] = value
        self._start_there()
        return True

    def _start_there(self) -> None:
        # Triton starts a kernel on the current device, whichever its tensors' is (triton 3.7.1, runtime/jit.py:713).
        assert self.device is not None, "every kernel has a tensor"
        if self.device.type != "cuda" or self.device.index == torch.cuda.current_device():
            self._start()
        else:
            with torch.cuda.device(self.device):
                self._start()

    def _start(self) -> None:
        if self.binary is not None:
            self.binary[(*self.grid, 1, 1)[:3]](*self.values.values())
            return
        arguments, settings = self.arguments, options(self.threads)
        binary = self.kernel[self.grid](**arguments, **self.constants, **settings)
        if self.varying is not None and binary is not None:  # None: in the interpreter
            every = arguments | self.constants
            self.binary, self.values = binary, {name: every[name] for name in self.kernel.arg_names}
            self.given = {}  # it has gradients, which are not to be kept
        if self.later and binary not in _FOLLOWED:
            _FOLLOWED.add(binary)
            for changes in self.later if binary is not None else ():  # None: in the interpreter
                others = {name: changes.get(name, value) for name, value in arguments.items()}
                constants = {name: changes.get(name, value) for name, value in self.constants.items()}
                self.kernel.run(grid=self.grid, warmup=True, **others, **constants, **settings)


_FOLLOWED: set[Any] = set()  # binaries, which Triton keeps for good, whose launches' `later` variants are compiled

Launches = Generator[Launch, None, None]  # of a Triton implementation: each is performed before the next is asked for
