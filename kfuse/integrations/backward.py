"""Watches each backward of a model: when it begins and ends, and |s_j|^2, the square of the gradient it alone made."""

from __future__ import annotations

import math
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from kfuse.comm.gradients import at_the_end_of_backward
from kfuse.integrations.measure import Monitor, Options, block_norms, one_device, sum_squares, total_square

_OUTLIVED: list[RemovableHandle] = []  # hooks of watches that are gone


class OfOneModel:
    """A hook of a module that stays behind where the module is copied or pickled: the copy is not monitored."""

    def __init__(self, act: Callable[..., Any]) -> None:
        self._act = act
        self.__name__, self.__qualname__ = act.__name__, act.__qualname__  # DDP asks for them

    # torch wants this name in DDP's communication hooks, and refuses annotations that are strings.
    def __call__(self, first, bucket, *more):  # type: ignore[no-untyped-def]
        return self._act(first, bucket, *more)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (_does_nothing,)


def _does_nothing(*arguments: Any) -> None:
    """Takes the place of a hook in a copy."""


class BackwardWatch(ABC):
    """Hooks on a model and on its parameters. They see a backward's own gradient, before it is added to `.grad`.

    `Tensor.register_hook` on a leaf is called once a backward, with the sum over all uses of the parameter. A
    post-accumulate hook would see what earlier micro-batches left there too. Methods are in the order of a step.
    """

    def __init__(self, model: nn.Module, params: Sequence[Parameter], monitor: Monitor) -> None:
        """params: those whose `.grad` is watched. A subclass calls `watch` for what it measures."""
        self.params, self.monitor = list(params), monitor
        self._began = False
        self._measures = False  # the gradient of the backward under way is measured by the parameters' hooks
        self.kept = False  # some parameter had a gradient when it began
        self.norms: list[Tensor] = []  # of its gradient, in blocks
        self.before = self.after = self.marks()  # as it began, and when the latest one was over
        self.begin_step()
        monitor.handles.append(model.register_forward_pre_hook(OfOneModel(self.before_forward)))
        monitor.watch = weakref.ref(self)

    def watch(self, index: int, param: Tensor) -> None:
        """Registers a hook on `param`, which stands for parameter `index`."""
        self.monitor.handles.append(param.register_hook(partial(self.on_gradient, index)))  # type: ignore[no-untyped-call]

    def begin_step(self) -> None:
        """Makes the next backward the first of a step."""
        self._conditions: list[Tensor] = []  # bool scalars on the device: where one is false, squares are unknown
        self.unknown = False  # this step's squares are
        self._forwards = self._backwards = 0

    def before_forward(self, module: nn.Module, arguments: object) -> None:
        if torch.is_grad_enabled():
            self._forwards += 1
            self._began = False  # also where the last backward raised, and never ended

    def forward_was_made(self) -> None:
        """As of `Monitor`. Where the hook has seen the forward, it is counted."""
        if self._forwards <= self._backwards:
            self._forwards += 1
            self._began = False

    def on_gradient(self, index: int, grad: Tensor) -> None:
        """Takes in what a backward has computed for parameter `index`."""
        self.reached()
        if self._measures:
            self.norms += block_norms(grad)

    def reached(self) -> None:
        """Called from a backward, again and again: the first time it begins."""
        if self._began:
            return
        self._began, self.norms = True, []
        at_the_end_of_backward(self._end)
        self.before = self.marks()
        self.kept = any(self.before)
        if not self.monitor.micro_batches:
            if self.kept:
                earlier = total_square(self.gradients())
                self._conditions.append(earlier == 0)  # else it had a gradient before the step's first backward
        elif not self.kept and not self.waits():  # dropped, by zero_grad without a step
            self.monitor.drop()
            self.begin_step()
            self._forwards = 1
        elif self.before != self.after:
            self.unknown = True  # changed between two backwards of a step, for example clipped
        self._measures = self.begins()

    def square(self) -> Tensor | float:
        """Returns |s_j|^2 of the backward under way or just over, or NaN where it is unknown.

        A backward that is one of several for a forward (losses with a backward each, or checkpoints with a backward
        inside a backward) is no micro-batch: its step is unknown.
        """
        self._backwards += 1
        if self._backwards > self._forwards:
            self.unknown = True
        if self.unknown or not self.norms:
            return math.nan
        square = sum_squares(self.norms)
        for condition in self._conditions:
            square = torch.where(condition.to(square.device), square, math.nan)
        return square

    def _end(self) -> None:
        self._began, self.after = False, self.marks()
        if self.after != self.before or self.waits():  # else this was torch.autograd.grad, which leaves `.grad` alone
            self.ended()

    def end_steps_with_updates(self) -> None:
        """Ends a step after each step of a torch optimizer that has some of the parameters.

        `optimizer.step(closure)` has the step's last backward in its closure. torch keeps such hooks for the whole
        process; this one does not keep the watch, and goes after it: with the next watch, since the garbage collector
        may come while torch calls these hooks.
        """
        while _OUTLIVED:
            _OUTLIVED.pop().remove()
        watch, mine = weakref.ref(self), frozenset(map(id, self.params))

        def updated(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            alive = watch()
            if alive is None or all(id(p) not in mine for group in optimizer.param_groups for p in group["params"]):
                return
            if torch._C._current_graph_task_id() != -1:
                raise RuntimeError(
                    "an optimizer steps inside backward, so a step's gradient is never there as a whole for kf.monitor "
                    "and kf.fsdp_monitor: step after backward"
                )
            if alive.monitor.micro_batches:  # else another optimizer of the same model ended this step
                alive.finish_step()

        handle = register_optimizer_step_post_hook(updated)
        weakref.finalize(self, _OUTLIVED.append, handle)
        self.monitor.handles.append(handle)

    def finish_step(self) -> None:
        self.end_step()
        self.begin_step()

    # -- what a subclass knows ---------------------------------------------------------------------------------------

    def gradients(self) -> list[Tensor]:
        """Returns what this worker has in the parameters' `.grad`."""
        return [grad for param in self.params if (grad := param.grad) is not None]

    def marks(self) -> list[tuple[int, int] | None]:
        """Returns for each parameter what changes as its `.grad` is changed or replaced; None without one."""
        return [None if (grad := param.grad) is None else (id(grad), grad._version) for param in self.params]

    def waits(self) -> bool:
        """Whether an earlier backward left gradients elsewhere than in `.grad`."""
        return False

    def begins(self) -> bool:
        """Called as a backward begins. Returns whether the parameters' hooks shall measure its gradient."""
        return True

    @abstractmethod
    def ended(self) -> None:
        """Called as a backward is over: its gradients are in `.grad`, but DDP's last ones."""

    @abstractmethod
    def end_step(self) -> None:
        """Gives the monitor the figures of a step, which has at least one micro-batch."""


def monitor(
    model: nn.Module,
    *,
    samples: float | None = None,
    accumulate: float = 1,
    scaler: torch.amp.GradScaler | None = None,
    name: str = "train",
) -> Monitor:
    """Measures the gradient statistics of `model` in one process, with any optimizer of torch; changes nothing.

    A step begins with the first backward after zero_grad, and ends when an optimizer that has some of the model's
    parameters has stepped. Each backward is a micro-batch. With one backward a step the noise scale is unknown: there
    is nothing to compare.

    samples: of each micro-batch; without it a micro-batch takes the sample's place. See `Monitor.samples`.
    accumulate: what each micro-batch's mean loss is divided by. With the usual `(loss / ACC).backward()` it is ACC.
    scaler: the loop's GradScaler. Without it the figures of a scaled loss are those of the scaled gradients.
    name: names these figures where `kf.log_to` sends them.

    Raises TypeError for a model in DistributedDataParallel or sharded by FSDP; ValueError for a value out of range, and
    for a model without parameters to train, or with parameters on several devices. A model that DDP wraps later raises
    RuntimeError in its first forward.
    """
    if isinstance(model, DistributedDataParallel):
        raise TypeError("kf.monitor: the model is wrapped in DistributedDataParallel: use kf.ddp_hook(model)")
    tensor = sys.modules.get("torch.distributed.tensor")  # takes long to import
    if tensor is not None and any(isinstance(param, tensor.DTensor) for param in model.parameters()):
        raise TypeError("kf.monitor: the model is sharded: use kf.fsdp_monitor(model)")
    return OneProcess(model, Options(samples, accumulate, scaler, name)).monitor


class OneProcess(BackwardWatch):
    """The hooks of one model, which may be in DDP with one worker. The model keeps them, and they go with it."""

    def __init__(self, model: nn.Module, options: Options) -> None:
        self._in_ddp = isinstance(model, DistributedDataParallel)
        params = [param for param in model.parameters() if param.requires_grad]
        super().__init__(model, params, Monitor(one_device("kf.monitor", params), options))
        for index, param in enumerate(params):
            self.watch(index, param)
        self.end_steps_with_updates()

    def before_forward(self, module: nn.Module, arguments: object) -> None:
        super().before_forward(module, arguments)
        if torch.is_grad_enabled() and DistributedDataParallel._active_ddp_module is not None:
            raise RuntimeError(
                "kf.monitor: the model was wrapped in DistributedDataParallel afterwards: call kf.ddp_hook instead, on "
                "the wrapped model (with Accelerate, transformers.Trainer and Lightning: attach and NoiseScale of "
                "kfuse.integrations.accelerate, .transformers and .lightning)"
            )

    def _end(self) -> None:
        if self._in_ddp:  # which has queued its last changes of the gradients behind this call
            at_the_end_of_backward(super()._end)
        else:
            super()._end()

    def ended(self) -> None:
        self._square = self.square()
        self.monitor.micro_batch(self._square)
        if self.kept and isinstance(self._square, Tensor):  # of the whole step; after it the loop may clip
            self._square = total_square(self.gradients()) if self.monitor.last else math.nan

    def end_step(self) -> None:
        self.monitor.step(self.monitor.message(torch.as_tensor(self._square)))
