"""`kf.fit`, the training loop for a script's own model, data and policy, and `kf.DataLoader`, for a loop of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from kfuse.data.dataset import Collate
from kfuse.data.given import TrainingData, heldout_data, training_data
from kfuse.optim import DistributedOptimizer, refuse_wrapped
from kfuse.policies import BasePolicy
from kfuse.session import current
from kfuse.train.evaluation import Metric
from kfuse.train.loss import LossFunction, Objective, StepFunction, WeightFunction
from kfuse.train.lr_schedule import Decay, Interval, Scaling, UserSchedule, has_scheduler
from kfuse.train.model_checks import log_remarks
from kfuse.train.output import Output
from kfuse.train.precision import check_parameters
from kfuse.train.settings import Settings, user_loading, user_settings
from kfuse.train.step import Step
from kfuse.train.trainer import Trainer


class Hook:
    """Attaches a policy to `kf.fit`. An error that the policy raises ends training, on all workers."""

    def __init__(self, policy: BasePolicy) -> None:
        """Raises TypeError for what is not a policy."""
        if not isinstance(policy, BasePolicy):
            raise TypeError(f"kf.Hook takes a kf.BasePolicy, not {type(policy).__name__}")
        self.policy = policy


def fit(
    model: nn.Module,
    data: Any,
    opt: DistributedOptimizer,
    hook: Hook | None = None,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    micro_batch: int | None = None,
    max_micro_batch: int | None = None,
    max_batch_size: int | None = None,
    seed: int = 0,
    lr_scaling: Scaling = "sqrt",
    warmup_steps: int = 0,
    decay: Decay = "none",
    decay_fraction: float = 0.1,
    change_warmup_steps: int = 0,
    scheduler: Any = None,
    scheduler_interval: Interval = "step",
    clip_norm: float | None = None,
    loss_fn: LossFunction | None = None,
    step_fn: StepFunction | None = None,
    weight_fn: WeightFunction | None = None,
    precision: str = "fp32",
    heldout: Any = None,
    metrics: Mapping[str, Metric] | None = None,
    eval_every: int | None = None,
    target_accuracy: float | None = None,
    collate_fn: Collate | None = None,
    num_workers: int | None = None,
    prefetch_factor: int | None = None,
    pin_memory: bool | None = None,
    worker_init_fn: Callable[[int], object] | None = None,
    persistent_workers: bool = True,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    keep: int = 3,
    resume: str | os.PathLike[str] = "never",
    run_dir: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
    save_model: bool | None = None,
) -> dict[str, Any] | None:
    """Trains `model` on `data`; returns what summary.json holds (None on a worker that left before the end).

    All workers start from rank 0's model, optimizer and scheduler. A model in eval mode is put into training mode; one
    in training mode is left as it is, so modules of it that you put into eval mode stay so.

    What is trained

    model: not wrapped (no DistributedDataParallel, no FSDP), on this worker's device.
    data: tensors or arrays (x, y), a dictionary of them, a map-style torch data set or a kfuse one. Or a stream (a
        `kfuse.data.Source` or a torch IterableDataset), with `steps`, as it has no epochs. Or a torch DataLoader of
        shuffle=True: its data set, collate_fn and loading are taken where these are not arguments here, and its
        batch_size becomes the global one. docs/data.md has the details.
    opt: a kfuse optimizer of the model's parameters.
    hook: `kf.Hook(policy)`.

    Length and order

    epochs, steps: how far to go, whichever ends first. By default one epoch. With lr_scaling="adascale" `steps` are
        scale-invariant ones: each step counts by its gain, which is 1 at the first batch size, and more above it.
    batch_size: samples of an optimizer step, over all workers. Default: that of a DataLoader, else 32.
    micro_batch: samples of one forward and backward. Default: a quarter of the batch, so that the noise scale is known
        on one worker too. Where it is above batch_size / workers, some workers have nothing to do. The same number on
        all workers.
    max_micro_batch: where a policy has made the batch larger, its micro-batches get larger too, up to this, a multiple
        of micro_batch: fewer and larger passes, which take less time, and more memory. A full step of a batch
        that is at least the first one has at least as many micro-batches as the first step. Default: they stay as they
        are.
    max_batch_size: the limit for policies. Default: 64 times the batch.
    seed: of data order, augmentation and dropout. A second training with the same seed has the same ones.

    Learning rate

    The rate is the optimizer's own, group["lr"], which kfuse never writes. An update multiplies it by the factors of
    `lr_scaling`, `warmup_steps` and `decay`, and by the policy's lr_scale.

    lr_scaling: none, linear, sqrt or adascale: how the rate follows a batch size that policies change.
    warmup_steps: length of the linear warm-up, in steps of the first batch size.
    decay: none (or constant), cosine, linear, or wsd (constant until the last `decay_fraction` of the run). All but
        none reach zero at the end of the run, also where the batch size changes: they follow the part of the run's
        samples that is used (epochs), or of its steps (steps).
    change_warmup_steps: after a change of the batch size that raises the rate, it rises linearly over so many steps of
        the first batch size. A change that lowers the rate counts at once.
    scheduler: a torch scheduler made for `opt`, stepped here after each optimizer step, or after each epoch:
        scheduler_interval, "step" or "epoch". It sets group["lr"], which the factors above multiply.
    clip_norm: largest norm of the mean gradient in this training. None: as the optimizer was made.

    Loss

    A batch is what `collate_fn` makes of samples: any nested structure of tensors and plain values.

    loss_fn(output, target): the MEAN loss over a micro-batch, where a batch is a pair (input, target). The model is
        called `model(input)`, `model(*input)` for a tuple or list, `model(**input)` for a mapping. Default: cross
        entropy for integer targets, mean squared error for floating ones.
    step_fn(model, batch): instead of loss_fn, for any batch. It returns the MEAN loss, or (loss, {name: number}) with
        the same names each time, at most 16. These figures are averaged like the loss, over the step's samples and
        workers, in the gradients' own messages, and written to metrics.jsonl as `figures`. Evaluation calls it too,
        without gradients and in eval mode.
    Neither, and batches that are mappings: `model(**batch)`, whose output has the loss as `.loss` or `["loss"]`, as
        Hugging Face's models have.
    weight_fn(batch): the weight of a micro-batch in the step's mean gradient and mean loss, a number above 0, such as
        its target tokens. Default: its samples. It gets the batch as it was fetched, on the CPU. Held-out loss, figures
        and metrics that are scalars are weighted likewise. Gradients are scaled after the reduction, by one more pass
        over them. Statistics stay in units of samples: docs/promises.md.
    precision: fp32: forward in the parameters' own types. bf16: forward and loss under autocast to bfloat16. bf16-true:
        the model's matrices are bf16 already, by `model.to(torch.bfloat16)` before the optimizer was made, and its
        floating-point inputs are cast to bf16: docs/convert.md.

    Evaluation

    heldout: data as above, but no stream. Its batches must be like those of `data`: `collate_fn` below makes both,
        while a DataLoader's own one makes the batches of that DataLoader only.
    metrics: {name: function(output, target)}, evaluated on heldout in batches of 256 samples. A function returns a
        tensor [B], a value for each sample, or a scalar, the batch's mean; where the model computes the loss itself,
        `target` is the whole batch. The means over all samples are in the summary, as `eval_metrics`, and in the
        evaluation's event, beside the figures of step_fn. A scalar that is not a mean over samples (F1) becomes the
        mean over the batches.
    eval_every: steps between evaluations. None: one after each epoch. There is one at the end, too.
    target_accuracy: training ends once an evaluation reaches it. Above 0, at most 1.

    Loading: named as the arguments of torch's DataLoader. Where one is None, that of a DataLoader given as `data` is
    taken, else the default here. docs/data.md has the details.

    collate_fn(samples): makes a batch of a list of samples. Default: torch's default_collate.
    num_workers: loader processes of each training worker, which fetch its micro-batches ahead. 0, the default: none.
        Parameters have the same bits with any number. They are forked when training begins.
    prefetch_factor: micro-batches that each of them fetches ahead. Default: 2.
    pin_memory: on CUDA, copy batches from pinned memory; with loader processes on a stream of its own. Default: True.
    worker_init_fn(number): called first in each loader process.
    persistent_workers: must be True: they live until training ends.

    Files and display: docs/checkpoints.md has the details.

    checkpoint: a folder for checkpoints. None: none are written.
    checkpoint_every: steps between them. None: one after each epoch. One more is written at the end.
    keep: how many of the newest are kept.
    resume: "never"; "auto": from the newest good one in `checkpoint`, if there is one; or from a path. The bits are
        those of a training that was not interrupted.
    run_dir: a new folder (or that of the training that is resumed) for metrics.jsonl, events.jsonl, summary.json and
        TensorBoard's files, which rank 0 writes. Under kfuse-run the job's own run directory is used instead.
    progress: show the training. None: on a terminal only. Under kfuse-run its own display does so.
    save_model: write model.pt and, where safetensors is installed, model.safetensors at the end, and best.pt whenever
        an evaluation is the best so far (by accuracy where it is known, else by loss), to run_dir, else to the folder
        of the checkpoints. None: where there is such a folder.

    Raises TypeError for an optimizer that is not kfuse's, data of an unknown kind or a count that is no whole number,
    ValueError for what is out of range and for a model that cannot be trained so.
    """
    if hook is not None and not isinstance(hook, Hook):
        raise TypeError(f"kf.fit takes kf.Hook(policy), not {type(hook).__name__}")
    objective = Objective(loss_fn, step_fn, weight_fn)
    given = training_data(data, collate_fn, batch_size, num_workers, prefetch_factor, pin_memory, worker_init_fn)
    if target_accuracy is not None and heldout is None:
        raise ValueError(f"target_accuracy={target_accuracy}: pass heldout=, whose accuracy it is")
    if target_accuracy is not None and step_fn is not None:
        raise ValueError(f"target_accuracy={target_accuracy}: needs loss_fn=; a step function gives no accuracy")
    if scheduler is None and isinstance(opt, DistributedOptimizer) and has_scheduler(opt):
        raise ValueError(
            "a torch scheduler was made for this optimizer, and kf.fit would not step it: pass scheduler=, or make a "
            "new optimizer to train without it"
        )
    _check_arguments("kf.fit", model, opt, scheduler)
    check_parameters(model, precision)
    settings = user_settings(
        batch_size=given.batch_size,
        micro_batch=micro_batch,
        max_micro_batch=max_micro_batch,
        max_batch_size=max_batch_size,
        epochs=epochs,
        steps=steps,
        seed=seed,
        eval_every=eval_every,
        lr_scaling=lr_scaling,
        warmup_steps=warmup_steps,
        decay=decay,
        decay_fraction=decay_fraction,
        change_warmup_steps=change_warmup_steps,
        clip_norm=clip_norm,
        target_accuracy=target_accuracy,
        precision=precision,
        loading=user_loading(given, persistent_workers),
    )
    if eval_every is not None and heldout is None:
        raise ValueError(f"eval_every={eval_every}: pass heldout=, which is evaluated")
    output = Output(
        current(),
        checkpoint=checkpoint,
        checkpoint_every=checkpoint_every,
        keep=keep,
        resume=resume,
        run_dir=run_dir,
        progress=progress,
        save_model=save_model,
    )
    trainer = Trainer(
        model,
        given.data,
        opt,
        settings,
        policy=None if hook is None else hook.policy,
        scheduler=None if scheduler is None else UserSchedule(scheduler, scheduler_interval, opt, heldout is not None),
        objective=objective,
        heldout=None if heldout is None else heldout_data(heldout, collate_fn),
        metrics=metrics,
        output=output,
    )
    _log_remarks(given, model, micro_batch, settings)
    with output.recorded():
        return trainer.run()


class DataLoader:
    """Yields the steps of a run; a step yields this worker's micro-batches, already wrapped in opt.micro_batch.

        for step in kf.DataLoader(data, model, opt, batch_size=64, epochs=3):
            for x, y in step:
                F.cross_entropy(model(x), y).backward()      # the MEAN loss of these samples
            opt.step()
            opt.zero_grad()

    A micro-batch has whatever structure the data set's batches have. `len(step)` is the number of this worker's;
    `step.number` and `step.epoch` count from 0. Set `step.loss` to the mean loss of a micro-batch, in its body, to have
    the step's mean loss over all workers in `opt.stats.loss` and in metrics.jsonl.

    Workers may join and leave between steps. Where one is lost, `opt.step()` does nothing and the step comes again,
    with the lost worker's micro-batches spread over the rest: the loop's body must be able to run twice for one step.
    The random state is keyed by (seed, step, micro-batch), and for fetching data by (seed, epoch, index). On a worker
    that is asked to leave, iteration ends and `kf.rank()` is -1.
    All workers may `break` at the same step: that ends this training. Where one alone breaks, the others go on without
    it once it has ended, or has kept them waiting for the timeout of kf.init.
    """

    def __init__(
        self,
        data: Any,
        model: nn.Module,
        opt: DistributedOptimizer,
        *,
        policy: BasePolicy | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        batch_size: int | None = None,
        micro_batch: int | None = None,
        max_micro_batch: int | None = None,
        max_batch_size: int | None = None,
        seed: int = 0,
        lr_scaling: Scaling = "sqrt",
        warmup_steps: int = 0,
        decay: Decay = "none",
        decay_fraction: float = 0.1,
        change_warmup_steps: int = 0,
        scheduler: Any = None,
        scheduler_interval: Interval = "step",
        clip_norm: float | None = None,
        weight_fn: WeightFunction | None = None,
        several_backwards: bool = False,
        collate_fn: Collate | None = None,
        num_workers: int | None = None,
        prefetch_factor: int | None = None,
        pin_memory: bool | None = None,
        worker_init_fn: Callable[[int], object] | None = None,
        persistent_workers: bool = True,
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        keep: int = 3,
        resume: str | os.PathLike[str] = "never",
        run_dir: str | os.PathLike[str] | None = None,
        progress: bool | None = None,
        save_model: bool | None = None,
    ) -> None:
        """Arguments as kf.fit's, in the same order and with the same errors, but for those of loss and evaluation.

        What is trained: data, model, opt. policy: a kf.BasePolicy; kf.fit takes it as `kf.Hook(policy)`.
        Length and order: epochs, steps, batch_size, micro_batch, max_micro_batch, max_batch_size, seed.
        Learning rate: lr_scaling, warmup_steps, decay, decay_fraction, change_warmup_steps, clip_norm.
        scheduler, scheduler_interval: a torch scheduler is either given here, and stepped here, or stepped by the
        loop's body; the latter not in a job whose workers may change.
        Loss: the loop's body computes it. weight_fn. several_backwards: a micro-batch has several losses with a
        backward each: see opt.micro_batch.
        Loading: collate_fn, num_workers, prefetch_factor, pin_memory, worker_init_fn, persistent_workers.
        Files and display: checkpoint, checkpoint_every, keep, resume, run_dir, progress, save_model.
        """
        if policy is not None and not isinstance(policy, BasePolicy):
            raise TypeError(f"kf.DataLoader takes policy= a kf.BasePolicy, not {type(policy).__name__}")
        given = training_data(data, collate_fn, batch_size, num_workers, prefetch_factor, pin_memory, worker_init_fn)
        _check_arguments("kf.DataLoader", model, opt, scheduler)
        settings = user_settings(
            batch_size=given.batch_size,
            micro_batch=micro_batch,
            max_micro_batch=max_micro_batch,
            max_batch_size=max_batch_size,
            epochs=epochs,
            steps=steps,
            seed=seed,
            lr_scaling=lr_scaling,
            warmup_steps=warmup_steps,
            decay=decay,
            decay_fraction=decay_fraction,
            change_warmup_steps=change_warmup_steps,
            clip_norm=clip_norm,
            loading=user_loading(given, persistent_workers),
        )
        schedule = None if scheduler is None else UserSchedule(scheduler, scheduler_interval, opt, evaluates=False)
        self._output = Output(
            current(),
            checkpoint=checkpoint,
            checkpoint_every=checkpoint_every,
            keep=keep,
            resume=resume,
            run_dir=run_dir,
            progress=progress,
            save_model=save_model,
        )
        self._trainer = Trainer(
            model,
            given.data,
            opt,
            settings,
            policy=policy,
            scheduler=schedule,
            objective=Objective(weight_fn=weight_fn),
            output=self._output,
            user_loop=True,
            several_backwards=several_backwards,
        )
        _log_remarks(given, model, micro_batch, settings)
        self._begun = False

    def __iter__(self) -> Iterator[Step]:
        """Raises RuntimeError the second time: a loader is one run, over all of its epochs."""
        if self._begun:
            raise RuntimeError(
                "this kf.DataLoader has been iterated over: one goes through all of its epochs= and ends. For several "
                "epochs pass epochs= and iterate once; for another training make a new one"
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
        self._trainer.load_state_dict(state)

    def __len__(self) -> int:
        """Steps of this training, those done included, if the batch size stays as it is.

        Raises TypeError where the number of samples is unknown and `steps` was not given.
        """
        return self._trainer.planned_steps

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return self._trainer.progress.epoch

    @property
    def step(self) -> int:
        """Steps completed: within the loop's body, the number of the step, from 0."""
        return self._trainer.progress.step


def _check_arguments(caller: str, model: nn.Module, opt: Any, scheduler: Any) -> None:
    """Raises TypeError for an optimizer that is not kfuse's, ValueError for a wrapped model or a scheduler left out."""
    if not isinstance(opt, DistributedOptimizer):
        raise TypeError(f"{caller} takes a kfuse optimizer (kf.Optimizer wraps any), not {type(opt).__name__}")
    refuse_wrapped(model)
    if current().elastic and scheduler is None and has_scheduler(opt):
        raise ValueError(
            "a torch scheduler was made for this optimizer: in an elastic job pass it as scheduler= and do not step it "
            "yourself, so that workers that join have its state and a step that is redone counts once"
        )


def _log_remarks(given: TrainingData, model: nn.Module, micro_batch: int | None, settings: Settings) -> None:
    """Logs what the user must know of the data, and of a micro-batch that was not given."""
    session, remarks = current(), given.remarks
    if micro_batch is None and any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in model.modules()):
        remarks = (
            f"BatchNorm normalises over each micro-batch, by default a quarter of the batch: {settings.micro_batch} "
            "samples. Pass micro_batch=",
            *remarks,
        )
    if given.batch_of_loader and (session.elastic or session.group.size > 1):
        remarks = (
            f"batch_size={given.batch_size} of the DataLoader is taken as the global batch, of all workers together: "
            "pass batch_size= for another",
            *remarks,
        )
    log_remarks(remarks)
