"""A torch learning-rate scheduler of the user's, stepped by the training loop and part of the training state."""

from __future__ import annotations

from typing import Any, Literal, get_args

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from kfuse.optim import DistributedOptimizer

Interval = Literal["step", "epoch"]


class UserSchedule:
    """Steps `scheduler` after each optimizer step, or after each epoch. It owns group["lr"]; kfuse multiplies by its
    own factor. A step that is redone after a loss is counted once.
    """

    def __init__(self, scheduler: Any, interval: str, opt: DistributedOptimizer) -> None:
        """Raises TypeError for what is not a scheduler that steps without a metric, ValueError for another optimizer's
        or an unknown interval.
        """
        if isinstance(scheduler, ReduceLROnPlateau):
            raise TypeError(
                "scheduler=ReduceLROnPlateau needs a metric at each step, which the loop does not give it: change the "
                'rate by a policy\'s lr_scale, or group["lr"] in a loop of your own'
            )
        if not isinstance(scheduler, LRScheduler):
            raise TypeError(f"scheduler={type(scheduler).__name__}: allowed is a torch.optim.lr_scheduler.LRScheduler")
        if interval not in get_args(Interval):
            raise ValueError(f"scheduler_interval={interval!r}: must be one of {', '.join(get_args(Interval))}")
        if scheduler.optimizer not in (opt, getattr(opt, "inner", None)):
            raise ValueError("scheduler: it belongs to another optimizer than the one given")
        self.scheduler, self._interval = scheduler, interval
        self._count: int | None = None

    def before_step(self) -> None:
        """A step begins."""
        self._count = self._now()

    def after_step(self) -> None:
        """The optimizer has stepped. Raises RuntimeError if the scheduler has been stepped meanwhile."""
        if self._now() != self._count:
            raise RuntimeError(
                "the scheduler was stepped in the loop's body, and scheduler= has kf.DataLoader step it: do one of both"
            )
        if self._interval == "step":
            self.scheduler.step()

    def after_epoch(self) -> None:
        """The epoch is over."""
        if self._interval == "epoch":
            self.scheduler.step()

    def _now(self) -> int | None:
        """The scheduler's own count of its steps, where it has one."""
        return getattr(self.scheduler, "last_epoch", None)


def has_scheduler(opt: DistributedOptimizer) -> bool:
    """Whether a torch scheduler was made for this optimizer: it marks the optimizer's `step`."""
    both = (opt, getattr(opt, "inner", None))
    return any(hasattr(getattr(each, "step", None), "_wrapped_by_lr_sched") for each in both)
