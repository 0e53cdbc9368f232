"""`kf.DataLoader`: steps of micro-batches for a training loop of one's own, elastic all the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from kfuse.data import as_dataset
from kfuse.optim import DistributedOptimizer
from kfuse.policies import BasePolicy
from kfuse.train.fit import check_arguments
from kfuse.train.lr_schedule import Decay, Interval, Scaling, UserSchedule
from kfuse.train.settings import user_settings
from kfuse.train.step import Step
from kfuse.train.trainer import Trainer


class DataLoader:
    """Yields the steps of a run; a step yields this worker's micro-batches, already wrapped in opt.micro_batch.

        for step in kf.DataLoader(data, model, opt, batch_size=64, epochs=3):
            for x, y in step:
                F.cross_entropy(model(x), y).backward()      # the MEAN loss of these samples
            opt.step()
            opt.zero_grad()

    Workers may join and leave between steps. Where one is lost, `opt.step()` does nothing and the step comes again,
    with the lost worker's micro-batches spread over the rest: the loop's body must not mind. The random state is keyed
    by (seed, step, micro-batch). On a worker that is asked to leave, iteration ends and `kf.rank()` is -1.
    All workers may `break` at the same step: that ends this training. Where one alone breaks, the others go on without
    it once it has ended, or has kept them waiting for the timeout of kf.init.
    """

    def __init__(
        self,
        data: Any,
        model: nn.Module,
        opt: DistributedOptimizer,
        *,
        batch_size: int = 32,
        micro_batch: int | None = None,
        max_batch_size: int | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        lr_scaling: Scaling = "sqrt",
        warmup_steps: int = 0,
        decay: Decay = "none",
        scheduler: Any = None,
        scheduler_interval: Interval = "step",
        clip_norm: float | None = None,
        seed: int = 0,
        policy: BasePolicy | None = None,
    ) -> None:
        """Arguments as for kf.fit, and the same errors.

        A torch scheduler is either given here, and stepped here, or stepped by the loop's body; the latter not in a job
        whose workers may change.
        """
        if policy is not None and not isinstance(policy, BasePolicy):
            raise TypeError(f"kf.DataLoader takes policy= a kf.BasePolicy, not {type(policy).__name__}")
        train = as_dataset(data)
        check_arguments("kf.DataLoader", model, opt, scheduler)
        settings = user_settings(
            batch_size=batch_size,
            micro_batch=micro_batch,
            max_batch_size=max_batch_size,
            epochs=epochs,
            steps=steps,
            seed=seed,
            lr_scaling=lr_scaling,
            warmup_steps=warmup_steps,
            decay=decay,
            clip_norm=clip_norm,
        )
        schedule = None if scheduler is None else UserSchedule(scheduler, scheduler_interval, opt)
        self._trainer = Trainer(model, train, opt, settings, policy=policy, scheduler=schedule, body_is_users=True)
        self._begun = False

    def __iter__(self) -> Iterator[Step]:
        """Raises RuntimeError the second time: a loader is one run, over all of its epochs."""
        if self._begun:
            raise RuntimeError(
                "this kf.DataLoader has been iterated over: one goes through all of its epochs= and ends. For several "
                "epochs pass epochs= and iterate once; for another training make a new one"
            )
        self._begun = True
        return self._trainer.steps()
