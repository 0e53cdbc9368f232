"""The gradient noise scale in a training by Hugging Face's Trainer (transformers 5.23)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kfuse.integrations.accelerate import length_of, refuse_shards_of_sequences
from kfuse.integrations.attached import figures, known, monitor_of
from kfuse.integrations.measure import Monitor

if TYPE_CHECKING:
    from transformers import Trainer

_WHICH = (
    "attach: this trainer counts tokens, and whether the model divides its loss by them cannot be seen: must be "
    "attach(trainer, tokens=True) for a causal language model such as Llama, tokens=False where a micro-batch's loss "
    "is a mean (classification, BERT, T5, ...)"
)


class Attached:
    """What `attach` returns."""

    monitor: Monitor | None = None
    """Of the newest training; None before its first step."""


def attach(trainer: Trainer, *, tokens: bool | None = None) -> Attached:
    """Measures the trainer's model from its first training step on; parameters keep their bits.

    Call it before `trainer.train()`, on every process. What the trainer logs in training then has noise_scale,
    noise_scale_low and noise_scale_high too, where they are known.

    tokens: the model, or `compute_loss`, divides the sum of a micro-batch's losses by the number of tokens that the
    trainer counts in the whole step (`num_items_in_batch`). The noise scale is then in tokens, else in samples. Needed
    where the trainer counts them.

    Training raises ValueError where `tokens` is needed, and TypeError for a model that no monitor measures. Raises
    RuntimeError where it is attached already, or where the trainer shards sequences (context parallelism).
    """
    if getattr(trainer.training_step, "is_attached", False):
        raise RuntimeError("attach: this trainer has kfuse attached already: call it once")
    refuse_shards_of_sequences(trainer.accelerator)
    attached, measured = Attached(), None

    def training_step(model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        nonlocal measured
        if num_items_in_batch is not None and tokens is None:
            raise ValueError(_WHICH)
        if measured is not model:
            attached.monitor, measured = monitor_of("attach", model, trainer.accelerator.scaler), model
        assert attached.monitor is not None
        _weigh(attached.monitor, trainer, inputs, num_items_in_batch, bool(tokens))
        loss: Tensor = plain_step(model, inputs, num_items_in_batch)
        return loss

    def log(logs: dict[str, float], *given: Any, **named: Any) -> None:
        if attached.monitor is not None and "loss" in logs:
            logs = {**logs, **known(figures(attached.monitor))}
        plain_log(logs, *given, **named)

    training_step.is_attached = True  # type: ignore[attr-defined]
    plain_step, plain_log = trainer.training_step, trainer.log
    trainer.training_step, trainer.log = training_step, log
    return attached


def _weigh(monitor: Monitor, trainer: Trainer, inputs: Any, items: Any, tokens: bool) -> None:
    """Tells the monitor what the coming backward's loss is: a mean over samples or tokens, divided by a number.

    items: the number of the step's tokens that the trainer gives to the model; None where it counts none.
    """
    monitor.last = trainer.accelerator.sync_gradients
    counts = items is not None and (trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None)
    factor = trainer.accelerator.num_processes if counts and trainer.args.average_tokens_across_devices else 1
    scaled = trainer.loss_is_scaled_for_ga
    if scaled is None:
        scaled = counts or trainer.compute_loss_func is not None
    divisor = (1 if scaled else trainer.current_gradient_accumulation_steps) / factor
    if tokens and items is not None:
        mine = _tokens(trainer, inputs)
        monitor.samples, monitor.accumulate = mine, torch.as_tensor(items).double() * divisor / mine
    else:
        monitor.samples, monitor.accumulate = length_of(inputs), divisor


def _tokens(trainer: Trainer, inputs: Any) -> Tensor:
    """Returns this micro-batch's tokens that count, as Trainer._get_num_items_in_batch counts them on this process."""
    if "shift_labels" in inputs:
        labels = inputs["shift_labels"]
    else:
        labels = inputs["labels"][..., 1:] if trainer._loss_shifts_labels else inputs["labels"]
    tokens: Tensor = labels.ne(-100).sum()
    return tokens
