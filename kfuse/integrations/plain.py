"""`kf.monitor`: gradient statistics of a plain training loop in one process."""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kfuse.integrations.backward import BackwardWatch
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
    return _Plain(model, Options(samples, accumulate, scaler, name)).monitor


class _Plain(BackwardWatch):
    """The hooks of one model. The model keeps them, and they go with it."""

    _total: Tensor | float
    """The square of what `.grad` had after the latest backward."""

    def __init__(self, model: nn.Module, options: Options) -> None:
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
                "the wrapped model (Accelerate: what accelerator.prepare returns; transformers.Trainer: "
                "trainer.model_wrapped in on_train_begin; Lightning: trainer.model in on_train_start)"
            )

    def ended(self) -> None:
        square = self._total = self.square()
        self.monitor.micro_batch(square)
        if self.kept and isinstance(square, Tensor):
            self._total = total_square(self.gradients())

    def end_step(self) -> None:
        total = self._total
        self.monitor.step(self.monitor.message(total if isinstance(total, Tensor) else torch.tensor(math.nan)))
