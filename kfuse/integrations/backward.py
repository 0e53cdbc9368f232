"""Watches each backward of a model: when it begins and ends, and |s_j|^2, the square of the gradient it alone made."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_pre_hook

from kfuse.comm.gradients import at_the_end_of_backward
from kfuse.integrations.measure import Monitor, block_norms, sum_squares, total_square


def before_updates(params: Sequence[Parameter], act: Callable[[], None]) -> Any:
    """Calls the method `act` before each step of an optimizer of torch that has some of `params`; returns the handle.

    torch keeps these hooks for the whole process. This one does not keep the method's object, and goes with it.
    """
    method, mine = weakref.WeakMethod(act), frozenset(map(id, params))

    def before_update(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        alive = method()
        if alive is not None and any(
            id(param) in mine for group in optimizer.param_groups for param in group["params"]
        ):
            alive()

    handle = register_optimizer_step_pre_hook(before_update)
    weakref.finalize(act.__self__, handle.remove)  # type: ignore[attr-defined]
    return handle


class OfOneModel:
    """A hook of a module that stays behind where the module is copied or pickled: the copy is not monitored."""

    def __init__(self, act: Callable[..., Any]) -> None:
        self._act = act
        self.__name__, self.__qualname__ = act.__name__, act.__qualname__  # DDP asks for them

    # torch wants this name in DDP's communication hooks, and refuses annotations that are strings.
    def __call__(self, first, bucket):  # type: ignore[no-untyped-def]
        return self._act(first, bucket)

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return _does_nothing


def _does_nothing(*arguments: Any) -> None:
    """In a copy, the place of a hook."""


class BackwardWatch:
    """Hooks on the parameters. They see a backward's own gradient, before it is added to `.grad`.

    `Tensor.register_hook` on a leaf is called once a backward, with the sum over all uses of the parameter. A
    post-accumulate hook would see what earlier micro-batches left there too.
    """

    kept: bool
    """Some parameter had a gradient when the backward under way began."""
    handles: list[Any]
    """Of all hooks."""
    _began: bool
    """A backward is under way."""
    _measures: bool
    """Its own gradient is measured."""
    _norms: list[Tensor]
    """Of its gradient, in blocks."""
    _first: tuple[Parameter, Tensor | None, int] | None
    """The first parameter that it reached, and the `.grad` and the version of it that the parameter had before."""
    _left: tuple[Parameter, int, int] | None
    """The first parameter that the backward before reached, and the id and the version of the `.grad` it left there."""
    _changed: bool
    """Between two backwards of this step `.grad` was changed: set to zero, or clipped."""
    _leftover: Tensor | None
    """The square of what `.grad` had before the step's first backward; None for nothing."""
    _forwards: int
    """Forwards of this step, so far; and `_backwards` likewise."""

    def __init__(
        self,
        model: nn.Module,
        params: Sequence[Parameter],
        monitor: Monitor,
        wanted: Callable[[], bool],
        ended: Callable[[], None],
    ) -> None:
        """params: of `model`, those that are measured. monitor: its step is the step under way.

        wanted: called when a backward begins; whether its own gradient shall be measured. ended: called when a
        backward is over, that is when all gradients are in `.grad`, but DDP's last ones.
        """
        self._params, self._monitor = list(params), monitor
        self._wanted, self._ended = wanted, ended
        self._began = self._measures = self.kept = False
        self._norms, self._first, self._left = [], None, None
        self.step_ended()
        self.handles = [model.register_forward_pre_hook(OfOneModel(self._before_forward))]
        self.handles += [param.register_hook(self._hook(param)) for param in self._params]  # type: ignore[no-untyped-call]

    def square(self) -> Tensor | float:
        """|s_j|^2 of the backward under way or just over, or NaN where it is unknown.

        Unknown are gradients beside an earlier step's that were not set to zero, steps whose gradients were changed
        between backwards, and a backward that is one of several for a forward (losses with a backward each, or
        checkpoints with a backward inside a backward).
        """
        self._backwards += 1
        if not self._norms or self._changed or self._backwards > self._forwards:
            return math.nan
        square = sum_squares(self._norms)
        return square if self._leftover is None else torch.where(self._leftover == 0, square, math.nan)

    def step_ended(self) -> None:
        """The next backward is the first of a new step."""
        self._leftover, self._changed = None, False
        self._forwards = self._backwards = 0

    def _before_forward(self, module: nn.Module, arguments: object) -> None:
        if torch.is_grad_enabled():
            self._forwards += 1
            self._began = False  # also where the last backward raised, and never ended

    def _hook(self, param: Parameter) -> Callable[[Tensor], None]:
        def on_gradient(grad: Tensor) -> None:
            if not self._began:
                self._begin(param)
            if self._measures:
                self._norms += block_norms(grad)

        return on_gradient

    def _begin(self, first: Parameter) -> None:
        self._began, self._norms = True, []
        at_the_end_of_backward(self._end)
        self._first = (first, first.grad, 0 if first.grad is None else first.grad._version)
        self.kept = any(param.grad is not None for param in self._params)
        if self._monitor.micro_batches and not self.kept:  # dropped, by zero_grad without a step
            self._monitor.drop()
            self.step_ended()
            self._forwards = 1
        if self._monitor.micro_batches and self._left is not None:
            param, *left = self._left
            self._changed |= param.grad is None or [id(param.grad), param.grad._version] != left
        if not self._monitor.micro_batches and self.kept:
            self._leftover = total_square(param.grad for param in self._params if param.grad is not None)
        self._measures = self._wanted()

    def _end(self) -> None:
        self._began = False
        assert self._first is not None
        param, before, version = self._first
        if param.grad is not None and (param.grad is not before or param.grad._version != version):
            self._left = param, id(param.grad), param.grad._version
            self._ended()  # else this was torch.autograd.grad, which leaves `.grad` alone
