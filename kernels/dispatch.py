"""Chooses a kernel's implementation: Triton for GPU tensors, PyTorch for all others.

`TRITON_INTERPRET=1` sends CPU tensors to the Triton code as well, which then runs in Triton's interpreter.

A kernel is declared by one dataclass of arguments, which checks them as it is made. The public function, the PyTorch
implementation, the Triton launcher and the table of kernels to compile ahead of time all use that dataclass, so that
its fields are written once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kfuse.kernels.launch import Launch

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


def kernel(
    name: str, arguments: Callable[P, Given], device_of: str, by_torch: Callable[[Given], Result], triton_module: str
) -> Callable[P, Result]:
    """The public function of a kernel. It takes the fields of `arguments` and runs an implementation.

    device_of: the field whose device decides which implementation runs.
    by_torch: the PyTorch implementation.
    triton_module: where the Triton implementation lies, a function called `name` that yields its launches. The module
        is imported when the first GPU tensor arrives: importing kfuse must not need Triton.
    """

    def run(*args: P.args, **kwargs: P.kwargs) -> Result:
        if torch.is_grad_enabled():  # entering no_grad where it holds already, as in a hook, takes microseconds
            with torch.no_grad():
                return run(*args, **kwargs)
        given = arguments(*args, **kwargs)
        if not (getattr(given, device_of).is_cuda or INTERPRETED):
            return by_torch(given)
        implementation = getattr(import_module(f"kfuse.kernels.{triton_module}"), name)
        launches: Generator[Launch, None, Result] = implementation(given)
        while True:
            try:
                launch = next(launches)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            launch.run()

    run.__name__ = run.__qualname__ = name
    run.__doc__ = arguments.__doc__
    return run
