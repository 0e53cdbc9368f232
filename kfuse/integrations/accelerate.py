"""The gradient noise scale in a training by Hugging Face Accelerate (1.15)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils.operations import find_batch_size
from torch import nn

from kfuse.integrations.attached import figures, known, monitor_of
from kfuse.integrations.backward import OfOneModel
from kfuse.integrations.measure import Monitor

if TYPE_CHECKING:
    from accelerate import Accelerator


def attach(accelerator: Accelerator, model: nn.Module, *, weighted: bool = False) -> Monitor:
    """Measures a model that `accelerator.prepare` has returned; parameters keep their bits. Call it on every process.

    `accelerator.log` sends noise_scale, noise_scale_low and noise_scale_high too, in samples, where they are known. A
    micro-batch is a call of `accelerator.backward`; its samples are the length of the first tensor that the model is
    given. `Monitor.close` makes the accelerator what it was.

    weighted: the loop weights its micro-batches itself, as Accelerate's guide does for tokens. Then it sets
    `monitor.samples` and `monitor.accumulate` before each `accelerator.backward` (see `Monitor`), and the noise scale
    is in these samples.

    Raises ValueError for a model that was not prepared, TypeError for one that no monitor measures, RuntimeError where
    one of the accelerator's models is measured already, and where sequences are sharded (context parallelism).
    """
    refuse_shards_of_sequences(accelerator)
    if not getattr(model, "_is_accelerate_prepared", False):
        raise ValueError("attach: the model must be what accelerator.prepare has returned")
    if isinstance(getattr(accelerator.backward, "__self__", None), _Attached):
        raise RuntimeError("attach: this accelerator measures a model already: close its monitor first")
    return _Attached(accelerator, model, weighted).monitor


class _Attached:
    """Takes the place of an accelerator's `backward` and `log`."""

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
        self._backward(loss, **named)

    def log(self, values: dict[str, Any], *given: Any, **named: Any) -> None:
        self._log({**values, **known(figures(self.monitor))}, *given, **named)


def refuse_shards_of_sequences(accelerator: Accelerator) -> None:
    """Raises RuntimeError where a process has only a part of each sequence."""
    if getattr(accelerator.parallelism_config, "cp_enabled", False):
        raise RuntimeError("attach: context parallelism shards a micro-batch: must be left out")


def length_of(batch: Any) -> int | None:
    """Returns the length of the batch's first tensor; None where there is none, or it is a scalar."""
    try:
        return int(find_batch_size(batch))
    except (ValueError, TypeError, IndexError):
        return None
