"""`kf.fit`, the training loop for a script's own model, data and policy, and `kf.DataLoader`, for a loop of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Unpack

from torch import nn

from kfuse.data import Dataset
from kfuse.data.dataset import Collate
from kfuse.data.sources import TrainingData, heldout_data, training_data
from kfuse.elastic.link import ignore
from kfuse.optim import DistributedOptimizer, refuse_wrapped
from kfuse.policies import BasePolicy
from kfuse.session import current
from kfuse.settings.tree import LoopSettings, TrainSettings, completed, resolved
from kfuse.train.arguments import TrainArguments
from kfuse.train.assemble import assemble
from kfuse.train.learning_rate import Interval, UserSchedule, has_scheduler
from kfuse.train.loss import LossFunction, Metric, Objective, StepFunction, WeightFunction
from kfuse.train.output import Output, log_remarks
from kfuse.train.step import Step
from kfuse.train.trainer import Trainer


class Hook:
    """A policy as KungFu's scripts hand it over: `kf.fit` and `kf.DataLoader` take the policy itself."""

    def __init__(self, policy: BasePolicy) -> None:
        """Raises TypeError for what is not a policy."""
        if not isinstance(policy, BasePolicy):
            raise TypeError(f"kf.Hook takes a kf.BasePolicy, not {type(policy).__name__}")
        self.policy = policy


def fit(
    model: nn.Module,
    data: Any,
    opt: DistributedOptimizer,
    policy: BasePolicy | Hook | None = None,
    *,
    loss_fn: LossFunction | None = None,
    step_fn: StepFunction | None = None,
    weight_fn: WeightFunction | None = None,
    scheduler: Any = None,
    scheduler_interval: Interval = "step",
    heldout: Any = None,
    metrics: Mapping[str, Metric] | None = None,
    collate_fn: Collate | None = None,
    worker_init_fn: Callable[[int], object] | None = None,
    **settings: Unpack[TrainSettings],
) -> dict[str, Any] | None:
    """Trains `model` on `data`; returns what summary.json holds (None on a worker that left before the end).

    All workers start from rank 0's model, optimizer and scheduler. docs/promises.md and docs/data.md have the details.
    model: not wrapped (no DistributedDataParallel, no FSDP), on this worker's device. Modules in eval mode stay so.
    data: tensors or arrays (x, y), a dictionary of them, a map-style torch data set, a stream (which needs
        steps), or a torch DataLoader of shuffle=True, whose batch_size becomes the global one.
    opt: a kfuse optimizer of the model's parameters. policy: a kf.BasePolicy; None: nothing is adapted.
    loss_fn(output, target): the MEAN loss over a micro-batch, where a batch is a pair (input, target). Default: cross
        entropy for integer targets, mean squared error for floating ones. Batches that are mappings: `model(**batch)`,
        whose output has the loss as `.loss` or `["loss"]`.
    step_fn(model, batch): instead of loss_fn, for any batch. It returns the MEAN loss, or (loss, {name: number}) with
        the same names each time, at most 16; these figures are averaged like the loss, over samples and workers.
    weight_fn(batch): the weight of a micro-batch in the step's mean gradient and mean loss, a number above 0, such as
        its target tokens. Default: its samples. It gets the batch as it was fetched, on the CPU.
    scheduler, scheduler_interval: a torch scheduler made for `opt`, stepped here each "step" or "epoch". Where `opt`
        is of several optimizers a list may have one for each.
    heldout: data as above, but no stream. metrics: {name: function(output, target)}, evaluated on it in batches of 256
        samples: a tensor [B], a value for each sample, or a scalar, the batch's mean.
    collate_fn(samples): makes a batch. worker_init_fn(number): called first in each loader process.
    settings: `steps=100`, `batch_size=64`, ...: docs/reference.md, and `kfuse --help-all`: there `batch.size`.

    Raises TypeError for arguments of an unknown kind and unknown settings, ValueError for what is out of range, for
    settings that exclude each other, and for a model that cannot be trained so.
    """
    given = training_data(data, collate_fn, worker_init_fn)
    trainer, output = _trainer(
        "kf.fit",
        model,
        opt,
        given,
        resolved("kf.fit", TrainSettings, {**given.of_loader, **settings}),
        scheduler,
        scheduler_interval,
        policy=policy,
        objective=Objective(loss_fn, step_fn, weight_fn),
        heldout=None if heldout is None else heldout_data(heldout, collate_fn),
        metrics=metrics or {},
    )
    _log_remarks(given, trainer.settings, settings)
    with output.recorded():
        return trainer.run()


class DataLoader:
    """Yields the steps of a run; a step yields this worker's micro-batches, already wrapped in opt.micro_batch.

        for step in kf.DataLoader(model, data, opt, batch_size=64, epochs=3):
            for x, y in step:
                F.cross_entropy(model(x), y).backward()      # the MEAN loss of these samples
            opt.step()
            opt.zero_grad()

    A micro-batch has whatever structure the data set's batches have. `len(step)` is the number of this worker's;
    `step.number` and `step.epoch` count from 0; `step.ends_epoch` is True in an epoch's last one. Set `step.loss` to
    the mean loss of a micro-batch, in its body, to have the step's mean loss over all workers in `opt.stats.loss` and
    in metrics.jsonl; `kf.log` takes other figures.

    Workers may join and leave between steps. Where one is lost, `opt.step()` does nothing and the step comes again,
    with the lost worker's micro-batches spread over the rest: the loop's body must be able to run twice for one step.
    The random state is keyed by (seed, step, micro-batch), and for fetching data by (seed, epoch, index). On a worker
    that is asked to leave, iteration ends and `kf.rank()` is -1.
    All workers may `break` at the same step: that ends this training. Where one alone breaks, the others go on without
    it once it has ended, or has kept them waiting for comm_timeout_s.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Any,
        opt: DistributedOptimizer | Sequence[DistributedOptimizer],
        policy: BasePolicy | Hook | None = None,
        *,
        scheduler: Any = None,
        scheduler_interval: Interval = "step",
        weight_fn: WeightFunction | None = None,
        several_backwards: bool = False,
        collate_fn: Collate | None = None,
        worker_init_fn: Callable[[int], object] | None = None,
        **settings: Unpack[LoopSettings],
    ) -> None:
        """Arguments and settings as kf.fit's, with the same errors, but for those of loss and evaluation.

        scheduler, scheduler_interval: a torch scheduler is either given here, and stepped here, or stepped by the
        loop's body; the latter not in a job whose workers may change.
        opt: or a list of several that step one after the other in each body, as a GAN's do, the first one in every
            body; `model` has the parameters of all. See docs/promises.md.
        several_backwards: a micro-batch has several losses with a backward each: see opt.micro_batch.
        """
        given = training_data(data, collate_fn, worker_init_fn)
        self._trainer, self._output = _trainer(
            "kf.DataLoader",
            model,
            opt,
            given,
            resolved("kf.DataLoader", LoopSettings, {**given.of_loader, **settings}),
            scheduler,
            scheduler_interval,
            policy=policy,
            objective=Objective(weight_fn=weight_fn),
            user_loop=True,
            several_backwards=several_backwards,
        )
        _log_remarks(given, self._trainer.settings, settings)
        self._begun = False

    def __iter__(self) -> Iterator[Step]:
        """Raises RuntimeError the second time: a loader is one run, over all of its epochs."""
        if self._begun:
            raise RuntimeError(
                "this kf.DataLoader has been iterated over: one goes through all of its epochs= and ends. For "
                "several epochs pass epochs= and iterate once; for another training make a new one"
            )
        self._begun = True
        return self._steps()

    def _steps(self) -> Iterator[Step]:
        with self._output.recorded():
            yield from self._trainer.steps()

    def state_dict(self) -> dict[str, Any]:
        """As `kf.state_dict`, of this training; also when it is over."""
        return self._trainer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `kf.load_state_dict`, for this training."""
        self._trainer.recovery.begin_from(state)

    def __len__(self) -> int:
        """Steps of this training, those done included, if the batch size stays as it is.

        Raises TypeError where the number of samples is unknown and `steps` was not given.
        """
        trainer = self._trainer
        return trainer.progress.planned_steps(trainer.settings, trainer.samples_an_epoch)

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return self._trainer.progress.epoch

    @property
    def step(self) -> int:
        """Steps completed: within the loop's body, the number of the step, from 0."""
        return self._trainer.progress.step


def _trainer(
    caller: str,
    model: nn.Module,
    opt: Any,
    given: TrainingData,
    values: Mapping[str, Any],
    scheduler: Any,
    interval: Interval,
    *,
    policy: BasePolicy | Hook | None,
    heldout: Dataset | None = None,
    **more: Any,
) -> tuple[Trainer, Output]:
    """Returns a script's training, and its files and display. values: the settings. more: fields of `TrainArguments`.

    Raises TypeError for an optimizer that is not kfuse's and a model that is no nn.Module, or is wrapped; ValueError
    for a scheduler left out.
    """
    policy = policy.policy if isinstance(policy, Hook) else policy
    if policy is not None and not isinstance(policy, BasePolicy):
        raise TypeError(f"{caller} takes policy= a kf.BasePolicy, not {type(policy).__name__}")
    user_loop, session = more.get("user_loop", False), current()
    opts = _optimizers(caller, opt, user_loop)
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{caller}: model must be an nn.Module, got {type(model).__name__}; of several make one: "
            "nn.ModuleList([a, b])"
        )
    refuse_wrapped(model, in_replica=session.replica is not None)
    schedule = None if scheduler is None else UserSchedule(scheduler, interval, opts, heldout is not None)
    if any(has_scheduler(each, schedule) for each in opts) and (session.elastic or not user_loop):
        raise ValueError(
            "a torch scheduler was made for this optimizer: kf.fit would not step it, and in an elastic job a worker "
            "that joins would not have its state: pass it as scheduler= and do not step it yourself"
        )
    output = Output(session, values)
    ledger = session.link.job.get("observe", {}).get("ledger", False)  # of the run directory that a supervisor keeps
    values = {**values, "observe_ledger": ledger or values["observe_ledger"]}
    settings: Any = completed(resolved(caller, TrainSettings, values), session.part[1])
    arguments = TrainArguments(
        model,
        given.data,
        tuple(opts),
        settings,
        worker_init_fn=given.worker_init_fn,
        policy=policy or BasePolicy(),
        scheduler=schedule,
        heldout=heldout,
        checkpoints=output.checkpoints,
        saved_model=output.saved_model,
        report=output.report if output.keeps else ignore,
        **more,
    )
    return assemble(arguments), output


def _optimizers(caller: str, given: Any, user_loop: bool) -> Sequence[DistributedOptimizer]:
    """Raises TypeError for what is not a kfuse optimizer, ValueError for none, for one given twice, and for several
    without a loop of the user's.
    """
    opts = list(given) if isinstance(given, list | tuple) else [given]
    for each in opts:
        if not isinstance(each, DistributedOptimizer):
            raise TypeError(
                f"{caller} takes a kfuse optimizer (kf.Optimizer wraps any), not {type(each).__name__}. Of several "
                "that one loss trains make one: kf.Optimizer(a, b)"
            )
    if not opts or len(set(map(id, opts))) < len(opts):
        raise ValueError(f"{caller}: opt has {len(opts)} optimizers: must be one, or several different ones")
    if len(opts) > 1 and not user_loop:
        raise ValueError(
            f"{caller} takes one optimizer: several with a loss each, as a GAN's, need kf.DataLoader, and a pass for "
            "each (step.micro_batches); several with one loss are one, kf.Optimizer(a, b)"
        )
    return opts


def _log_remarks(given: TrainingData, used: TrainSettings, settings: Mapping[str, Any]) -> None:
    """Logs what the user must know of the data, and of a micro-batch that was not given."""
    session, remarks = current(), list(given.remarks)
    several = session.elastic or session.group.size > 1
    if "batch_size" in given.of_loader and "batch_size" not in settings and several:
        size = given.of_loader["batch_size"]
        remarks.insert(0, f"batch_size={size} of the DataLoader is taken as the global batch, of all workers together")
    micro, size = used["micro_batch"] or 1, used["batch_size"]
    if settings.get("micro_batch") is None and micro < size // session.group.size:
        remarks.insert(
            0,
            f"a forward sees {micro} of the batch's {size} samples, and so do BatchNorm and losses across samples: "
            "pass micro_batch= to choose how many (the noise scale needs two micro-batches a step)",
        )
    log_remarks(remarks)
