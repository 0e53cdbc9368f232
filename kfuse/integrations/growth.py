"""A batch size that follows a policy in a loop of others: by more micro-batches a step, and the rate with it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR
from torch.optim.swa_utils import SWALR

from kfuse.integrations.measure import Monitor
from kfuse.optim.betas import change_betas
from kfuse.policies.autoscale import AutoscalePolicy
from kfuse.policies.goodput import GoodputPolicy
from kfuse.policies.phases import SchedulePolicy
from kfuse.policies.signals import DECISION_LAG, BasePolicy, Bounds, Decision, Signals, check_whole, checked_decision
from kfuse.statistics.figures import Measured
from kfuse.statistics.step_stats import StepStats
from kfuse.train.learning_rate import betas_gain, gain

_SCALINGS = ("none", "sqrt", "linear")
_IN_SAMPLES = ("grad_variance", "mean_grad_variance", "noise_scale", "noise_scale_low", "noise_scale_high")


def growth(
    monitor: Monitor,
    policy: BasePolicy,
    optimizers: Optimizer | Sequence[Optimizer],
    schedulers: LRScheduler | Sequence[LRScheduler] = (),
    *,
    batch_max: int | None = None,
    lr_scaling: str = "sqrt",
) -> Growth:
    """Has `policy` choose the batch size of a loop of one's own. Call it on every rank, before the first step.

    Each step then has `Growth.accumulate` micro-batches on each rank, and divides each loss by it; `Growth.step` ends
    the step, after the optimizers and schedulers have stepped.

    monitor: of `kf.ddp_hook`, `kf.fsdp_monitor` or `kf.monitor`, made with `samples=` and with `accumulate=`, the
        micro-batches of a first step on each rank.
    optimizers: all that update the model; the first one's rate is what the policy sees.
    schedulers: those that the loop steps with each update, not by a metric. They are stepped as often more as a larger
        batch has more samples. A loop that sets rates itself multiplies them by `Growth.lr_factor`.
    policy, batch_max, lr_scaling: as of `Growth`.

    Raises what `Growth` and `Growth.begin` do, and ValueError where the monitor has not these two numbers, or the
    schedule's phases are by epoch.
    """
    size, accumulate = monitor.samples, monitor.accumulate
    for name, value in (("samples", size), ("accumulate", accumulate)):
        if not isinstance(value, int | float) or value != int(value):
            raise ValueError(f"kf.growth: the monitor's {name} is {value}: must be a whole number, set as it is made")
    grows = Growth(policy, batch_max, lr_scaling)
    grows._own_loop = True
    if any(isinstance(each, SchedulePolicy) and each.unit == "epoch" for each in policy.with_parts()):
        raise ValueError("kf.growth: the schedule's phases are by epoch: must be by step or by samples")
    optimizers = [optimizers] if isinstance(optimizers, Optimizer) else optimizers
    schedulers = [schedulers] if isinstance(schedulers, LRScheduler) else schedulers
    grows.begin(monitor, int(accumulate), int(size), optimizers, schedulers, schedulers)  # type: ignore[arg-type]
    return grows


class Growth:
    """Has `policy` choose the batch size of a training by a loop that is not kfuse's, in steps of doubling.

    The batch size is the first one times a power of two, not below the first one and at most `batch_max` samples of all
    processes. A step of a larger batch has more micro-batches, so memory stays flat. It changes where the micro-batches
    of the epoch so far divide by the new number, at least four steps after the one that was measured. Schedulers are
    stepped as often as with the first batch size for the same samples.

    policy: is asked, as `BasePolicy.decide`, after each step, in samples; its hooks are not called. It must decide by
    statistics alone, for a batch size.
    batch_max: may be left out for a SchedulePolicy, whose largest batch it then is.
    lr_scaling: how the learning rate follows the batch size: sqrt suits Adam, whose betas follow too (beta^k; of
        torch's Adam and AdamW), linear SGD, none leaves it.

    Raises ValueError for values out of range, TypeError for a policy that decides by times.
    """

    def __init__(self, policy: BasePolicy, batch_max: int | None = None, lr_scaling: str = "sqrt") -> None:
        plans = [each for each in policy.with_parts() if isinstance(each, SchedulePolicy)]
        self._planned = [size for plan in plans for size in plan.batch_sizes]
        if batch_max is None and not self._planned:
            raise ValueError("batch_max: must be given: only a schedule has a largest batch of its own")
        self.batch_max: int = max(self._planned) if batch_max is None else batch_max
        check_whole("batch_max", self.batch_max, 1)
        if others := [name for plan in plans for name in plan.owned_fields if name != "batch_size"]:
            raise ValueError(f"Growth: the schedule sets {others[0]}: must set the batch size alone")
        accepted = policy.lr_settings.get("scaling", _SCALINGS)
        if lr_scaling not in _SCALINGS or lr_scaling not in accepted:
            allowed = ", ".join(name for name in _SCALINGS if name in accepted)
            raise ValueError(f"lr_scaling={lr_scaling!r}: must be one of {allowed}")
        if timed := [each for each in policy.with_parts() if isinstance(each, GoodputPolicy | AutoscalePolicy)]:
            raise TypeError(
                f"Growth: {type(timed[0]).__name__} decides by the times of steps, which frameworks do not tell: "
                "must be a policy that decides by statistics, such as GNSPolicy"
            )
        self.policy, self.lr_scaling = policy, lr_scaling
        self.accumulate = self._first = self._wanted = 0
        self._size = 0  # samples of a micro-batch
        self._own_loop = False  # each step has `accumulate` micro-batches, also the last one of an epoch
        self._done, self._window = 0, 0  # micro-batches of this process in the epoch's ended steps, and in this step
        self._updates_before = 0  # as of `updates`, in the epochs before
        self._epoch = self._samples = 0
        self._measured = self._micro_batches = 0.0  # samples, as measured, and micro-batches of all steps decided on
        self._unread = deque[StepStats]()
        self._accumulates = deque[tuple[int, float]]()  # of the steps that are not decided on yet, and their rates
        self._loaded: dict[str, Any] | None = None

    @property
    def batch_size(self) -> int:
        """Samples of a step of all processes; 0 before the first."""
        if not self._first:
            return 0
        return self._size * self.accumulate * self._monitor.workers

    @property
    def lr_factor(self) -> float:
        """By how much the rate is larger than with the first batch size, by `lr_scaling`."""
        return gain(self.lr_scaling, self.accumulate, self._first)

    @property
    def saved_accumulate(self) -> int:
        """As of `accumulate`, of the checkpoint that the training will go on from; 0: of none."""
        return self._loaded["progress"]["accumulate"] if self._loaded else 0

    @property
    def saved_updates(self) -> int:
        """As of `updates`, of that checkpoint."""
        progress = self._loaded["progress"] if self._loaded else {"_updates_before": 0, "_done": 0, "_first": 1}
        return int(progress["_updates_before"] + math.ceil(progress["_done"] / progress["_first"]))

    @property
    def updates(self) -> int:
        """Updates that the first batch size would have made by now: what a schedule's length is counted in."""
        return self._updates_before + math.ceil(self._done / self._first)

    def step(self) -> int:
        """Ends a step of a loop of one's own. Returns `accumulate`, which with the rates is the next one's.

        Raises RuntimeError where a step has had another number of micro-batches than `accumulate`; a few steps later.
        """
        self._window = self.accumulate
        self.end_step()
        self._monitor.accumulate = self.accumulate
        return self.accumulate

    # -- for the integrations, in the order in which a training calls them -------------------------------------------

    def begin(
        self,
        monitor: Monitor,
        accumulate: int,
        micro_batch: int,
        optimizers: Sequence[Any],
        schedulers: Sequence[Any],
        stepped: Sequence[Any],
    ) -> None:
        """A training begins, before its first backward. After `load_state_dict` it goes on.

        accumulate: micro-batches of a first step on each process. micro_batch: samples of one, on rank 0. optimizers,
        schedulers: as of torch. stepped: those schedulers that are stepped with each update.

        Raises ValueError where the first batch is above batch_max, or is not the policy's first one, or where a
        schedule has another size than it times a power of two; TypeError for a scheduler that overwrites the rate;
        RuntimeError where a training has used it already.
        """
        self.refuse_second_training()
        for scheduler in _with_parts(schedulers):
            if isinstance(scheduler, OneCycleLR | CyclicLR | SWALR):
                raise TypeError(
                    f"Growth: {type(scheduler).__name__} sets the learning rate to numbers of its own: must be a "
                    "scheduler that multiplies the optimizer's rate, such as LambdaLR or CosineAnnealingLR"
                )
        self._monitor, self._optimizers = monitor, list(optimizers)
        self._schedulers, self._stepped = list(schedulers), list(stepped)
        self.accumulate = self._first = self._wanted = accumulate
        self._size = _of_rank_0(micro_batch)
        first = self.batch_size
        if first > self.batch_max:
            raise ValueError(f"batch_max={self.batch_max}: must be at least the first batch, {first} samples")
        begins = getattr(self.policy.initial(), "batch_size", None) or first
        if begins != first:
            raise ValueError(f"Growth: the policy begins with {begins} samples: must be the first batch, {first}")
        if wrong := [size for size in self._planned if size % first or (size // first).bit_count() != 1]:
            raise ValueError(f"Growth: the schedule's batch size {wrong[0]}: must be {first} times a power of two")
        self._ended = monitor.ended
        monitor.observers.append(self._unread.append)
        self._torchs = [getattr(each, "optimizer", each) for each in optimizers]  # Accelerate's are around torch's
        self._before_update(self._torchs[0])
        monitor.handles.append(self._torchs[0].register_step_pre_hook(self._before_update))
        if self._loaded is not None:
            self._go_on(self._loaded)

    def refuse_second_training(self) -> None:
        """Raises RuntimeError where a training has used it already."""
        if self._first:
            raise RuntimeError("Growth: its policy keeps what it has seen: must be a new one for each training")

    def micro_batch(self) -> None:
        """A micro-batch of this process."""
        self._window += 1

    def begin_epoch(self) -> None:
        """Each process begins an epoch; `accumulate` may have changed."""
        self._updates_before = self.updates
        self._done = self._window = 0  # micro-batches that were left over, for want of a length, belong to no update
        self._epoch += 1
        self._change()

    def end_step(self, skipped: bool = False) -> None:
        """An update was made: asks the policy, and sets `accumulate` and the rates for the next step.

        skipped: by the gradient scaler; then the training has not stepped its schedulers either.
        """
        if self._window > self.accumulate:
            raise RuntimeError(
                f"Growth: an update after {self._window} micro-batches: must be {self.accumulate}, as was set"
            )
        if not self._window:
            raise RuntimeError(
                "Growth: an update without micro-batches: each must be in `with accelerator.accumulate(model)`"
            )
        before = self.updates
        self._done, self._window = self._done + self._window, 0
        for scheduler in self._stepped:
            for _ in range(0 if skipped else self.updates - before - 1):
                scheduler.step()
        if self._monitor.ended > self._ended:  # else kf.monitor has left out an update that the scaler skipped
            self._accumulates.append((self.accumulate, self._lr))
        self._ended = self._monitor.ended
        while self._unread and self._unread[0].step <= self._monitor.ended - DECISION_LAG:
            self._decide(self._unread.popleft())
        self._change()

    def _before_update(self, optimizer: Optimizer, *given: Any) -> None:
        self._lr = float(optimizer.param_groups[0]["lr"])

    def _change(self) -> None:
        if self._wanted != self.accumulate and self._done % self._wanted == 0:
            change = self.lr_scaling, self._wanted, self.accumulate
            change_betas(self._torchs, betas_gain(*change))
            _scale_rates(self._optimizers, self._schedulers, gain(*change))
            self.accumulate = self._wanted

    def state_dict(self) -> dict[str, Any]:
        """Plain values; the rates are in the states of optimizers and schedulers. Waits for the device."""
        if not self._first:
            return {}
        self._monitor.drain()
        return {
            "progress": {name: getattr(self, name) for name in _PROGRESS},
            "unread": [stats.plain() for stats in self._unread],
            "accumulates": list(self._accumulates),
            "policy": self.policy.state_dict(),
            "monitor": self._monitor.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` returned, now or when training begins."""
        self._loaded = state
        if self._first and state:
            self._go_on(state)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _go_on(self, state: dict[str, Any]) -> None:
        if state["progress"]["_first"] != self._first or state["progress"]["_size"] != self._size:
            raise ValueError(
                f"Growth: the checkpoint began with {state['progress']['_first']} micro-batches of "
                f"{state['progress']['_size']} samples: must be the same here, {self._first} of {self._size}"
            )
        self._monitor.drain()
        self._unread.clear()  # steps after the one that the training goes back to
        for name, value in state["progress"].items():
            setattr(self, name, value)
        self.policy.load_state_dict(state["policy"])
        self._monitor.load_state_dict(state["monitor"])
        self._ended = self._monitor.ended
        if self._own_loop:
            self._monitor.accumulate = self.accumulate
        self._unread.extend(StepStats.of_plain(each) for each in state["unread"])
        self._accumulates = deque((accumulate, lr) for accumulate, lr in state["accumulates"])
        self._loaded = None

    def _decide(self, stats: StepStats) -> None:
        """Asks the policy about a finished step; the same on every process."""
        accumulate, lr = self._accumulates.popleft()
        workers, size = self._monitor.workers, self._size
        if self._own_loop and stats.micro_batches != accumulate * workers:
            raise RuntimeError(
                f"kf.growth: step {stats.step} had {stats.micro_batches} micro-batches on {workers} ranks: must be "
                f"growth.accumulate on each, {accumulate}"
            )
        self._samples += stats.micro_batches * size
        self._measured, self._micro_batches = self._measured + stats.samples, self._micro_batches + stats.micro_batches
        # Where the monitor counts tokens, or nothing: what was measured, in samples.
        here = stats.micro_batches * size / stats.samples if stats.samples else 1.0
        on_average = self._micro_batches * size / self._measured if self._measured else 1.0
        measured = {each.name: getattr(stats, each.name) for each in fields(Measured)}
        for name in _IN_SAMPLES:
            if measured[name] is not None:
                measured[name] *= here if name == "grad_variance" else on_average
        first = size * self._first * workers
        asked = self.policy.decide(
            Signals(
                step=stats.step,
                epoch=self._epoch,
                samples=self._samples,
                lr=lr,
                lr_scale=1.0,
                workers=workers,
                batch_size=size * accumulate * workers,
                micro_batch=size,
                base_batch_size=first,
                bounds=Bounds(first, self.batch_max, workers, workers),
                **measured,
            )
        )
        if (decision := checked_decision(asked, "decide")) is None:
            return
        others = [each.name for each in fields(Decision) if getattr(decision, each.name) is not None]
        others = [name for name in others if name not in ("batch_size", "workers")]  # the bounds hold workers fixed
        if others:
            raise ValueError(f"Growth: the policy asked for {others[0]}: only the batch size can change here")
        if decision.batch_size is not None:
            doublings = math.log2(max(min(decision.batch_size, self.batch_max), first) / first)
            self._wanted = self._first * 2 ** math.floor(doublings + 1e-9)


_PROGRESS = (
    "accumulate", "_first", "_wanted", "_size", "_done", "_updates_before", "_epoch", "_samples", "_measured",
    "_micro_batches",
)  # fmt: skip


def _of_rank_0(number: int) -> int:
    """Returns rank 0's number, so that all processes decide alike."""
    numbers = [number]
    if dist.is_available() and dist.is_initialized():
        dist.broadcast_object_list(numbers)
    return numbers[0]


def _with_parts(schedulers: Sequence[Any]) -> list[Any]:
    """Returns these, and those of a SequentialLR or ChainedScheduler."""
    return [part for each in schedulers for part in (each, *_with_parts(getattr(each, "_schedulers", [])))]


def _scale_rates(optimizers: Sequence[Any], schedulers: Sequence[Any], factor: float) -> None:
    """Multiplies the learning rates, and what schedulers compute them from."""
    tensors = dict[int, Tensor]()  # several groups may have the same one
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for name in ("lr", "initial_lr"):
                if isinstance(group.get(name), Tensor):
                    tensors[id(group[name])] = group[name]
                elif name in group:
                    group[name] *= factor
    for tensor in tensors.values():
        tensor.mul_(factor)
    for scheduler in _with_parts(schedulers):
        for name in ("base_lrs", "_last_lr"):
            if hasattr(scheduler, name):
                setattr(scheduler, name, [lr * factor for lr in getattr(scheduler, name)])
        if hasattr(scheduler, "eta_min"):
            scheduler.eta_min *= factor
