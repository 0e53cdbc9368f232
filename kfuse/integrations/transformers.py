"""The gradient noise scale in a training by Hugging Face's Trainer (transformers 5.23)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils.operations import ignorant_find_batch_size
from torch import Tensor, nn

from kfuse.integrations.attached import figures, monitor_of
from kfuse.integrations.measure import Monitor

if TYPE_CHECKING:
    from transformers import Trainer


class Attached:
    """What `attach` returns."""

    monitor: Monitor | None = None
    """Of the newest training; None before its first step."""

    @property
    def noise_scale(self) -> float | None:
        """The newest finished step's noise scale; None where it is unknown. Waits for the device."""
        stats = None if self.monitor is None else self.monitor.stats
        return None if stats is None else stats.noise_scale


def attach(trainer: Trainer) -> Attached:
    """Measures the trainer's model from its first training step on; parameters keep their bits.

    Call it before `trainer.train()`, on every process. What the trainer logs in training then has noise_scale,
    noise_scale_low and noise_scale_high too, where they are known: in tokens where the trainer weights the loss by
    them (causal language models), else in samples.

    Training raises TypeError for a model that no monitor measures (DeepSpeed, FSDP1, DataParallel, tensor parallelism).
    Raises RuntimeError where it is attached already.
    """
    if getattr(trainer.training_step, "is_attached", False):
        raise RuntimeError("attach: this trainer has kfuse attached already: call it once")
    attached, measured = Attached(), None

    def training_step(model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        nonlocal measured
        if measured is not model:
            attached.monitor, measured = monitor_of("attach", model, trainer.accelerator.scaler), model
        assert attached.monitor is not None
        _weigh(attached.monitor, trainer, inputs, num_items_in_batch)
        loss: Tensor = plain_step(model, inputs, num_items_in_batch)
        return loss

    def log(logs: dict[str, float], *given: Any, **named: Any) -> None:
        if attached.monitor is not None and "loss" in logs:
            logs = {**logs, **figures(attached.monitor)}
        plain_log(logs, *given, **named)

    training_step.is_attached = True  # type: ignore[attr-defined]
    plain_step, plain_log = trainer.training_step, trainer.log
    trainer.training_step, trainer.log = training_step, log
    return attached


def _weigh(monitor: Monitor, trainer: Trainer, inputs: Any, items: Any) -> None:
    """Tells the monitor what the coming backward's loss is: a mean over samples or tokens, divided by a number.

    items: the step's tokens, as the trainer divides the sum over a micro-batch's tokens by; None where it does not.
    """
    tokens = None if items is None else _tokens(trainer, inputs)
    if tokens is None:
        monitor.samples = ignorant_find_batch_size(inputs)
        monitor.accumulate = trainer.current_gradient_accumulation_steps
        return
    times = trainer.accelerator.num_processes if trainer.args.average_tokens_across_devices else 1
    monitor.samples, monitor.accumulate = tokens, torch.as_tensor(items).double() / (tokens * times)


def _tokens(trainer: Trainer, inputs: Any) -> Tensor:
    """Returns this micro-batch's tokens that count, as Trainer._get_num_items_in_batch counts them on this process."""
    if "shift_labels" in inputs:
        labels = inputs["shift_labels"]
    else:
        labels = inputs["labels"][..., 1:] if trainer._loss_shifts_labels else inputs["labels"]
    tokens: Tensor = labels.ne(-100).sum()
    return tokens
