"""`kf.monitor`: gradient statistics of a plain training loop in one process."""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kfuse.integrations.backward import BackwardWatch, before_updates
from kfuse.integrations.measure import Monitor, Options, one_device, total_square


def monitor(
    model: nn.Module,
    *,
    samples: float | None = None,
    accumulate: int = 1,
    scaler: torch.amp.GradScaler | None = None,
    name: str = "train",
) -> Monitor:
    """Measures the gradient statistics of `model` in one process, with any optimizer of torch; changes nothing.

    A step begins with the first backward after zero_grad, and ends when an optimizer that has some of the model's
    parameters steps. Each backward is a micro-batch. With one backward a step the noise scale is unknown: there is
    nothing to compare.

    samples: of each micro-batch; without it a micro-batch takes the sample's place. See `Monitor.samples`.
    accumulate: what each micro-batch's mean loss is divided by. With the usual `(loss / ACC).backward()` it is ACC.
    scaler: the loop's GradScaler, if there is one.
    name: names these figures where `kf.log_to` sends them.

    Raises TypeError for a model in DistributedDataParallel or sharded by FSDP; ValueError for a value out of range, and
    for a model without parameters to train, or with parameters on several devices.
    """
    if isinstance(model, DistributedDataParallel):
        raise TypeError("kf.monitor: the model is wrapped in DistributedDataParallel: use kf.ddp_hook(model)")
    tensor = sys.modules.get("torch.distributed.tensor")  # takes long to import
    if tensor is not None and any(isinstance(param, tensor.DTensor) for param in model.parameters()):
        raise TypeError("kf.monitor: the model is sharded: use kf.fsdp_monitor(model)")
    return _Plain(model, Options(samples, accumulate, scaler, name)).monitor


class _Plain:
    """The hooks of one model. The model keeps them, and they go with it."""

    monitor: Monitor
    _params: list[nn.Parameter]
    """Those that require a gradient."""
    _total: Tensor | None
    """The square of what `.grad` had after the latest backward, float64 scalar; None before the first."""

    def __init__(self, model: nn.Module, options: Options) -> None:
        self._params = [param for param in model.parameters() if param.requires_grad]
        self.monitor = Monitor(one_device("kf.monitor", self._params), options)
        self._total = None
        self._watch = BackwardWatch(model, self._params, self.monitor, lambda: True, self._after_backward)
        for handle in (before_updates(self._params, self._before_update), *self._watch.handles):
            self.monitor.attach(handle)

    def _after_backward(self) -> None:
        square = self._watch.square()
        self.monitor.micro_batch(square)
        if isinstance(square, float):
            self._total = torch.full((), math.nan, dtype=torch.float64, device=self.monitor.device)
        elif self._watch.kept:
            self._total = total_square(param.grad for param in self._params if param.grad is not None)
        else:
            self._total = square

    def _before_update(self) -> None:
        if not self.monitor.micro_batches:
            return
        assert self._total is not None
        self.monitor.step(self.monitor.message(self._total))
        self._watch.step_ended()
