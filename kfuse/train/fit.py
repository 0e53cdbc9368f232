"""`kf.fit`: the training loop for a researcher's own model, data and policy."""

from __future__ import annotations

from typing import Any

from torch import nn

from kfuse.data import as_dataset
from kfuse.optim import DistributedOptimizer, refuse_wrapped
from kfuse.policies import BasePolicy
from kfuse.session import current
from kfuse.train.evaluation import default_loss
from kfuse.train.lr_schedule import Decay, Interval, Scaling, UserSchedule, has_scheduler
from kfuse.train.settings import user_settings
from kfuse.train.trainer import LossFunction, Trainer


class Hook:
    """Attaches a policy to `kf.fit`."""

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
    batch_size: int = 32,
    micro_batch: int | None = None,
    max_batch_size: int | None = None,
    lr_scaling: Scaling = "sqrt",
    warmup_steps: int = 0,
    decay: Decay = "none",
    scheduler: Any = None,
    scheduler_interval: Interval = "step",
    clip_norm: float | None = None,
    loss_fn: LossFunction = default_loss,
    heldout: Any = None,
    eval_every: int | None = None,
    target_accuracy: float | None = None,
    seed: int = 0,
    precision: str = "fp32",
) -> dict[str, Any] | None:
    """Trains `model` on `data` and returns a summary (None on a worker that left before the end).

    data, heldout: (x, y) tensors or arrays, a map-style torch dataset, or a kfuse one. heldout is evaluated every
    `eval_every` steps, by default after each epoch; training ends once its accuracy reaches `target_accuracy`.
    epochs, steps: how far to go, whichever ends first; by default one epoch.
    batch_size: samples in an optimizer step, over all workers. micro_batch: samples in one forward and backward;
    default a quarter of the batch, so that the noise scale is known on one worker too. max_batch_size: the limit for
    policies; default 64 times the batch.
    The learning rate is the optimizer's own, which kfuse never writes. An update multiplies it by what follows a
    changed batch size (`lr_scaling`: none, linear, sqrt, adascale), by a warm-up over `warmup_steps`, by `decay` (none,
    or cosine to zero at the end) and by the policy's lr_scale. warmup_steps and the cosine count steps of the first
    batch size: where `steps` ends the run and the batch has grown, the cosine is at zero before that.
    scheduler: a torch scheduler made for `opt`, stepped here after each step, or each epoch (`scheduler_interval`).
    clip_norm: largest norm of the mean gradient in this training; None: as the optimizer was made. seed: of data order
    and dropout; a second training with the same seed has the same order and the same dropout.
    Puts the model into training mode, unless it is: then modules that you put into eval mode stay so.
    loss_fn(output, target): the MEAN loss over a micro-batch.
    All workers start from rank 0's model and optimizer, and from rank 0's scheduler.
    Raises TypeError for an optimizer that is not kfuse's, data of an unknown kind or a count that is no whole number,
    ValueError for what is out of range and for a model that cannot be trained so.
    """
    if hook is not None and not isinstance(hook, Hook):
        raise TypeError(f"kf.fit takes kf.Hook(policy), not {type(hook).__name__}")
    train = as_dataset(data)
    if target_accuracy is not None and heldout is None:
        raise ValueError(f"target_accuracy={target_accuracy}: pass heldout=, whose accuracy it is")
    if scheduler is None and isinstance(opt, DistributedOptimizer) and has_scheduler(opt):
        raise ValueError(
            "a torch scheduler was made for this optimizer, and kf.fit would not step it: pass scheduler=, or make a "
            "new optimizer to train without it"
        )
    check_arguments("kf.fit", model, opt, scheduler)
    settings = user_settings(
        batch_size=batch_size,
        micro_batch=micro_batch,
        max_batch_size=max_batch_size,
        epochs=epochs,
        steps=steps,
        seed=seed,
        eval_every=eval_every,
        lr_scaling=lr_scaling,
        warmup_steps=warmup_steps,
        decay=decay,
        clip_norm=clip_norm,
        target_accuracy=target_accuracy,
        precision=precision,
    )
    trainer = Trainer(
        model,
        train,
        opt,
        settings,
        policy=None if hook is None else hook.policy,
        scheduler=None if scheduler is None else UserSchedule(scheduler, scheduler_interval, opt),
        loss_fn=loss_fn,
        heldout=None if heldout is None else as_dataset(heldout),
    )
    return trainer.run()


def check_arguments(caller: str, model: nn.Module, opt: Any, scheduler: Any) -> None:
    """Raises TypeError for an optimizer that is not kfuse's, ValueError for a wrapped model or a scheduler left out."""
    if not isinstance(opt, DistributedOptimizer):
        raise TypeError(f"{caller} takes a kfuse optimizer (kf.Optimizer wraps any), not {type(opt).__name__}")
    refuse_wrapped(model)
    if current().elastic and scheduler is None and has_scheduler(opt):
        raise ValueError(
            "a torch scheduler was made for this optimizer: in an elastic job pass it as scheduler= and do not step it "
            "yourself, so that workers that join have its state and a step that is redone counts once"
        )
