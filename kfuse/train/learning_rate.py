"""A training's learning rate: the factors of the schedule, of the batch size and of decisions, on the user's rate."""

from __future__ import annotations

import math

from kfuse.policies.signals import FP32_MAX, FP32_MIN, FP32_RANGE
from kfuse.train.context import TrainContext


class LearningRate:
    """The rate of each step; the same on every worker."""

    def __init__(self, training: TrainContext) -> None:
        self._opt, self._schedule = training.opt, training.schedule
        self._settings, self._progress = training.settings, training.progress
        self.now = 0.0
        """That of the step under way."""

    def set(self) -> None:
        """Sets the factor of the coming update, and `now` for reports (DistributedOptimizer.base_lr)."""
        self._opt.lr_factor = self._factor(self._progress.step, self._progress.lr_scale)
        self.now = self.scheduled()

    def scheduled(self) -> float:
        """Returns the coming step's rate."""
        return self._opt.base_lr * self._factor(self._progress.step, self._progress.lr_scale)

    def _factor(self, steps: int, lr_scale: float) -> float:
        """steps: optimizer steps before the one that it is for."""
        at = self._progress
        done = self._schedule.done(at.counted(self._settings, steps), at.samples)
        return self._schedule.shape(at.schedule, done) * self._schedule.gain(at.batch_size, *at.means) * lr_scale

    def refusal(self, lr_scale: float) -> str | None:
        """Returns why the optimizer's rates cannot have this factor; None if they can. A rate of 0 can have any.

        The gain for the batch size counts too. Warm-up and decay do not: they may well lead to 0.
        """
        at = self._progress
        for rate in filter(None, self._opt.base_rates()):
            scaled = rate * self._schedule.gain(at.batch_size, *at.means) * lr_scale
            if not FP32_MIN <= abs(scaled) <= FP32_MAX:
                return f"a learning rate of {rate} would become {scaled:.3g}, out of fp32's range, {FP32_RANGE}"
        return None

    def refuse_out_of_reach(self, lr: float) -> None:
        """Raises ValueError for a rate that no factor leads to."""
        why = None
        if not (math.isfinite(lr) and lr > 0):
            why = "must be a finite number above 0"
        elif not self.now > 0:
            why = "the learning rate is 0 now, which no factor changes: set it later"
        elif not FP32_MIN <= lr <= FP32_MAX:
            why = f"must be {FP32_RANGE}, fp32's range"
        if why := why or self.refusal(lr / self.now * self._progress.lr_scale):
            raise ValueError(f"kf.set_lr({lr}): {why}")

    def reach(self, lr: float) -> bool:
        """The coming step gets this rate, whatever its batch size is. Returns False where its rate is 0, which no
        factor changes.
        """
        at = self._progress
        if self._schedule.done(at.counted(self._settings, at.step + 1), at.samples) >= 1:
            return True  # no step comes
        rate = self._opt.base_lr * self._factor(at.step + 1, 1.0)
        if rate > 0:
            at.lr_scale = lr / rate
        return rate > 0

    def count_update(self, samples: int) -> None:
        """The step's update, with `samples` samples, is made: the schedule advances."""
        at = self._progress
        if self._schedule.scaling == "adascale":
            # Apart, each worker has statistics of its own; but all must be over at one step.
            at.schedule += self._schedule.gain(at.batch_size, *((None, None) if at.is_apart else at.means))
        else:
            at.schedule += samples / self._schedule.base_batch_size

    def done(self, samples: int) -> float | None:
        """Returns the part of the run that is over after the step under way, whose update is counted, and so many
        samples. None where it has no set length.
        """
        if self._schedule.total is None:
            return None
        return self._schedule.done(self._progress.counted(self._settings, self._progress.step + 1), samples)
