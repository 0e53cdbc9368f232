"""The gradient noise scale in a training by Lightning (2.6)."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor

from kfuse.integrations.attached import figures, monitor_of
from kfuse.integrations.measure import Monitor


class NoiseScale(Callback):  # type: ignore[misc]
    """A callback that measures the noise scale of the module's training, and logs it; parameters keep their bits.

    `trainer.callback_metrics` and the loggers get noise_scale, noise_scale_low and noise_scale_high, in samples, where
    they are known. Without `Trainer(accumulate_grad_batches=...)` of 2 or more, or several processes, the noise scale
    is unknown: a step of one micro-batch has nothing to compare.

    Training raises TypeError for a strategy that no monitor measures: must be one device, DDP or FSDP2.
    """

    monitor: Monitor | None = None
    """Of the newest fit; None before it."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.monitor = monitor_of("NoiseScale", trainer.strategy.model, scaler)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        assert self.monitor is not None
        self.monitor.samples = extract_batch_size(batch)
        self.monitor.accumulate = trainer.accumulate_grad_batches

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        assert self.monitor is not None
        if trainer.strategy.model is pl_module:  # on one device training_step is not a call of the module
            self.monitor.forward_begins()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *given: Any) -> None:
        assert self.monitor is not None
        pl_module.log_dict(figures(self.monitor), on_step=True, on_epoch=False, batch_size=1)
