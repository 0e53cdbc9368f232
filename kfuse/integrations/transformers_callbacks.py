"""Trainer's callbacks, logs, evaluations and checkpoints in a training by kfuse's loop (transformers 5.23)."""

from __future__ import annotations

import math
import os
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from kfuse import session
from kfuse.optim import DistributedOptimizer
from kfuse.policies import BasePolicy
from kfuse.train.progress import STOP_REASONS
from kfuse.train.trainer import Trainer as Training
from kfuse.train.trainer import newest

if TYPE_CHECKING:
    from transformers.trainer_utils import TrainOutput


class Callbacks(BasePolicy):
    """Calls the trainer's callbacks, logs, evaluates and saves, as Trainer's own loop does. Its state is the trainer's.

    As a policy it is part of the training state: a worker that joins or is behind takes it over.
    """

    output: TrainOutput | None = None  # once training is over

    def __init__(self, trainer: Trainer, opt: DistributedOptimizer, micro: int, samples: float) -> None:
        """samples: planned ones."""
        self._trainer, self._opt, self._micro, self._samples = trainer, opt, micro, samples
        self._began = time.time()
        self._of_step: list[float | None] = [None, None]  # the newest step's gradient norm and learning rate
        self._saved: list[int] = []  # the steps after which the leader has written a checkpoint of Trainer's
        self._save, self._load_best = trainer._save_checkpoint, trainer._load_best_model
        trainer._initial_num_input_tokens_seen = trainer._initial_global_step = 0
        trainer._tr_loss, trainer._total_loss_scalar = torch.tensor(0.0, device=trainer.args.device), 0.0
        trainer._globalstep_last_logged = 0

    @property
    def _training(self) -> Training:
        training = newest()
        assert training is not None
        return training

    def call(self, event: str) -> None:
        """Calls an event of all callbacks. This worker's place may have changed since the one before."""
        trainer = self._trainer
        self._take_place()
        trainer.control = getattr(trainer.callback_handler, event)(trainer.args, trainer.state, trainer.control)

    def _take_place(self) -> None:
        """Tells the trainer whether this worker leads now."""
        trainer, now, place = self._trainer, session.current(), self._trainer.args.distributed_state
        now.ensure_joined()  # before the first step
        place.process_index, place.local_process_index = now.group.rank, now.local_rank
        trainer.state.is_world_process_zero = trainer.is_world_process_zero()
        trainer.state.is_local_process_zero = trainer.is_local_process_zero()

    def before_train(self) -> None:
        self.call("on_train_begin")

    def before_epoch(self) -> None:
        if self._trainer.args.eval_on_start and self._training.progress.step == 0:
            self._trainer._evaluate(None, None, skip_scheduler=True)
        self.call("on_epoch_begin")

    def before_step(self) -> None:
        training = self._training
        # Another number than at the start where a policy has changed the batch size.
        self._trainer.state.max_steps = training.progress.planned_steps(training.settings, training.samples_an_epoch)
        self.call("on_step_begin")

    def after_step(self) -> None:
        trainer, at, stats = self._trainer, self._training.progress, self._opt.stats
        assert stats is not None
        if stats.loss is None and trainer.args.logging_nan_inf_filter:  # it was not finite
            trainer._tr_loss += trainer._tr_loss / (1 + at.step - trainer._globalstep_last_logged)
        else:
            trainer._tr_loss += math.nan if stats.loss is None else stats.loss
        self._of_step = [stats.grad_norm, at.contexts[at.step].lr]
        length = self._training.samples_an_epoch
        assert length is not None
        trainer.state.global_step = at.step + 1
        trainer.state.epoch = at.epoch + -(-at.cursor // self._micro) / -(-length // self._micro)
        self.call("on_step_end")
        self._log_save_evaluate()
        if at.cursor < length and trainer.control.should_training_stop:
            self.after_epoch()

    def after_epoch(self) -> None:
        self.call("on_epoch_end")
        self._log_save_evaluate()
        at, epoch_is_over = self._training.progress, self._training.progress.cursor == self._training.samples_an_epoch
        if self._trainer.control.should_training_stop and not at.is_last_step(self._training.settings, epoch_is_over):
            at.stop = STOP_REASONS.index("stopped")

    def _log_save_evaluate(self) -> None:
        trainer, epoch = self._trainer, self._training.progress.epoch
        norm, lr = self._of_step
        logged = len(trainer.state.log_history)
        trainer._maybe_log_save_evaluate(
            trainer._tr_loss, norm, trainer.model_wrapped, None, epoch, None, self._began, learning_rate=lr
        )
        for entry in trainer.state.log_history[logged:]:
            self._training.log({name: float(entry[key]) for key in entry if (name := _of_evaluation(key))})
        if trainer.control.should_epoch_stop and not trainer.control.should_training_stop:
            raise RuntimeError("fit: a callback has set should_epoch_stop: must not: an epoch uses each sample once")

    def before_update(self) -> None:
        self.call("on_pre_optimizer_step")
        self._save_again()

    def _save_again(self) -> None:
        """Writes the newest checkpoint again, before the model changes, where a lost leader left it incomplete."""
        trainer, step = self._trainer, self._trainer.state.global_step
        if self._saved[-1:] == [step] and trainer.args.should_save and not os.path.exists(self._file(step)):
            self._save(trainer.model_wrapped, None)

    def save(self, model: nn.Module, trial: None) -> None:
        """Takes the place of `trainer._save_checkpoint`: each worker knows what the leader writes."""
        state = self._trainer.state
        best = state.best_model_checkpoint
        self._save(model, trial)
        self._saved.append(state.global_step)
        is_saved = state.best_global_step in self._saved
        state.best_model_checkpoint = os.path.dirname(self._file(state.best_global_step)) if is_saved else best

    def load_best(self) -> None:
        """Takes the place of `trainer._load_best_model`. Raises TimeoutError for one that is not there."""
        file = os.path.join(self._trainer.state.best_model_checkpoint, TRAINER_STATE_NAME)
        if file == self._file(self._trainer.state.global_step):
            return  # the model is that one; the leader may still write it
        end = time.monotonic() + session.current().group.timeout_s
        while not os.path.exists(file):
            if time.monotonic() > end:
                raise TimeoutError(f"fit: load_best_model_at_end: {file} is not there: output_dir must be shared")
            time.sleep(0.05)
        self._load_best()

    def _file(self, step: int) -> str:
        """Returns what is written last of Trainer's checkpoint after so many steps."""
        return os.path.join(self._trainer.args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{step}", TRAINER_STATE_NAME)

    def after_train(self) -> None:
        self._take_place()
        self._save_again()
        self.output = self._trainer._finalize_training(None, self._samples, self._began)

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "state": asdict(trainer.state),
            "callbacks": [each.state()["attributes"] for each in self._exportable],
            "losses": [trainer._tr_loss.item(), trainer._total_loss_scalar, trainer._globalstep_last_logged],
            "of_step": self._of_step,
            "saved": self._saved,
        }

    def load_state_dict(self, state: Any) -> None:
        trainer = self._trainer
        trainer.state = TrainerState(**state["state"])
        for each, attributes in zip(self._exportable, state["callbacks"], strict=True):
            vars(each).update(attributes)
        loss, trainer._total_loss_scalar, trainer._globalstep_last_logged = state["losses"]
        trainer._tr_loss.fill_(loss)
        self._of_step, self._saved = list(state["of_step"]), list(state["saved"])

    @property
    def _exportable(self) -> list[ExportableState]:
        """The callbacks that have state, and the flags by which callbacks control training."""
        every = [*self._trainer.callback_handler.callbacks, self._trainer.control]
        return [each for each in every if isinstance(each, ExportableState)]


def _of_evaluation(key: str) -> str | None:
    """Returns the name of a figure of Trainer's evaluation in kfuse's records; None for what is none, as its speed."""
    if not key.startswith("eval_") or key.endswith(("_runtime", "_per_second")):
        return None
    return f"heldout_{key.removeprefix('eval_')}"
