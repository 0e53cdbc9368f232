"""The settings of one training, and the checks of kf.fit's and kf.DataLoader's arguments."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from typing import Any

from kfuse.data.fetching import Loading
from kfuse.data.given import TrainingData
from kfuse.membership import Session
from kfuse.optim import DistributedOptimizer
from kfuse.optim.scaling import check_clip_norm
from kfuse.policies.signals import BATCH_MAX, BasePolicy, Bounds
from kfuse.train.lr_schedule import Decay, LRSchedule, Scaling
from kfuse.train.precision import PRECISIONS
from kfuse.train.refusals import Spelling, refuse_fisher, refuse_modes, refuse_pair_alone, refuse_rates

WORKERS_MAX = 2**20
"""Upper bound of workers for policies where no other is known: the supervisor applies the job's own limits."""


@dataclass(frozen=True)
class Settings:
    """One training's settings; the same on every worker."""

    batch_size: int
    """Samples per optimizer step, over all workers, at the start."""
    micro_batch: int
    """Samples per forward and backward, of a batch of the first size."""
    bounds: Bounds
    max_micro_batch: int | None = None
    """Micro-batches of a larger batch get larger too, up to this: see `micro_batch_of`. None: they stay as they are."""
    epochs: int | None = 1
    steps: int | None = None
    """With `epochs`: whichever ends first. With lr_scaling="adascale" scale-invariant steps: see `LRSchedule`."""
    target_accuracy: float | None = None
    """Training ends once an evaluation reaches it."""
    eval_every: int | None = None
    """In steps; None: after each epoch."""
    lr_scaling: Scaling = "none"
    warmup_steps: int = 0
    decay: Decay = "none"
    decay_fraction: float = 0.1
    """Of the run: the last part of it, in which decay="wsd" lowers the rate."""
    change_warmup_steps: int = 0
    """After a change of the batch size that raises the rate, in steps of the first batch size."""
    clip_norm: float | None = None
    """Largest norm of the mean gradient in this training; None: the optimizer's own."""
    precision: str = "fp32"
    """Of forward and backward: see `kfuse.train.precision`."""
    seed: int = 0
    """Of data order and of the micro-batches' random numbers."""
    base_lr: float | None = None
    """The configured learning rate, which wins over a checkpoint's; None: group["lr"] is the user's."""
    balance: bool = True
    """Give slower workers fewer micro-batches."""
    loading: Loading = field(default_factory=Loading)
    """Loader processes of each worker."""
    ledger: bool = False
    """Report each micro-batch's sample indices."""

    def micro_batch_of(self, batch_size: int, workers: int) -> int:
        """Samples of each micro-batch in a step of `batch_size` samples; the step's last one may have fewer.

        A multiple of `micro_batch`, at most `max_micro_batch`. Of a batch that is at least the first one there are at
        least as many micro-batches as of that one, so that the statistics stay as good; and as many on each worker,
        where whole multiples allow it. workers: 1 where bits may not depend on their number.
        """
        unit, most = self.micro_batch, self.max_micro_batch or self.micro_batch
        count = max(-(-self.batch_size // unit), -(-batch_size // most))
        count = -(-count // workers) * workers
        size = -(-batch_size // (count * unit)) * unit
        if -(-batch_size // size) < count:  # rounded up, too few are left
            size -= unit
        return max(size, unit)

    def shared(self) -> dict[str, Any]:
        """The settings, by name, that must be equal on all workers: each computes its share of a step from them."""
        sizes = ("seed", "batch_size", "micro_batch", "max_micro_batch", "epochs", "steps")
        others = ("eval_every", "target_accuracy", "precision")
        rates = ("lr_scaling", "warmup_steps", "decay", "decay_fraction", "change_warmup_steps")
        values = {name: getattr(self, name) for name in sizes + others + rates}
        return values | {"max_batch_size": self.bounds.batch_max}

    def schedule(self, samples: int | None) -> LRSchedule:
        """The learning rate's schedule over this training, of `samples` an epoch; None: a stream. Raises ValueError."""
        if samples is None and (self.steps is None or self.epochs is not None):
            raise ValueError(
                f"epochs={self.epochs}, steps={self.steps}: a stream has no epochs; pass steps= and no epochs= "
                "(without either, epochs is 1)"
            )
        length = None if self.epochs is None or samples is None else self.epochs * samples
        return LRSchedule(
            self.lr_scaling,
            self.warmup_steps,
            self.decay,
            self.batch_size,
            length,
            self.steps,
            self.decay_fraction,
            self.change_warmup_steps,
        )

    def check(self, policy: BasePolicy, opt: DistributedOptimizer, scheduler: str | None, session: Session) -> None:
        """Raises ValueError where the policy or the optimizer does not go with these settings, or with one another.

        scheduler: as in `refuse_rates`.
        """
        kind, comm = type(opt), session.comm

        def check_mode(mode: str) -> None:
            replace(comm, sync=mode)
            refuse_pair_alone(mode, session.elastic)

        spelling = Spelling(type(policy).__name__, type(getattr(opt, "inner", opt)).__name__)
        refuse_rates(policy, self.lr_scaling, self.decay, scheduler, spelling)
        refuse_fisher(policy, kind, comm.sharded, spelling)
        refuse_pair_alone(comm.sync, session.elastic)
        refuse_modes(policy, check_mode, spelling)


def user_settings(
    *,
    batch_size: int,
    micro_batch: int | None,
    max_batch_size: int | None,
    epochs: int | None,
    steps: int | None,
    seed: int,
    max_micro_batch: int | None = None,
    eval_every: int | None = None,
    **others: Any,
) -> Settings:
    """kf.fit's and kf.DataLoader's arguments, checked, with their defaults; `others` are fields of `Settings`.

    Raises TypeError for a count that is no whole number, ValueError for what is out of range.
    """
    batch_size = whole("batch_size", batch_size, 1)
    micro_batch = max(1, batch_size // 4) if micro_batch is None else whole("micro_batch", micro_batch, 1)
    if micro_batch > batch_size:
        raise ValueError(f"micro_batch={micro_batch}: must be 1 to batch_size={batch_size}")
    most = min(64 * batch_size, BATCH_MAX) if max_batch_size is None else whole("max_batch_size", max_batch_size, 1)
    if not batch_size <= most <= BATCH_MAX:
        raise ValueError(f"max_batch_size={most}: must be batch_size={batch_size} to {BATCH_MAX}")
    settings = Settings(
        batch_size,
        micro_batch,
        Bounds(micro_batch, most, 1, WORKERS_MAX),
        max_micro_batch=_optional("max_micro_batch", max_micro_batch, 1),
        epochs=1 if epochs is None and steps is None else _optional("epochs", epochs, 0),
        steps=_optional("steps", steps, 0),
        eval_every=_optional("eval_every", eval_every, 1),
        seed=whole("seed", seed),
        **others,
    )
    if (largest := settings.max_micro_batch) is not None and largest % micro_batch:
        raise ValueError(f"max_micro_batch={largest}: must be a multiple of micro_batch={micro_batch}")
    if settings.precision not in PRECISIONS:
        raise ValueError(f"precision={settings.precision!r}: must be one of {', '.join(PRECISIONS)}")
    if settings.target_accuracy is not None and not 0 < settings.target_accuracy <= 1:
        raise ValueError(f"target_accuracy={settings.target_accuracy}: must be above 0 and at most 1")
    check_clip_norm(settings.clip_norm)
    return settings


def user_loading(given: TrainingData, persistent_workers: bool) -> Loading:
    """kf.fit's and kf.DataLoader's arguments about loader processes, checked. They are called as torch's DataLoader's.

    Raises TypeError for a wrong type, ValueError for what is out of range.
    """
    workers = whole("num_workers", given.num_workers, 0)
    if not persistent_workers:
        raise ValueError("persistent_workers=False: must be True; loader processes live until training ends")
    worker_init_fn, prefetch_factor = given.worker_init_fn, given.prefetch_factor
    if worker_init_fn is not None and not callable(worker_init_fn):
        raise TypeError(f"worker_init_fn={worker_init_fn!r}: must be a function of the loader process's number")
    if prefetch_factor is not None and not workers:
        raise ValueError(f"prefetch_factor={prefetch_factor}: needs num_workers, at least 1")
    prefetch = 2 if prefetch_factor is None else whole("prefetch_factor", prefetch_factor, 1)
    return Loading(workers, prefetch, bool(given.pin_memory), worker_init_fn)


def _optional(name: str, value: Any, least: int) -> int | None:
    return None if value is None else whole(name, value, least)


def whole(name: str, value: Any, least: int | None = None) -> int:
    """The value as an int, also of a float such as 1e3. Raises TypeError for what is no whole number, ValueError."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}={value!r}: must be a whole number")
    number = operator.index(value)
    if least is not None and number < least:
        raise ValueError(f"{name}={number}: must be at least {least}")
    return number
