"""The gradient noise scale in a training by Hugging Face Accelerate (1.15)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from accelerate.utils.operations import find_batch_size
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from kfuse.integrations.attached import figures, monitor_of
from kfuse.integrations.backward import OfOneModel
from kfuse.integrations.growth import Growth as Growth
from kfuse.integrations.measure import Monitor

if TYPE_CHECKING:
    from accelerate import Accelerator


def attach(
    accelerator: Accelerator,
    model: nn.Module,
    *,
    weighted: bool = False,
    growth: Growth | None = None,
    scheduler_interval: Literal["step", "epoch"] = "step",
) -> Monitor:
    """Measures a model that `accelerator.prepare` has returned; parameters keep their bits. Call it on every process.

    `accelerator.log` sends noise_scale, noise_scale_low and noise_scale_high too, in samples, where they are known. A
    micro-batch is a call of `accelerator.backward`; its samples are the length of the first tensor that the model is
    given. `Monitor.close` makes the accelerator what it was.

    weighted: the loop weights its micro-batches itself, as Accelerate's guide does for tokens. Then it sets
    `monitor.samples` and `monitor.accumulate` before each `accelerator.backward` (see `Monitor`), and the noise scale
    is in these samples.

    growth: chooses the batch size, by `accelerator.gradient_accumulation_steps`, and multiplies the learning rate. It
    needs one prepared optimizer, prepared schedulers, and `with accelerator.accumulate(model):` around each
    micro-batch. It is saved by `accelerator.save_state`. The loop's own end is the loop's; `growth.updates` counts the
    updates of the first batch size.

    scheduler_interval: how often the loop steps its schedulers, with each update or each epoch. With "step" the growth
    steps them as often more as a larger batch has more samples.

    Raises ValueError for another interval, for a model that was not prepared, or where growth has not one optimizer,
    TypeError for a model that no monitor measures, RuntimeError where one of the accelerator's models is measured
    already, and where sequences are sharded (context parallelism).
    """
    refuse_shards_of_sequences(accelerator)
    if not getattr(model, "_is_accelerate_prepared", False):
        raise ValueError("attach: the model must be what accelerator.prepare has returned")
    if isinstance(getattr(accelerator.backward, "__self__", None), _Attached):
        raise RuntimeError("attach: this accelerator measures a model already: close its monitor first")
    if scheduler_interval not in ("step", "epoch"):
        raise ValueError(f"attach: scheduler_interval={scheduler_interval!r}: must be step or epoch")
    if growth is not None:
        growth.refuse_second_training()
        if len(accelerator._optimizers) != 1:
            raise ValueError(f"attach: growth needs one prepared optimizer, not {len(accelerator._optimizers)}")
    attached = _Attached(accelerator, model, weighted)
    if growth is not None:
        attached.grows = _Grows(accelerator, attached.monitor, growth, scheduler_interval)
    return attached.monitor


class _Attached:
    """Takes the place of an accelerator's `backward` and `log`."""

    grows: _Grows | None = None

    def __init__(self, accelerator: Accelerator, model: nn.Module, weighted: bool) -> None:
        self._accelerator, self._weighted = accelerator, weighted
        self.monitor = monitor_of("attach", model, accelerator.scaler)
        self._samples: int | None = None  # of the newest micro-batch
        self._hook = model.register_forward_pre_hook(OfOneModel(self._before_forward), with_kwargs=True)
        self._backward, self._log = accelerator.backward, accelerator.log
        accelerator.backward, accelerator.log = self.backward, self.log
        self.monitor.handles.append(self)

    def remove(self) -> None:
        """As of the monitor's hooks."""
        self._hook.remove()
        self._accelerator.backward, self._accelerator.log = self._backward, self._log

    def _before_forward(self, module: nn.Module, arguments: Any, named: Any) -> None:
        if torch.is_grad_enabled():
            self._samples = length_of(arguments) or length_of(named)

    def backward(self, loss: Any, **named: Any) -> None:
        if not self._weighted:
            self.monitor.samples = self._samples
            self.monitor.accumulate = self._accelerator.gradient_accumulation_steps
            self.monitor.last = self._accelerator.sync_gradients
        if self.grows is not None:
            self.grows.before_backward(self._samples or 1)
        self._backward(loss, **named)

    def log(self, values: dict[str, Any], *given: Any, **named: Any) -> None:
        more = figures(self.monitor)
        if self.grows is not None:
            more["batch_size"] = self.grows.growth.batch_size
        self._log({**values, **more}, *given, **named)


class _Grows:
    """Takes the place of an accelerator's `accumulate` and of its optimizer's `step`."""

    def __init__(self, accelerator: Accelerator, monitor: Monitor, growth: Growth, interval: str) -> None:
        self._accelerator, self._monitor, self.growth, self._interval = accelerator, monitor, growth, interval
        self._first, self._optimizer = accelerator.gradient_accumulation_steps, accelerator._optimizers[0]
        self._accumulate, self._step = accelerator.accumulate, self._optimizer.step
        accelerator.accumulate, self._optimizer.step = self.accumulate, self.step
        accelerator.register_for_checkpointing(self)
        monitor.handles.append(self)

    def remove(self) -> None:
        """As of the monitor's hooks. The learning rate stays as it is."""
        self._accelerator.accumulate, self._optimizer.step = self._accumulate, self._step
        self._accelerator._custom_objects.remove(self)
        self._accelerator.gradient_accumulation_steps = self._first

    def before_backward(self, samples: int) -> None:
        if not self.growth.batch_size:
            prepared = self._accelerator._schedulers  # a step of them is one for each process
            schedulers = [each.scheduler for each in prepared]
            by_updates = self._interval == "step"
            stepped = [each for each in prepared if by_updates and not isinstance(each.scheduler, ReduceLROnPlateau)]
            self.growth.begin(self._monitor, self._first, samples, [self._optimizer], schedulers, stepped)

    def accumulate(self, *models: nn.Module) -> Any:
        self.growth.micro_batch()
        return self._accumulate(*models)

    def step(self, closure: Any = None) -> None:
        self._step(closure)
        if self._accelerator.sync_gradients:
            self.growth.end_step(self._optimizer.step_was_skipped)
            if self._accelerator.step == 0:  # the data's end
                self.growth.begin_epoch()
            self._accelerator.gradient_accumulation_steps = self.growth.accumulate

    def state_dict(self) -> dict[str, Any]:
        return self.growth.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.growth.load_state_dict(state)
        if state:
            self._accelerator.gradient_accumulation_steps = state["progress"]["accumulate"]


def refuse_shards_of_sequences(accelerator: Accelerator) -> None:
    """Raises RuntimeError where a process has only a part of each sequence."""
    config = accelerator.parallelism_config
    if config is not None and config.cp_enabled:
        raise RuntimeError("attach: context parallelism shards a micro-batch: must be left out")


def length_of(batch: Any) -> int | None:
    """Returns the length of the batch's first tensor; None where there is none, or it is a scalar."""
    try:
        return int(find_batch_size(batch))
    except (ValueError, TypeError, IndexError):
        return None
