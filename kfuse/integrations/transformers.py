"""Hugging Face's Trainer (transformers 5.23): `attach` measures its training, `fit` trains in its place."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import TrainerCallback
from transformers.optimization import GreedyLR

from kfuse.integrations.accelerate import length_of, refuse_shards_of_sequences
from kfuse.integrations.attached import TOKENS, figures, monitor_of
from kfuse.integrations.growth import Growth as Growth
from kfuse.integrations.measure import Monitor
from kfuse.integrations.transformers_fit import fit as fit
from kfuse.integrations.transformers_fit import init as init

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

_FILE = "kfuse_growth.pt"  # in a checkpoint


def attach(trainer: Trainer, *, tokens: bool | None = None, growth: Growth | None = None) -> Attached:
    """Measures the trainer's model from its first training step on; parameters keep their bits.

    Call it before `trainer.train()`, on every process. What the trainer logs in training then has noise_scale,
    noise_scale_low and noise_scale_high too, where they are known.

    tokens: the model, or `compute_loss`, divides the sum of a micro-batch's losses by the number of tokens that the
    trainer counts in the whole step (`num_items_in_batch`). The noise scale is then in tokens, and its names end in
    _tokens; else it is in samples, which are pairs with TRL's DPOTrainer and RewardTrainer. Needed where the trainer
    counts tokens.

    growth: chooses the batch size, by gradient_accumulation_steps, and multiplies the learning rate. The training still
    ends where max_steps of the first batch size, or num_train_epochs, would have ended it.

    Training raises ValueError where `tokens` is needed, and TypeError for a model that no monitor measures. Raises
    RuntimeError where it is attached already, or where the trainer shards sequences (context parallelism).
    """
    if getattr(getattr(trainer.training_step, "__self__", None), "is_attached", False):
        raise RuntimeError("attach: this trainer has kfuse attached already: call it once")
    refuse_shards_of_sequences(trainer.accelerator)
    return Attached(trainer, tokens, growth)


class Attached(TrainerCallback):  # type: ignore[misc]
    """What `attach` returns. It takes the place of the trainer's `training_step` and `log`."""

    is_attached = True
    monitor: Monitor | None = None
    """Of the newest training; None before its first step."""

    def __init__(self, trainer: Trainer, tokens: bool | None, growth: Growth | None) -> None:
        self._trainer, self._tokens = trainer, tokens
        self._growth = None if growth is None else _Grows(trainer, growth)
        self._measured: nn.Module | None = None
        self._rows = 1  # that the model is given of a sample: TRL makes two of a pair
        self._training_step, self._log = trainer.training_step, trainer.log
        trainer.training_step, trainer.log = self.training_step, self.log
        trainer.add_callback(self)

    def close(self) -> None:
        """Makes the trainer what it was. With a growth: between trainings, and the learning rate stays as it is."""
        self._trainer.training_step, self._trainer.log = self._training_step, self._log
        self._trainer.remove_callback(self)
        if self._growth is not None:
            self._growth.close()
        if self.monitor is not None:
            self.monitor.close()

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        if num_items_in_batch is not None and self._tokens is None:
            raise ValueError(TOKENS.format(call="attach"))
        if self._measured is not model:
            self.monitor, self._measured = monitor_of("attach", model, self._trainer.accelerator.scaler), model
            if self._growth is not None:
                self._growth.begin(self.monitor)
        assert self.monitor is not None
        if self._growth is not None:
            self._growth.growth.micro_batch()
        self._unit = "_tokens" if self._tokens and num_items_in_batch is not None else ""
        mine = _tokens(self._trainer, inputs) if self._unit else self._samples(inputs)
        _weigh(self.monitor, self._trainer, mine, num_items_in_batch, by_tokens=bool(self._unit))
        loss: Tensor = self._training_step(model, inputs, num_items_in_batch)
        return loss

    def _samples(self, inputs: Any) -> float | None:
        """Returns this micro-batch's samples, of each of which the model may be given several rows."""
        rows = length_of(inputs)
        loaded = getattr(self._trainer.callback_handler.train_dataloader, "batch_sampler", None)
        if rows and (full := getattr(loaded, "batch_size", None)):
            self._rows = max(self._rows, rows // full)
        return rows and rows / self._rows

    def log(self, logs: dict[str, float], *given: Any, **named: Any) -> None:
        if self.monitor is not None and "loss" in logs:
            logs = {**logs, **figures(self.monitor, self._unit)}
            if self._growth is not None:
                logs["batch_size"] = self._growth.growth.batch_size
        self._log(logs, *given, **named)

    def on_train_end(self, *given: Any, **named: Any) -> None:
        if self.monitor is not None:
            self.monitor.drain()


class _Grows(TrainerCallback):  # type: ignore[misc]
    """Has a growth step with the trainer, be in its checkpoints, and be found in them."""

    def __init__(self, trainer: Trainer, growth: Growth) -> None:
        self._trainer, self.growth = trainer, growth
        self._first = trainer.args.gradient_accumulation_steps
        self._begins_epoch = False  # the training was resumed at an epoch's first micro-batch
        self._init_training_state = trainer._init_training_state
        trainer._init_training_state = self.init_training_state
        trainer.add_callback(self)

    def close(self) -> None:
        self._trainer._init_training_state = self._init_training_state
        self._trainer.remove_callback(self)

    def init_training_state(self, *given: Any) -> tuple[int, int]:
        """Returns the epoch in which the training begins, and how many of its micro-batches are done."""
        self.growth.refuse_second_training()
        epochs, done = self._init_training_state(*given)
        *_, checkpoint, _ = given
        state = self._trainer.state
        if not state.global_step:
            return epochs, done
        if not (file := Path(checkpoint, _FILE)).exists():
            raise ValueError(f"Growth: {checkpoint} was written without growth: must be resumed without it")
        saved = torch.load(file, weights_only=True)
        self.growth.load_state_dict(saved)
        self._trainer.args.gradient_accumulation_steps = saved["progress"]["accumulate"]
        epochs = int(state.epoch)
        self._begins_epoch = epochs == state.epoch or self._trainer.args.ignore_data_skip
        return epochs, 0 if self._begins_epoch else saved["progress"]["_done"]

    def begin(self, monitor: Monitor) -> None:
        trainer = self._trainer
        by_metrics = isinstance(trainer.lr_scheduler, ReduceLROnPlateau | GreedyLR)  # stepped after an evaluation
        schedulers = [trainer.lr_scheduler]
        stepped = [] if by_metrics else schedulers
        self.growth.begin(monitor, self._first, trainer._train_batch_size, [trainer.optimizer], schedulers, stepped)
        if self._begins_epoch:
            self.growth.begin_epoch()

    def on_epoch_begin(self, args: TrainingArguments, *given: Any, **named: Any) -> None:
        if self.growth.batch_size:
            self.growth.begin_epoch()
            args.gradient_accumulation_steps = self.growth.accumulate

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any) -> None:
        self.growth.end_step(self._trainer.accelerator.optimizer_step_was_skipped)
        args.gradient_accumulation_steps = self.growth.accumulate
        if self.growth.updates >= state.max_steps:
            control.should_training_stop = True
            control.should_save = control.should_save or args.save_strategy == "steps"

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any) -> None:
        if args.should_save:
            file = Path(args.output_dir, f"checkpoint-{state.global_step}", _FILE)
            torch.save(self.growth.state_dict(), file.with_suffix(".part"))
            file.with_suffix(".part").replace(file)

    def on_train_end(self, args: TrainingArguments, *given: Any, **named: Any) -> None:
        args.gradient_accumulation_steps = self._first


def _weigh(monitor: Monitor, trainer: Trainer, mine: Any, items: Any, by_tokens: bool) -> None:
    """Tells the monitor what the coming backward's loss is: a mean over samples or tokens, divided by a number.

    mine: how many of them the micro-batch has on this process; None: unknown.
    items: the number of the step's tokens that the trainer gives to the model; None where it counts none.
    """
    monitor.last = trainer.accelerator.sync_gradients
    counts = items is not None and (trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None)
    factor = trainer.accelerator.num_processes if counts and trainer.args.average_tokens_across_devices else 1
    scaled = trainer.loss_is_scaled_for_ga
    if scaled is None:
        scaled = counts or trainer.compute_loss_func is not None
    divisor = (1 if scaled else trainer.current_gradient_accumulation_steps) / factor
    monitor.samples = mine
    monitor.accumulate = torch.as_tensor(items).double() * divisor / mine if by_tokens else divisor


def _tokens(trainer: Trainer, inputs: Any) -> Tensor:
    """Returns this micro-batch's tokens that count, as Trainer._get_num_items_in_batch counts them on this process."""
    if "shift_labels" in inputs:
        labels = inputs["shift_labels"]
    else:
        labels = inputs["labels"][..., 1:] if trainer._loss_shifts_labels else inputs["labels"]
    tokens: Tensor = labels.ne(-100).sum()
    return tokens
