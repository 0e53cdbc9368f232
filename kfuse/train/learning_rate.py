"""A training's learning rate, and the factor by which kfuse multiplies the user's.

    factor = min(warm-up, decay) * gain(batch size, statistics) * the policies' lr_scale

The rate itself, group["lr"], is the user's: set by hand, by the configuration's lr.base, or by a torch scheduler, which
`UserSchedule` steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from kfuse.optim import DistributedOptimizer
from kfuse.policies.signals import FP32_MAX, FP32_MIN, FP32_RANGE
from kfuse.settings.tree import TrainSettings

if TYPE_CHECKING:
    from kfuse.train.progress import Progress


@dataclass
class LearningRate:
    """The rate of each step; the same on every worker."""

    opts: Sequence[DistributedOptimizer]  # the first one's rate is what is reported
    settings: TrainSettings
    schedule: LRSchedule
    progress: Progress
    now: float = 0.0  # that of the step under way

    def set(self) -> None:
        """Sets the factor of the coming update, and `now` for reports (DistributedOptimizer.base_lr)."""
        factor = self._factor(self.progress.step, self.progress.lr_scale)
        batch_factor = betas_gain(self.schedule.scaling, self.progress.batch_size, self.schedule.base_batch_size)
        for opt in self.opts:
            opt.lr_factor, opt.batch_factor = factor, batch_factor
        self.now = self.opts[0].base_lr * factor

    def scheduled(self) -> float:
        return self.opts[0].base_lr * self._factor(self.progress.step, self.progress.lr_scale)

    def _factor(self, steps: int, lr_scale: float) -> float:
        """steps: optimizer steps before the one that it is for."""
        at = self.progress
        done = self.schedule.done(at.counted(self.settings, steps), at.samples)
        return self.schedule.shape(at.schedule, done) * self.schedule.gain(at.batch_size, *at.means) * lr_scale

    def refusal(self, lr_scale: float) -> str | None:
        """Returns why the optimizer's rates cannot have this factor; None if they can. A rate of 0 can have any.

        The gain for the batch size counts too. Warm-up and decay do not: they may well lead to 0.
        """
        at = self.progress
        for rate in filter(None, [rate for opt in self.opts for rate in opt.base_rates()]):
            scaled = rate * self.schedule.gain(at.batch_size, *at.means) * lr_scale
            if not FP32_MIN <= abs(scaled) <= FP32_MAX:
                return f"a learning rate of {rate} would become {scaled:.3g}, out of fp32's range, {FP32_RANGE}"
        return None

    def reachable(self, lr: float) -> float:
        """Returns the rate. Raises ValueError for one that no factor leads to.

        The factor itself is computed where it is applied: a batch size may apply at the same step.
        """
        why = None
        if not (math.isfinite(lr) and lr > 0):
            why = "must be a finite number above 0"
        elif not self.now > 0:
            why = "the learning rate is 0 now, which no factor changes: set it later"
        elif not FP32_MIN <= lr <= FP32_MAX:
            why = f"must be {FP32_RANGE}, fp32's range"
        if why := why or self.refusal(lr / self.now * self.progress.lr_scale):
            raise ValueError(f"kf.set_lr({lr}): {why}")
        return float(lr)

    def reach(self, lr: float) -> bool:
        """The coming step gets this rate, whatever its batch size is. Returns False where its rate is 0, which no
        factor changes.
        """
        at = self.progress
        if self.schedule.done(at.counted(self.settings, at.step + 1), at.samples) >= 1:
            return True  # no step comes
        rate = self.opts[0].base_lr * self._factor(at.step + 1, 1.0)
        if rate > 0:
            at.lr_scale = lr / rate
        return rate > 0

    def count_update(self, samples: int) -> None:
        """The step's update, with `samples` samples, is made: the schedule advances."""
        at = self.progress
        if self.schedule.scaling == "adascale":
            # Apart, each worker has statistics of its own; but all must be over at one step.
            at.schedule += self.schedule.gain(at.batch_size, *((None, None) if at.is_apart else at.means))
        else:
            at.schedule += samples / self.schedule.base_batch_size

    def done(self, samples: int) -> float | None:
        """Returns the part of the run that is over after the step under way, whose update is counted, and so many
        samples. None where it has no set length.
        """
        if self.schedule.samples is None and self.schedule.steps is None:
            return None
        return self.schedule.done(self.progress.counted(self.settings, self.progress.step + 1), samples)


Interval = Literal["step", "epoch"]


def gain(
    scaling: str,
    batch_size: int,
    base_batch_size: int,
    mean_grad_sq: float | None = None,
    mean_grad_variance: float | None = None,
) -> float:
    """The factor by which a batch of `batch_size` may raise the learning rate tuned at `base_batch_size`.

    With s = batch_size / base_batch_size: none is 1, linear s (Goyal et al. 2017), sqrt the root of s, and adascale the
    gain ratio of Johnson et al. 2020, which lies between 1 and s:

        r = (sigma2 + mu2) / (sigma2 / s + mu2),   sigma2 = S / base_batch_size,   mu2 = G2

    from the running means of S and G2; a negative one counts as zero. While they are unknown, or both zero, r is the
    smallest it could be: min(1, s).
    """
    ratio = batch_size / base_batch_size
    if scaling == "linear":
        return ratio
    if scaling == "sqrt":
        return math.sqrt(ratio)
    if scaling == "none":
        return 1.0
    smallest, largest = min(1.0, ratio), max(1.0, ratio)
    if mean_grad_sq is None or mean_grad_variance is None:
        return smallest
    sigma2, mu2 = max(mean_grad_variance, 0.0) / base_batch_size, max(mean_grad_sq, 0.0)
    if not sigma2 + mu2 > 0:
        return smallest
    return min(max((sigma2 + mu2) / (sigma2 / ratio + mu2), smallest), largest)


def betas_gain(scaling: str, batch_size: int, base_batch_size: int) -> float:
    """The power that Adam's betas are raised to (`Update.batch_factor`) where the rate has this `gain`."""
    return batch_size / base_batch_size if scaling == "sqrt" else 1.0


@dataclass(frozen=True)
class LRSchedule:
    """A linear warm-up, the gain, and a decay that reaches zero when the run ends.

    The warm-up follows `progress`, which counts steps of the base batch size. A step advances it by its samples over
    base_batch_size; with adascale by its gain, since there a step is worth that many base steps (Johnson et al. 2020,
    "scale-invariant iterations"), and the run ends once `progress` reaches `steps`. The decay follows `done`, the part
    of the run that is over: so neither a changed batch size nor the scaling moves its end.

    With w = warmup_steps over the planned steps, and d from 0 at `done` = w to 1 at the end of the run:

        none, constant  1
        cosine          (1 + cos(pi d)) / 2
        linear          1 - d
        wsd             1 until the last `decay_fraction` of the run, then 1 - sqrt(u), u from 0 to 1 over that part
                        (warm-up, stable, decay: Hu et al. 2024, MiniCPM; the form of the decay: Haegele et al. 2024)

    Where the batch changes during the warm-up, warm-up and decay may overlap: then the smaller factor counts.

    base_batch_size: the batch size that the optimizer's learning rate is meant for; >= 1.
    samples, steps: length of the run, whichever ends it first; None: not limited by it. A decay needs one of them.
    """

    scaling: str = "none"
    warmup_steps: float = 0.0
    decay: str = "none"
    base_batch_size: int = 1
    samples: float | None = None
    steps: float | None = None
    decay_fraction: float = 0.1

    @classmethod
    def of(cls, settings: TrainSettings, samples: int | None) -> LRSchedule:
        """Returns the schedule of a training with these settings, of `samples` an epoch; None: a stream."""
        epochs, first = settings["epochs"], settings["batch_size"]
        length = None if epochs is None or samples is None else epochs * samples
        fixed = settings["lr_scaling"], settings["lr_warmup_steps"], settings["lr_decay"], first, length
        return cls(*fixed, settings["steps"], settings["lr_decay_fraction"])

    @property
    def total(self) -> float | None:
        """Steps of the base batch size in the whole run; None where its length is unknown."""
        lengths = [None if self.samples is None else self.samples / self.base_batch_size, self.steps]
        return min((length for length in lengths if length is not None), default=None)

    def done(self, steps: float, samples: float) -> float:
        """The part of the run that is over, in [0, 1]; 0 if its length is unknown. steps: with adascale progress."""
        done = 0.0
        if self.steps is not None:
            done = steps / self.steps if self.steps else 1.0
        if self.samples is not None:
            done = max(done, samples / self.samples if self.samples else 1.0)
        return min(1.0, done)

    def shape(self, progress: float, done: float) -> float:
        """Warm-up and decay in the step that starts at `progress`, when `done` of the run is over."""
        warmup = (progress + 1) / self.warmup_steps if progress + 1 < self.warmup_steps else 1.0
        return min(warmup, self._decay(done))

    def gain(self, batch_size: int, *means: float | None) -> float:
        """As `gain`, for this schedule's scaling and base batch size. means: the running means of G2 and S."""
        return gain(self.scaling, batch_size, self.base_batch_size, *means)

    def _decay(self, done: float) -> float:
        """In [0, 1]."""
        if self.decay in ("none", "constant") or self.total is None:
            return 1.0
        start = 1 - self.decay_fraction if self.decay == "wsd" else self.warmup_steps / self.total
        part = min(max((done - start) / (1 - start), 0.0), 1.0)
        if self.decay == "wsd":
            return 1 - math.sqrt(part)
        return 1 - part if self.decay == "linear" else 0.5 * (1 + math.cos(math.pi * part))


class UserSchedule:
    """Steps a torch scheduler, or a list of them, after each optimizer step or epoch; a ReduceLROnPlateau after each
    evaluation, with the held-out loss. They own group["lr"]; kfuse multiplies by its own factor.
    """

    def __init__(self, given: Any, interval: str, opts: Sequence[DistributedOptimizer], evaluates: bool) -> None:
        """opts: those that are trained. evaluates: training has held-out data.

        Raises TypeError or ValueError for what cannot be stepped so.
        """
        self.schedulers: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
        self._owners = [owner for opt in opts for owner in (opt, *opt.inners)]
        self.intervals: list[str] = []
        for k, scheduler in enumerate(self.schedulers):
            if scheduler in self.schedulers[:k]:
                raise ValueError(f"scheduler: the same {type(scheduler).__name__} is given twice")
            if not isinstance(scheduler, LRScheduler):
                raise TypeError(f"scheduler={type(scheduler).__name__}: must be a torch.optim.lr_scheduler.LRScheduler")
            if interval not in get_args(Interval):
                raise ValueError(f"scheduler_interval={interval!r}: must be one of {', '.join(get_args(Interval))}")
            if scheduler.optimizer not in self._owners:
                raise ValueError("scheduler: it belongs to another optimizer than the one given")
            plateau = isinstance(scheduler, ReduceLROnPlateau)
            if plateau and not evaluates:
                raise ValueError("scheduler=ReduceLROnPlateau: needs heldout= of kf.fit, whose loss it is stepped with")
            self.intervals.append("evaluation" if plateau else interval)

    @property
    def name(self) -> str | None:
        return ", ".join(type(each).__name__ for each in self.schedulers) or None

    def parts(self) -> dict[str, Any]:
        """Returns the schedulers by their names in the training state, which do not depend on the list's order: one
        that took over another optimizer's state would change its rate.
        """
        ordered = sorted(self.schedulers, key=lambda each: self._owners.index(each.optimizer))
        return {f"scheduler {k}" if k else "scheduler": each for k, each in enumerate(ordered)}

    def after(self, interval: str, *metrics: float | None) -> None:
        """Steps those whose interval this is: "step", "epoch", "evaluation" (metrics: the held-out loss)."""
        for scheduler, own in zip(self.schedulers, self.intervals, strict=True):
            if own == interval:
                # torch warns of a scheduler that steps before its optimizer. The optimizer may have stepped in another
                # process, whose state this one has taken over.
                setattr(scheduler.optimizer, "_opt_called", True)  # noqa: B010
                scheduler.step(*metrics)


def has_scheduler(opt: DistributedOptimizer, but: UserSchedule | None = None) -> bool:
    """Whether a torch scheduler was made for this optimizer. (Schedulers mark the optimizer's `step`.)

    but: what is given to be stepped: then only another scheduler counts, of rates that this leaves out.
    """
    given = [] if but is None else [scheduler.optimizer for scheduler in but.schedulers]
    given = [each for each in given if each in (opt, *opt.inners)]
    left_out = [inner for inner in opt.inners if inner not in given]
    if opt in given or (given and not left_out):
        return False
    return any(hasattr(each.step, "_wrapped_by_lr_sched") for each in (opt, *left_out))
