"""The gradient noise scale in a training by Hugging Face Accelerate (1.15)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accelerate.utils.operations import ignorant_find_batch_size
from torch import nn

from kfuse.integrations.attached import figures, monitor_of
from kfuse.integrations.measure import Monitor

if TYPE_CHECKING:
    from accelerate import Accelerator


def attach(accelerator: Accelerator, model: nn.Module, *, weighted: bool = False) -> Monitor:
    """Measures a model that `accelerator.prepare` has returned; parameters keep their bits. Call it on every process.

    `accelerator.log` sends noise_scale, noise_scale_low and noise_scale_high too, in samples, where they are known. A
    micro-batch is a call of `accelerator.backward`; its samples are the length of the first tensor that the model is
    given.

    weighted: the loop weights its micro-batches itself, as Accelerate's guide does for tokens. Then it sets
    `monitor.samples` and `monitor.accumulate` before each `accelerator.backward` (see `Monitor`).

    Raises ValueError for a model that was not prepared, TypeError for one that no monitor measures, RuntimeError for
    one that is measured already.
    """
    inner = accelerator.unwrap_model(model)
    if all(each is not model and each is not inner for each in accelerator._models):
        raise ValueError("attach: the model must be what accelerator.prepare has returned")
    measured: tuple[nn.Module, ...] = getattr(accelerator.backward, "measured", ())
    if any(each is model for each in measured):
        raise RuntimeError("attach: this model is measured already: call it once for a model")
    monitor = monitor_of("attach", model, accelerator.scaler)
    samples: int | None = None  # of the newest micro-batch

    def before_forward(module: nn.Module, arguments: Any, named: Any) -> None:
        nonlocal samples
        if module.training:
            samples = ignorant_find_batch_size(arguments) or ignorant_find_batch_size(named)

    def backward(loss: Any, **named: Any) -> None:
        if not weighted:
            monitor.samples, monitor.accumulate = samples, accelerator.gradient_accumulation_steps
        plain_backward(loss, **named)

    def log(values: dict[str, Any], *given: Any, **named: Any) -> None:
        plain_log({**values, **figures(monitor)}, *given, **named)

    monitor.handles.append(model.register_forward_pre_hook(before_forward, with_kwargs=True))
    backward.measured = (*measured, model)  # type: ignore[attr-defined]
    plain_backward, plain_log = accelerator.backward, accelerator.log
    accelerator.backward, accelerator.log = backward, log
    return monitor
