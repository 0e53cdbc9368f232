"""`kf.fit`: the training loop for a researcher's own model, data and policy."""

from __future__ import annotations

from typing import Any

from torch import nn

from kfuse.coordinator import Coordinator
from kfuse.data import Dataset, as_dataset
from kfuse.loop import Loop, LossFunction
from kfuse.lr import LRSchedule
from kfuse.objective import default_loss
from kfuse.optim import DistributedOptimizer
from kfuse.policies import BasePolicy
from kfuse.position import Settings
from kfuse.session import current
from kfuse.signals import Bounds


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
    epochs: int = 1,
    batch_size: int = 32,
    micro_batch: int | None = None,
    max_batch_size: int | None = None,
    loss_fn: LossFunction = default_loss,
    heldout: Any = None,
    seed: int = 0,
    precision: str = "fp32",
) -> dict[str, Any] | None:
    """Trains `model` on `data` and returns a summary (None on a worker that left before the end).

    data, heldout: (x, y) tensors or arrays, a map-style torch dataset, or a kfuse one; heldout is evaluated after
    each epoch. batch_size: samples in an optimizer step, over all workers. micro_batch: samples in one forward and
    backward; default a quarter of the batch, so that the noise scale is known on one worker too. max_batch_size: the
    limit for policies; default 64 times the batch. loss_fn(output, target): the MEAN loss over a micro-batch.
    Raises TypeError for an optimizer that is not kfuse's or data of an unknown kind, ValueError for sizes out of range.
    """
    if hook is not None and not isinstance(hook, Hook):
        raise TypeError(f"kf.fit takes kf.Hook(policy), not {type(hook).__name__}")
    train = as_dataset(data)
    run = plan_run(
        model,
        train,
        opt,
        hook.policy if hook is not None else BasePolicy(),
        batch_size=batch_size,
        micro_batch=micro_batch,
        max_batch_size=max_batch_size,
        epochs=epochs,
        seed=seed,
        precision=precision,
    )
    return Loop(run, train, loss_fn, None if heldout is None else as_dataset(heldout)).run()


def plan_run(
    model: nn.Module,
    train: Dataset,
    opt: DistributedOptimizer,
    policy: BasePolicy,
    *,
    batch_size: int,
    micro_batch: int | None,
    max_batch_size: int | None,
    epochs: int,
    seed: int,
    precision: str = "fp32",
) -> Coordinator:
    """The coordinator of a run in a user's script: kf.fit's and kf.DataLoader's arguments, checked."""
    if not isinstance(opt, DistributedOptimizer):
        raise TypeError(f"kf.fit takes a kfuse optimizer (kf.Optimizer wraps any), not {type(opt).__name__}")
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: must be at least 1")
    micro_batch = max(1, batch_size // 4) if micro_batch is None else micro_batch
    if not 1 <= micro_batch <= batch_size:
        raise ValueError(f"micro_batch={micro_batch}: allowed is 1 to batch_size={batch_size}")
    max_batch_size = 64 * batch_size if max_batch_size is None else max_batch_size
    if max_batch_size < batch_size:
        raise ValueError(f"max_batch_size={max_batch_size}: allowed is at least batch_size={batch_size}")
    if precision not in ("fp32", "bf16"):
        raise ValueError(f"precision={precision!r}: allowed are fp32, bf16")
    if epochs < 0:
        raise ValueError(f"epochs={epochs}: must be at least 0")
    base_lr = next((float(group["lr"]) for group in opt.param_groups if group["lr"]), 0.0)  # others keep their ratio
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
        session=current(),
        policy=policy,
        schedule=LRSchedule(base=base_lr, base_batch_size=batch_size),
        settings=Settings(batch_size, micro_batch, bounds, epochs=epochs, precision=precision, seed=seed),
    )
