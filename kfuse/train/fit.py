"""`kf.fit`: the training loop for a researcher's own model, data and policy."""

from __future__ import annotations

import operator
from typing import Any

from torch import nn

from kfuse.data import Dataset, as_dataset
from kfuse.optim import DistributedOptimizer, refuse_wrapped
from kfuse.optim.base import check_clip_norm
from kfuse.policies import BasePolicy
from kfuse.policies.signals import BATCH_MAX, Bounds
from kfuse.session import current
from kfuse.train.coordinator import Coordinator
from kfuse.train.loop import Loop, LossFunction
from kfuse.train.loss import default_loss
from kfuse.train.lr_schedule import Decay, LRSchedule, Scaling
from kfuse.train.progress import Settings
from kfuse.train.user_schedule import Interval, UserSchedule, has_scheduler


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
    run = plan_run(
        model,
        train,
        opt,
        hook.policy if hook is not None else BasePolicy(),
        epochs=epochs,
        steps=steps,
        batch_size=batch_size,
        micro_batch=micro_batch,
        max_batch_size=max_batch_size,
        lr_scaling=lr_scaling,
        warmup_steps=warmup_steps,
        decay=decay,
        scheduler=scheduler,
        scheduler_interval=scheduler_interval,
        clip_norm=clip_norm,
        seed=seed,
        eval_every=eval_every,
        target_accuracy=target_accuracy,
        precision=precision,
    )
    return Loop(run, loss_fn, None if heldout is None else as_dataset(heldout)).run()


def plan_run(
    model: nn.Module,
    train: Dataset,
    opt: DistributedOptimizer,
    policy: BasePolicy,
    *,
    epochs: int | None,
    steps: int | None,
    batch_size: int,
    micro_batch: int | None,
    max_batch_size: int | None,
    lr_scaling: Scaling,
    warmup_steps: int,
    decay: Decay,
    scheduler: Any,
    scheduler_interval: Interval,
    clip_norm: float | None,
    seed: int,
    eval_every: int | None = None,
    target_accuracy: float | None = None,
    precision: str = "fp32",
) -> Coordinator:
    """The coordinator of a run in a user's script: kf.fit's and kf.DataLoader's arguments, checked."""
    if not isinstance(opt, DistributedOptimizer):
        raise TypeError(f"kf.fit takes a kfuse optimizer (kf.Optimizer wraps any), not {type(opt).__name__}")
    refuse_wrapped(model)
    batch_size, seed = _whole("batch_size", batch_size), _whole("seed", seed)
    micro_batch = None if micro_batch is None else _whole("micro_batch", micro_batch)
    max_batch_size = None if max_batch_size is None else _whole("max_batch_size", max_batch_size)
    epochs = None if epochs is None else _whole("epochs", epochs)
    steps = None if steps is None else _whole("steps", steps)
    eval_every = None if eval_every is None else _whole("eval_every", eval_every)
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: must be at least 1")
    micro_batch = max(1, batch_size // 4) if micro_batch is None else micro_batch
    if not 1 <= micro_batch <= batch_size:
        raise ValueError(f"micro_batch={micro_batch}: allowed is 1 to batch_size={batch_size}")
    max_batch_size = min(64 * batch_size, BATCH_MAX) if max_batch_size is None else max_batch_size
    if not batch_size <= max_batch_size <= BATCH_MAX:
        raise ValueError(f"max_batch_size={max_batch_size}: allowed is batch_size={batch_size} to {BATCH_MAX}")
    if precision not in ("fp32", "bf16"):
        raise ValueError(f"precision={precision!r}: allowed are fp32, bf16")
    for name, value, least in (("epochs", epochs, 0), ("steps", steps, 0), ("eval_every", eval_every, 1)):
        if value is not None and value < least:
            raise ValueError(f"{name}={value}: must be at least {least}")
    if target_accuracy is not None and not 0 < target_accuracy <= 1:
        raise ValueError(f"target_accuracy={target_accuracy}: must be above 0 and at most 1")
    check_clip_norm(clip_norm)
    epochs = 1 if epochs is None and steps is None else epochs
    lengths = [steps, None if epochs is None else epochs * len(train) / batch_size]
    session = current()
    if session.elastic and scheduler is None and has_scheduler(opt):
        raise ValueError(
            "a torch scheduler was made for this optimizer: in an elastic job pass it as scheduler= and do not step it "
            "yourself, so that workers that join have its state and a step that is redone counts once"
        )
    bounds = Bounds(
        batch_min=micro_batch,
        batch_max=max_batch_size,
        workers_min=1,
        workers_max=2**20,  # the supervisor, if there is one, has the job's own limits
    )
    return Coordinator(
        model,
        train,
        opt,
        session=session,
        policy=policy,
        schedule=LRSchedule(
            scaling=lr_scaling,
            warmup_steps=warmup_steps,
            decay=decay,
            base_batch_size=batch_size,
            total=min(length for length in lengths if length is not None),
        ),
        settings=Settings(
            batch_size,
            micro_batch,
            bounds,
            epochs=epochs,
            steps=steps,
            target_accuracy=target_accuracy,
            eval_every=eval_every,
            precision=precision,
            seed=seed,
        ),
        user_schedule=None if scheduler is None else UserSchedule(scheduler, scheduler_interval, opt),
        clip_norm=clip_norm,
    )


def _whole(name: str, value: Any) -> int:
    """The value as an int, also of a float such as 1e3. Raises TypeError for what is no whole number."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}={value!r}: must be a whole number")
    return operator.index(value)
