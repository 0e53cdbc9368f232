"""Hugging Face's Trainer (transformers 5.23): `attach` measures its training, `fit` trains in its place."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from kfuse.integrations.accelerate import length_of, refuse_shards_of_sequences
from kfuse.integrations.attached import figures, known, monitor_of
from kfuse.integrations.growth import Growth
from kfuse.integrations.measure import Monitor
from kfuse.integrations.transformers_fit import fit, init

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

__all__ = ["Attached", "Growth", "attach", "fit", "init"]

_FILE = "kfuse_growth.pt"  # in a checkpoint
_WHICH = (
    "attach: this trainer counts tokens, and whether the model divides its loss by them cannot be seen: must be "
    "attach(trainer, tokens=True) for a causal language model such as Llama, tokens=False where a micro-batch's loss "
    "is a mean (classification, BERT, T5, ...)"
)


class Attached:
    """What `attach` returns."""

    monitor: Monitor | None = None
    """Of the newest training; None before its first step."""


def attach(trainer: Trainer, *, tokens: bool | None = None, growth: Growth | None = None) -> Attached:
    """Measures the trainer's model from its first training step on; parameters keep their bits.

    Call it before `trainer.train()`, on every process. What the trainer logs in training then has noise_scale,
    noise_scale_low and noise_scale_high too, where they are known.

    tokens: the model, or `compute_loss`, divides the sum of a micro-batch's losses by the number of tokens that the
    trainer counts in the whole step (`num_items_in_batch`). The noise scale is then in tokens, else in samples. Needed
    where the trainer counts them.

    growth: chooses the batch size, by gradient_accumulation_steps, and multiplies the learning rate. The training still
    ends where max_steps of the first batch size, or num_train_epochs, would have ended it.

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
            if grows is not None:
                grows.begin(attached.monitor)
        assert attached.monitor is not None
        if growth is not None:
            growth.micro_batch()
        _weigh(attached.monitor, trainer, inputs, num_items_in_batch, bool(tokens))
        loss: Tensor = plain_step(model, inputs, num_items_in_batch)
        return loss

    def log(logs: dict[str, float], *given: Any, **named: Any) -> None:
        if attached.monitor is not None and "loss" in logs:
            logs = {**logs, **known(figures(attached.monitor))}
            if growth is not None:
                logs["batch_size"] = growth.batch_size
        plain_log(logs, *given, **named)

    training_step.is_attached = True  # type: ignore[attr-defined]
    plain_step, plain_log = trainer.training_step, trainer.log
    trainer.training_step, trainer.log = training_step, log
    grows = None if growth is None else _grow(trainer, growth)
    return attached


def _grow(trainer: Trainer, growth: Growth) -> _Grows:
    """Has the growth step with the trainer, be in its checkpoints, and be found in them."""
    callback, plain = _Grows(trainer, growth), trainer._init_training_state

    def init_training_state(*given: Any) -> tuple[int, int]:
        """Returns the epoch in which the training begins, and how many of its micro-batches are done."""
        epochs, done = plain(*given)
        *_, checkpoint, _ = given
        if not trainer.state.global_step:
            return epochs, done
        if not (file := Path(checkpoint, _FILE)).exists():
            raise ValueError(f"Growth: {checkpoint} was written without growth: must be resumed without it")
        saved = torch.load(file, weights_only=True)
        growth.load_state_dict(saved)
        trainer.args.gradient_accumulation_steps = saved["progress"]["accumulate"]
        epochs = int(trainer.state.epoch)
        callback.new_epoch = epochs == trainer.state.epoch or trainer.args.ignore_data_skip
        return epochs, 0 if callback.new_epoch else saved["progress"]["_done"]

    trainer._init_training_state = init_training_state
    trainer.add_callback(callback)
    return callback


class _Grows(TrainerCallback):  # type: ignore[misc]
    """Steps with the trainer."""

    def __init__(self, trainer: Trainer, growth: Growth) -> None:
        self._trainer, self._growth = trainer, growth
        self._first = trainer.args.gradient_accumulation_steps
        self.new_epoch = False  # the training was resumed at an epoch's first micro-batch

    def begin(self, monitor: Monitor) -> None:
        trainer, growth = self._trainer, self._growth
        by_metrics = hasattr(trainer.lr_scheduler, "patience")  # stepped after an evaluation
        scheduler, stepped = trainer.lr_scheduler, [] if by_metrics else [trainer.lr_scheduler]
        growth.begin(monitor, self._first, trainer._train_batch_size, [trainer.optimizer], [scheduler], stepped)
        if self.new_epoch:
            growth.begin_epoch()

    def on_epoch_begin(self, *given: Any, **named: Any) -> None:
        if self._growth.batch_size:
            self._growth.begin_epoch()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any) -> None:
        self._growth.end_step(self._trainer.accelerator.optimizer_step_was_skipped)
        args.gradient_accumulation_steps = self._growth.accumulate
        if self._growth.updates >= state.max_steps:
            control.should_training_stop = True
            control.should_save = control.should_save or args.save_strategy == "steps"

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any) -> None:
        if args.should_save:
            file = Path(args.output_dir, f"checkpoint-{state.global_step}", _FILE)
            torch.save(self._growth.state_dict(), file.with_suffix(".part"))
            file.with_suffix(".part").replace(file)


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
