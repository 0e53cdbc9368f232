"""`kf.critical_batch`: the critical batch size of a script's own training, measured by branches that leave no trace."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Unpack

import torch
from torch import nn

from kfuse.checkpoint.snapshot import snapshot
from kfuse.data import Stream
from kfuse.data.dataset import Collate
from kfuse.data.given import training_data
from kfuse.optim import DistributedOptimizer, refuse_wrapped
from kfuse.policies.signals import BATCH_MAX, BasePolicy, Decision, Signals
from kfuse.session import current
from kfuse.settings.tree import ConfigError, TrainSettings, resolved
from kfuse.statistics.step_stats import Statistics
from kfuse.tools.cbs.estimate import (
    FACTORS,
    REPETITIONS,
    TOLERANCE,
    WINDOW,
    CriticalBatch,
    Plan,
    Trace,
    measure,
)
from kfuse.train.context import TrainContext
from kfuse.train.loss import LossFunction, Objective, StepFunction, WeightFunction
from kfuse.train.precision import check_parameters
from kfuse.train.settings import Settings
from kfuse.train.trainer import Trainer

_LOADING = [name for name in TrainSettings.__annotations__ if name.startswith("data_")]
_TAKEN = ("batch_size", "batch_micro", "seed", "lr_scaling", "train_clip_norm", "train_precision", *_LOADING)


def critical_batch(
    model: nn.Module,
    data: Any,
    opt: DistributedOptimizer,
    *,
    factors: Sequence[float] = FACTORS,
    repetitions: int = REPETITIONS,
    samples: int | None = None,
    tolerance: float = TOLERANCE,
    window: float = WINDOW,
    loss_fn: LossFunction | None = None,
    step_fn: StepFunction | None = None,
    weight_fn: WeightFunction | None = None,
    collate_fn: Collate | None = None,
    worker_init_fn: Callable[[int], object] | None = None,
    after_branch: Callable[[float, int], None] | None = None,
    **settings: Unpack[TrainSettings],
) -> CriticalBatch:
    """Measures the critical batch size where the model is now; model, optimizer and random state stay as they are.

    Branches of the training are run one after the other, each from the present parameters and optimizer state: for each
    k of `factors` and each of `repetitions` data orders, on `samples` samples in batches of k * batch_size, at the
    present learning rate (group["lr"], which no schedule changes meanwhile) times f(k). docs/critical_batch.md has
    the method (Merrill et al. 2025, arXiv 2505.23971), how the interval comes about, and what to do with the result.

    model, data, opt: as kf.fit's; data must have a length. All parameters are without gradients: call it between steps,
        after opt.zero_grad(). Not inside of kf.fit or a kf.DataLoader's loop, and not under kfuse-run.
    batch_size: samples of an optimizer step at k = 1, over all workers. batch_micro: samples of one forward and
        backward, for all k. Default: a quarter of the smallest batch.
    factors: the values of k, ascending. The first one is the reference.
    repetitions: of each branch, 2 to 31. Repetition r has the data order of the seed `seed` + r, r from 0.
    samples: of each branch. Default: 16 steps of the largest batch.
    tolerance: how far a smoothed loss may be above the reference's, as a part of the latter.
    window: the part of a branch's samples, at its end, whose mean loss is its smoothed loss.
    lr_scaling: f: sqrt (for Adam-like optimizers), linear (for SGD) or none.
    after_branch: called as after_branch(k, repetition) after each branch, with the repetition from 0.
    The other arguments and settings are as kf.fit's; of these it takes those that a branch has.

    All values are restored bit for bit, parameters in place; the optimizer's param_groups and state tensors are new
    objects, as after opt.load_state_dict. A torch scheduler is not stepped.

    Under torchrun every rank calls it, and gets the same result. The time is that of training on at most
    samples * repetitions * len(factors) samples. Parameters and optimizer state are copied to the host's memory
    meanwhile.

    Raises TypeError, ValueError as kf.fit does, ValueError also where the branches of the smallest batch diverge, and
    RuntimeError under kfuse-run.
    """
    if current().elastic:
        raise RuntimeError(
            "kf.critical_batch: must run in one process or under torchrun; under kfuse-run workers may change"
        )
    if not isinstance(opt, DistributedOptimizer):
        raise TypeError(f"kf.critical_batch takes a kfuse optimizer (kf.Optimizer wraps any), not {type(opt).__name__}")
    for name in settings:
        if name not in _TAKEN:
            raise TypeError(f"kf.critical_batch takes no {name}=; of kf.fit's settings it takes {', '.join(_TAKEN)}")
    refuse_wrapped(model)
    given = training_data(data, collate_fn, worker_init_fn)
    if isinstance(given.data, Stream):
        raise ValueError("data: must have a length: a stream has one order only, and branches are repeated in others")
    values = resolved("kf.critical_batch", TrainSettings, {**given.of_loader, **settings})
    if values["lr_scaling"] == "adascale":
        raise ConfigError("lr_scaling=adascale: must be one of none, linear, sqrt")
    check_parameters(model, values["train_precision"])
    plan = Plan(values["batch_size"], factors, repetitions, samples, tolerance, window)
    if plan.batch(plan.factors[-1]) > BATCH_MAX:
        raise ValueError(f"factors={list(plan.factors)}: the largest batch must be at most {BATCH_MAX}")
    steps = {k: plan.steps(k, length=len(given.data)) for k in plan.factors}
    smallest = plan.batch(plan.factors[0])
    micro = values["batch_micro"] or max(1, smallest // 4)
    if micro > smallest:
        raise ConfigError(f"batch_micro={micro}: must be at most {smallest}, the smallest batch")
    objective = Objective(loss_fn, step_fn, weight_fn)

    def branch(k: float, repetition: int) -> Trace:
        own = {
            "batch_micro": micro,
            "batch_max": max(plan.batch_size, plan.batch(k)),
            "train_steps": steps[k],
            "seed": values["seed"] + repetition,
        }
        resolved_settings = Settings.of(values | own, worker_init_fn=given.worker_init_fn)
        recording = _Recording(plan.batch(k))
        restore()
        Trainer(TrainContext(model, given.data, opt, resolved_settings, policy=recording, objective=objective)).run()
        return recording.trace

    with _kept(model, opt) as restore:
        return measure(branch, plan, after_branch)


class _Recording(BasePolicy):
    """Changes the batch size of a branch from its first step on, and keeps what each step measured."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self.trace: Trace = []

    def initial(self) -> Decision:
        return Decision(batch_size=self._batch_size)

    def decide(self, signals: Signals) -> None:
        self.trace.append((signals.samples, signals.loss, signals.grad_variance, signals.grad_sq))

    def state_dict(self) -> dict[str, Any]:
        return {}


@contextlib.contextmanager
def _kept(model: nn.Module, opt: DistributedOptimizer) -> Iterator[Callable[[], None]]:
    """Context of the branches: on exit, also by an error, model and optimizer are as they were.

    The context's value puts them back before a branch. What the branches record and count is not the optimizer's: they
    have statistics of their own. (Each training restores random state.) For a group whose workers stay the same.
    Raises ValueError where parameters have gradients: a training begins by dropping them.
    """
    params = [*model.parameters(), *(p for group in opt.param_groups for p in group["params"])]
    if any(p.grad is not None for p in params):
        raise ValueError("parameters have gradients: call kf.critical_batch between steps, after opt.zero_grad()")
    modes = {module: module.training for module in model.modules()}
    model_state = snapshot(model.state_dict(), "the model's state")
    optimizer_state = snapshot(opt.state_dict(), "the optimizer's state")
    # A state dict has no buffers that are not persistent.
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    engine, reducer, statistics = opt.engine, opt.reducer, opt.statistics
    kept = opt.last_lr, opt.steps_without_gradients, opt.begun, reducer.tracked
    step, figures, averaged = engine.step, engine.figures, engine.averaged.tensors

    @torch.no_grad()
    def restore() -> None:
        model.load_state_dict(model_state)
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
        # A copy of the copy: a torch optimizer takes over the tensors themselves, and its updates change them.
        opt.load_state_dict(copy.deepcopy(optimizer_state))
        for module, training in modes.items():
            module.training = training

    opt.statistics = Statistics()
    opt.statistics.bf16_wire, opt.statistics.bf16_sums = statistics.bf16_wire, statistics.bf16_sums
    try:
        yield restore
    finally:
        restore()
        opt.statistics = statistics
        opt.last_lr, opt.steps_without_gradients, opt.begun, reducer.tracked = kept
        opt.carry_figures(figures)
        if engine.averaged.tensors != averaged:
            engine.track_buffers(averaged)
        engine.step = step
