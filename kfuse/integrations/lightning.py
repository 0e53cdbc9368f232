"""The gradient noise scale in a training by Lightning (2.6)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from kfuse.integrations.attached import figures, monitor_of
from kfuse.integrations.measure import Monitor


class NoiseScale(Callback):  # type: ignore[misc]
    """A callback that measures the noise scale of the module's training, and logs it; parameters keep their bits.

    `trainer.callback_metrics` and the loggers get noise_scale, noise_scale_low and noise_scale_high every
    `log_every_n_steps` batches, in samples, NaN where they are unknown. Without `Trainer(accumulate_grad_batches=...)`
    of 2 or more, or several processes, they are: a step of one micro-batch has nothing to compare.

    Training raises TypeError for a strategy that no monitor measures (must be one device or DDP), for manual
    optimization and for LBFGS.
    """

    monitor: Monitor | None = None
    """Of the newest fit; None before it."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        has_lbfgs = any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in trainer.optimizers)
        if has_lbfgs or not pl_module.automatic_optimization:
            raise TypeError(
                "NoiseScale: with manual optimization or LBFGS a backward is no micro-batch: must be automatic "
                "optimization with an optimizer of one backward for a micro-batch"
            )
        if self.monitor is not None:
            self.monitor.close()
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.monitor = monitor_of("NoiseScale", trainer.strategy.model, scaler)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        assert self.monitor is not None
        self.monitor.samples = _length_of(batch)
        self.monitor.accumulate = trainer.accumulate_grad_batches

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        assert self.monitor is not None
        self.monitor.forward_was_made()  # on one device training_step need not call the module

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self.monitor is not None
        if (batch_idx + 1) % trainer.log_every_n_steps == 0 or trainer.is_last_batch:
            values = {name: math.nan if value is None else value for name, value in figures(self.monitor).items()}
            pl_module.log_dict(values, on_step=True, on_epoch=False, batch_size=1)


def _length_of(batch: Any) -> int | None:
    """Returns a batch's samples; None where they cannot be seen. Takes nothing out of an iterator."""
    if isinstance(batch, Iterator):
        return None
    try:
        return int(extract_batch_size(batch))
    except MisconfigurationException:
        return None
