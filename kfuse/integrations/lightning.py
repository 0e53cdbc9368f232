"""The gradient noise scale in a training by Lightning (2.6)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from kfuse.integrations.attached import LOGGED, figures, monitor_of
from kfuse.integrations.growth import Growth as Growth
from kfuse.integrations.measure import Monitor
from kfuse.policies.signals import check_number


class NoiseScale(Callback):  # type: ignore[misc]
    """A callback that measures the noise scale of the module's training, and logs it; parameters keep their bits.

    `trainer.callback_metrics` and the loggers get noise_scale, noise_scale_low and noise_scale_high every
    `log_every_n_steps` batches, in samples, NaN where they are unknown. Without `Trainer(accumulate_grad_batches=...)`
    of 2 or more, or several processes, they are: a step of one micro-batch has nothing to compare.

    With manual optimization, of one optimizer on one device, a step ends when the optimizer steps, and each
    training_step makes one backward, by `manual_backward`; a step with more has no figures.

    accumulate: what manual optimization divides each loss by, the number of a step's batches for instance.

    growth: chooses the batch size, by `trainer.accumulate_grad_batches`, and multiplies the learning rate. The training
    still ends where max_steps of the first batch size, or max_epochs, would have ended it. Schedulers of the interval
    "step" are stepped as with the first batch size, but for those by a metric.

    Training raises RuntimeError for a growth that a training has used, ValueError for a checkpoint that was written
    without it, for min_steps or min_epochs beside max_steps, for a scheduler of another frequency than 1, TypeError for
    a strategy that no monitor measures (must be one device or DDP), for LBFGS, for manual optimization with several
    optimizers or processes or with a growth, and for `accumulate` with automatic optimization.
    """

    monitor: Monitor | None = None
    """Of the newest fit; None before it."""

    def __init__(self, growth: Growth | None = None, *, accumulate: float | None = None) -> None:
        if accumulate is not None:
            check_number("accumulate", accumulate)
        self._growth, self._accumulate = growth, accumulate
        self._forward_told = False  # to the monitor, of the newest batch
        self._first = self._updates = 0  # micro-batches of a first step, and updates that the growth has seen

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in trainer.optimizers):
            raise TypeError("NoiseScale: with LBFGS a backward is no micro-batch: must be another optimizer")
        simple = len(trainer.optimizers) == 1 == trainer.world_size and self._growth is None
        if pl_module.automatic_optimization and self._accumulate is not None:
            raise TypeError("NoiseScale: accumulate= is for manual optimization: must be left out")
        if not pl_module.automatic_optimization and not simple:
            raise TypeError(
                "NoiseScale: manual optimization with several optimizers or processes, or with growth: must be one "
                "optimizer in one process, without growth, or automatic optimization"
            )
        if self.monitor is not None:
            self.monitor.close()
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.monitor = monitor_of("NoiseScale", trainer.strategy.model, scaler)
        if self._growth is not None:
            if any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks):
                raise TypeError(
                    "NoiseScale: growth and GradientAccumulationScheduler both set the accumulation: must be one"
                )
            self._growth.refuse_second_training()
            if trainer.max_steps >= 0 and (trainer.min_steps or trainer.min_epochs):
                raise ValueError("NoiseScale: growth with max_steps and min_steps or min_epochs: must be one of both")
            if any(each.interval == "step" and each.frequency != 1 for each in trainer.lr_scheduler_configs):
                raise ValueError("NoiseScale: growth with a scheduler of interval step: must have the frequency 1")
            if trainer.global_step and not self._growth.saved_accumulate:
                raise ValueError("Growth: the checkpoint was written without growth: must be resumed without it")
            self._first, self._updates = trainer.accumulate_grad_batches, trainer.global_step
            trainer.accumulate_grad_batches = self._growth.saved_accumulate or self._first
            if 0 <= trainer.max_steps <= self._growth.saved_updates:
                trainer.should_stop = True

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        assert self.monitor is not None
        self.monitor.samples = _length_of(batch)
        self.monitor.accumulate = self._accumulate or trainer.accumulate_grad_batches
        self._forward_told = False
        if (growth := self._growth) is None:
            return
        if not growth.batch_size:
            resumed, samples, configs = growth.saved_accumulate, self.monitor.samples, trainer.lr_scheduler_configs
            schedulers = [each.scheduler for each in configs]
            stepped = [each.scheduler for each in configs if each.interval == "step" and not each.reduce_on_plateau]
            growth.begin(self.monitor, self._first, int(samples or 1), trainer.optimizers, schedulers, stepped)
            if resumed and batch_idx == 0:
                growth.begin_epoch()
        growth.micro_batch()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._growth is not None and self._growth.batch_size:
            self._growth.begin_epoch()
            trainer.accumulate_grad_batches = self._growth.accumulate

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        assert self.monitor is not None
        if not self._forward_told:
            self.monitor.forward_was_made()  # on one device training_step need not call the module
        self._forward_told = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self.monitor is not None
        if self._growth is not None and trainer.global_step != self._updates:
            self._updates = trainer.global_step
            self._growth.end_step()
            trainer.accumulate_grad_batches = self._growth.accumulate
            if 0 <= trainer.max_steps <= self._growth.updates:
                trainer.should_stop = True
        if (batch_idx + 1) % trainer.log_every_n_steps == 0 or trainer.is_last_batch:
            values = dict.fromkeys(LOGGED, math.nan) | figures(self.monitor)
            if self._growth is not None:
                values["batch_size"] = self._growth.batch_size
            pl_module.log_dict(values, on_step=True, on_epoch=False, batch_size=1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self.monitor is not None
        self.monitor.drain()
        if self._growth is not None:
            trainer.accumulate_grad_batches = self._first

    def state_dict(self) -> dict[str, Any]:
        return {} if self._growth is None else self._growth.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._growth is not None:
            self._growth.load_state_dict(state_dict)


def _length_of(batch: Any) -> int | None:
    """Returns a batch's samples; None where they cannot be seen. Takes nothing out of an iterator."""
    if isinstance(batch, Iterator):
        return None
    try:
        return int(extract_batch_size(batch))
    except MisconfigurationException:
        return None
