"""`kf.critical_batch`: the critical batch size of a script's own training, measured by branches that leave no trace."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import nn

from kfuse.checkpoint import snapshot
from kfuse.data import Dataset, Stream
from kfuse.data.dataset import Collate
from kfuse.data.sources import TrainingData, training_data
from kfuse.optim import DistributedOptimizer, refuse_wrapped
from kfuse.policies.signals import BasePolicy, Signals
from kfuse.session import current
from kfuse.settings.tree import SETTINGS, ConfigError, TrainSettings, completed, resolved
from kfuse.statistics.step_stats import Statistics
from kfuse.tools.cbs.estimate import FACTORS, Branch, CriticalBatch, Plan, Trace, measure
from kfuse.train.arguments import TrainArguments
from kfuse.train.assemble import assemble
from kfuse.train.loss import LossFunction, Objective, StepFunction, WeightFunction
from kfuse.train.progress import Progress

_LOADING = [name for name, leaf in SETTINGS.items() if leaf.key.startswith("data.")]
_OWN = ("batch_size", "micro_batch", "seed", "lr_scaling", "clip_norm", "train_precision", "statistics_curvature_every")
_TAKEN = (*_OWN, *_LOADING)


def critical_batch(
    model: nn.Module,
    data: Any,
    opt: DistributedOptimizer,
    *,
    factors: Sequence[float] = FACTORS,
    repetitions: int = 5,
    samples: int | None = None,
    tolerance: float = 0.01,
    window: float = 0.25,
    loss_fn: LossFunction | None = None,
    step_fn: StepFunction | None = None,
    weight_fn: WeightFunction | None = None,
    collate_fn: Collate | None = None,
    worker_init_fn: Callable[[int], object] | None = None,
    **settings: Unpack[TrainSettings],
) -> CriticalBatch:
    """Measures the critical batch size where the model is now; model, optimizer and random state stay as they are.

    Branches of the training start from the present state, one for each k of `factors` and each of `repetitions` data
    orders, with batches of k * batch_size at the present learning rate (group["lr"]) times f(k): the method of
    Merrill et al. 2025, in docs/adapt.md. Under torchrun every rank calls it, and gets the same result.

    model, data, opt: as kf.fit's; data must have a length. Call it between steps, after opt.zero_grad().
    factors: the values of k, ascending. The first one is the reference.
    repetitions: of each branch, at least 2. Repetition r has the data order of the seed `seed` + r, r from 0.
    samples: of each branch. Default: 16 steps of the largest batch.
    tolerance: how far a smoothed loss may be above the reference's, as a part of the latter.
    window: the part of a branch's samples, at its end, whose mean loss is its smoothed loss.
    settings: as kf.fit's. lr_scaling is f: sqrt, linear or none. micro_batch: a quarter of the smallest batch.

    All values are restored bit for bit, parameters in place; the optimizer's param_groups and state tensors are new
    objects, as after opt.load_state_dict.

    Raises TypeError, ValueError as kf.fit does, ValueError also where the branches of the smallest batch diverge, and
    RuntimeError under kfuse-run.
    """
    if current().elastic:
        raise RuntimeError("kf.critical_batch: under kfuse-run workers may change: use one process or torchrun")
    if other := settings.keys() - {*_TAKEN}:
        raise TypeError(f"kf.critical_batch takes {', '.join(_TAKEN)} of kf.fit's settings, not {', '.join(other)}")
    refuse_wrapped(model)
    given = training_data(data, collate_fn, worker_init_fn)
    values = resolved("kf.critical_batch", TrainSettings, {**given.of_loader, **settings})
    plan = Plan(values["batch_size"], factors, repetitions, samples, tolerance, window)
    how: dict[str, Any] = {"objective": Objective(loss_fn, step_fn, weight_fn), "worker_init_fn": given.worker_init_fn}
    with branches(model, given.data, opt, plan, _settings(plan, given, values), **how) as branch:
        return measure(branch, plan)


@contextlib.contextmanager
def branches(
    model: nn.Module,
    data: Dataset | Stream,
    opt: DistributedOptimizer,
    plan: Plan,
    settings: Callable[[float, int], Any],
    position: Progress | None = None,
    **more: Any,
) -> Iterator[Branch]:
    """Context: its value trains branch k of a repetition from the present state, and returns what it measured.

    settings: returns those of a branch. position: how far the training is whose branches these are; None: at its
    beginning. more: fields of `TrainArguments`. On exit, also by an error, model and optimizer are as they were.
    """
    first = {name: getattr(position, name) for name in ("step", "epoch", "cursor", "samples")} if position else {}
    with _kept(model, opt) as restore:

        def branch(k: float, repetition: int) -> Trace:
            def begin() -> None:
                vars(trainer.progress).update(first, batch_size=plan.batch(k))
                opt.engine.step = trainer.progress.step

            restore()
            recording, own = _Recording(begin), settings(k, repetition)
            trainer = assemble(TrainArguments(model, data, (opt,), own, policy=recording, **more))
            trainer.run()
            before = first.get("samples", 0)
            return [(samples - before, *figures) for samples, *figures in recording.trace]

        yield branch


def _settings(plan: Plan, given: TrainingData, values: Mapping[str, Any]) -> Callable[[float, int], Any]:
    """Returns what makes the settings of branch k and repetition. Raises ConfigError where there can be none."""
    if isinstance(given.data, Stream):
        raise ConfigError("data: must have a length: a stream has one order only, and branches are repeated in others")
    if values["lr_scaling"] == "adascale":
        raise ConfigError("lr_scaling=adascale: must be one of none, linear, sqrt")
    steps = {k: plan.steps(k, length=len(given.data)) for k in plan.factors}
    smallest = plan.batch(plan.factors[0])
    micro = completed({**values, "batch_size": smallest})["micro_batch"]
    if micro > smallest:
        raise ConfigError(f"micro_batch={micro}: must be at most {smallest}, the smallest batch")

    def of_branch(k: float, repetition: int) -> dict[str, Any]:
        own = {"micro_batch": micro, "batch_max": max(plan.batch_size, plan.batch(k)), "steps": steps[k]}
        own["seed"] = (values["seed"] + repetition) % 2**32
        if k != plan.factors[0]:
            own["statistics_curvature_every"] = None
        return completed({**values, **own})

    return of_branch


class _Recording(BasePolicy):
    """Keeps what each step of a branch measured."""

    def __init__(self, begin: Callable[[], None]) -> None:
        """begin: sets how far the training is, and its batch size, before its first step."""
        self.before_train = begin  # type: ignore[method-assign]
        self.trace: Trace = []

    def decide(self, signals: Signals) -> None:
        measured = signals.grad_variance, signals.grad_sq, signals.curvature_noise_scale
        self.trace.append((signals.samples, signals.loss, *measured))

    def state_dict(self) -> dict[str, Any]:
        return {}


@contextlib.contextmanager
def _kept(model: nn.Module, opt: DistributedOptimizer) -> Iterator[Callable[[], None]]:
    """Context manager of the branches: on exit, also by an error, model and optimizer are as they were.

    Its value puts them back before a branch. The branches have statistics of their own. (Each training restores random
    state.) Raises TypeError for another optimizer than kfuse's, and ValueError where parameters have gradients: a
    training begins by dropping them.
    """
    if not isinstance(opt, DistributedOptimizer):
        raise TypeError(f"kf.critical_batch takes a kfuse optimizer (kf.Optimizer wraps any), not {type(opt).__name__}")
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
    step, figures, averaged = engine.step, engine.figures, engine.averaged

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
    opt.statistics.wire = statistics.wire
    try:
        yield restore
    finally:
        restore()
        opt.statistics = statistics
        opt.last_lr, opt.steps_without_gradients, opt.begun, reducer.tracked = kept
        opt.carry_figures(figures)
        if engine.averaged is not averaged:
            engine.track_buffers(averaged.named, averaged.summed)
        engine.step = step
