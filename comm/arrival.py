"""Parameters whose new values are under way while the next forward begins: code that reads one waits for it first.

A parameter whose value is under way is of class `_Arriving`, so that torch hands each use of it from Python to
`__torch_function__`, which waits and makes it a plain `Parameter` again. (torch's own lazy modules guard parameters
without a value in this way: `torch.nn.parameter.UninitializedTensorMixin`.) So no list of those who may read parameters
is needed: layers, tied weights, a layer that uses another one's weight, evaluation, checkpoints, policies.

Some readers do not go through `__torch_function__`, and would get an old value. `wait_later` and the trainer
(`reads_are_noticed`) wait at once where they see one: another tensor over the same memory (`p.data` that somebody has
kept), a script module, code that torch.compile has made. Nobody can see a function of TorchScript's, or of a C++
extension's, that is given a parameter. So all of this is only done where the user asks for it (`comm.overlap_share`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from kfuse.comm.group import Pending

_TENSOR: Any = Tensor
_HARMLESS = {
    getattr(_TENSOR, name).__get__
    for name in ("grad", "requires_grad", "shape", "dtype", "device", "layout", "is_leaf", "grad_fn", "ndim")
} | {_TENSOR.grad.__set__, Tensor.numel, Tensor.size, Tensor.dim, Tensor.stride}
"""What reads no value."""

_ONE_OWNER = 2
"""References to the memory of a tensor while one asks: the tensor's own, and that of the storage object asked."""


class Arrival:
    """The new values of some parameters, under way. Any thread may wait for them: all return when they are here."""

    _error: Exception | None = None
    """Why they do not come: for each thread that waits."""

    def __init__(self, params: Sequence[Parameter], pending: Pending) -> None:
        self._params, self._pending, self._lock = params, pending, threading.RLock()
        for param in params:
            _ARRIVALS[id(param)] = self
            param.__class__ = _Arriving

    def wait(self) -> None:
        """Returns when the values are here; at once where they are. Raises CommError.

        The parameters are plain ones again only after that: a thread that meets a plain one does not wait.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            if not self._params:
                return
            try:
                self._pending.wait()  # after a Ctrl-C here they are still under way
            except Exception as error:
                self._error = error
                self._end()
                raise
            self._end()

    def _end(self) -> None:
        """The parameters are plain ones again."""
        params, self._params = self._params, ()
        for param in params:
            del _ARRIVALS[id(param)]
            param.__class__ = Parameter


_ARRIVALS: dict[int, Arrival] = {}
"""By the id of a parameter, which its arrival keeps alive."""


class _Arriving(Parameter):
    """A parameter whose value is under way."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():  # of this process's first compiled code: torch then runs `func` uncompiled
            torch._dynamo.graph_break()
        if func not in _HARMLESS:
            for param in _arriving_in([args, kwargs or {}]):
                _wait_for(param)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: Any) -> Any:
        _wait_for(self)
        return Parameter.__deepcopy__(self, memo)  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> Any:
        _wait_for(self)
        return Parameter.__reduce_ex__(self, protocol)  # type: ignore[no-untyped-call]


def _wait_for(param: Parameter) -> None:
    arrival = _ARRIVALS.get(id(param))  # None: it came with another parameter of the same call, or for another thread
    if arrival is not None:
        arrival.wait()


def _arriving_in(value: Any) -> list[_Arriving]:
    """Those in nested lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        return [value] if type(value) is _Arriving else []
    if isinstance(value, dict):
        value = list(value.values())
    return [param for item in value for param in _arriving_in(item)] if isinstance(value, list | tuple) else []


def wait_later(params: Sequence[Parameter], pending: Pending) -> Arrival | None:
    """Code that reads one of these parameters waits for `pending` first.

    None: it has been waited for, since a reader might go unnoticed. Raises CommError.
    """
    if not _compiles() and all(type(param) is Parameter and _is_only_owner(param) for param in params):
        return Arrival(params, pending)
    pending.wait()
    return None


def _is_only_owner(param: Parameter) -> bool:
    """No other tensor has the parameter's memory."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return count is not None and count(param.untyped_storage()._cdata) <= _ONE_OWNER


def _compiles() -> bool:
    """Whether torch.compile was called in this process. What it has made is guarded by its parameters' classes, and is
    compiled anew for each other one: a class that comes and goes costs more than the share.
    """
    frames = sys.modules.get("torch._dynamo.eval_frame")  # where it is not imported, it is not in use
    return frames is not None and any(callable(backend) for backend in frames.cached_backends.values())


def reads_are_noticed(model: nn.Module) -> bool:
    """Whether the model's layers read their parameters from Python: none is a script, or compiled by its own call."""
    for module in model.modules():
        compiled = getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
        if compiled or isinstance(module, torch.jit.ScriptModule):
            return False
    return True
