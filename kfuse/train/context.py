"""What one training is given and what its parts share, and which trainings are under way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from kfuse.data import Dataset, EpochSampler, Stream, StreamSampler
from kfuse.data.fetching import Fetcher, Loading
from kfuse.data.sources import check_loaders
from kfuse.membership import Session
from kfuse.optim import DistributedOptimizer, carried_states, refuse_parameters_outside, refuse_partial_state
from kfuse.policies import BasePolicy
from kfuse.policies.signals import Bounds
from kfuse.session import current
from kfuse.settings import rules
from kfuse.settings.tree import BATCH_MAX, WORKERS_MAX, TrainSettings, by_key
from kfuse.train.drawing import may_draw
from kfuse.train.learning_rate import LRSchedule, UserSchedule, has_scheduler
from kfuse.train.loss import Metric, Objective
from kfuse.train.output import Output, Reporter
from kfuse.train.progress import Progress

if TYPE_CHECKING:
    from kfuse.checkpoint.manager import Checkpoints, SavedModel
    from kfuse.train.trainer import Trainer

_SECTIONS = ("seed", "batch", "lr", "train")  # of the settings that a training follows
# Those of them that workers may have different values of.
_OWN = ("batch_min", "train_clip_norm", "train_save_model", "lr_base")


def of_training(settings: TrainSettings) -> dict[str, Any]:
    """Returns the settings, by name, that a training follows."""
    return {name: value for name, value in settings.items() if name.partition("_")[0] in _SECTIONS}


def shared(settings: TrainSettings) -> dict[str, Any]:
    """Returns the settings, by name, that must be equal on all workers, as each plans by them."""
    return {name: value for name, value in of_training(settings).items() if name not in _OWN}


@dataclass
class TrainContext:
    """Raises ConfigError or ValueError for settings, data, a policy, an optimizer and a job that do not go together."""

    model: nn.Module
    data: Dataset | Stream
    opt: DistributedOptimizer  # whose statistics and learning rate are the training's
    settings: TrainSettings  # completed
    workers_bounds: tuple[int, int] = (1, WORKERS_MAX)  # the supervisor applies the job's own limits
    worker_init_fn: Callable[[int], object] | None = None  # called first in each loader process
    policy: BasePolicy = field(default_factory=BasePolicy)
    objective: Objective = field(default_factory=Objective)  # how a batch becomes a loss
    scheduler: UserSchedule | None = None  # torch schedulers that training steps
    heldout: Dataset | None = None
    metrics: Mapping[str, Metric] | None = None  # functions (output, target) that are evaluated on `heldout`
    checkpoints: Checkpoints | None = None  # None: none are written or read
    saved_model: SavedModel | None = None  # of the trained model and the best one by evaluation; None: not written
    output: Output | None = None  # a script's own files and display, which get the records too
    user_loop: bool = False  # a step's forward, backward and update are the body of a loop over `Trainer.steps`
    further: tuple[DistributedOptimizer, ...] = ()  # step in the same bodies of a user's loop: see `Passes`
    several_backwards: bool = False  # the user runs several backwards in each micro-batch: see opt.micro_batch
    exits_are_errors: bool = False  # a SystemExit of the model, the data or the policy is an error: no script means it
    session: Session = field(init=False)
    sampler: EpochSampler | StreamSampler = field(init=False)
    bounds: Bounds = field(init=False)  # of what policies may request
    schedule: LRSchedule = field(init=False)
    facts: dict[str, Any] = field(init=False)  # what `kfuse.settings.rules` are asked of
    progress: Progress = field(init=False)
    reporter: Reporter = field(init=False)
    may_draw: bool = field(init=False)  # if not, no forward is seeded

    def __post_init__(self) -> None:
        settings, opt, scheduler = self.settings, self.opt, self.scheduler
        for name, metric in (self.metrics or {}).items():
            if not callable(metric):
                raise TypeError(f"metrics[{name!r}]={metric!r}: must be a function(output, target)")
        if self.heldout is not None and not len(self.heldout):
            raise ValueError("heldout has no samples: must have at least 1, or be left out")
        if isinstance(self.data, Stream):
            self.sampler = StreamSampler(settings["seed"])
        else:
            self.sampler = EpochSampler(len(self.data), settings["seed"], self.data.order)
        if scheduler is not None and "epoch" in scheduler.intervals and self.samples_an_epoch is None:
            raise ValueError("scheduler_interval=epoch: must be step with data=stream (a stream has no epochs)")
        if (streams := self._streams()) is not None:  # the batch stays as it is
            size = settings["batch_size"]
            settings = self.settings = {**settings, "batch_min": size, "batch_max": size}
        self.schedule = LRSchedule.of(settings, self.samples_an_epoch)
        self.bounds = Bounds(settings["batch_min"] or 1, settings["batch_max"] or BATCH_MAX, *self.workers_bounds)
        self.session = current()
        if self.session.elastic or self.session.group.size > 1 or self.session.comm.reproducible:
            _refuse_uneven_embeddings(self.model)
        if self.session.elastic or self.session.group.size > 1 or self.checkpoints is not None:
            refuse_partial_state(self.model)
        if self.session.elastic or self.further:
            for each in self.opts:
                refuse_parameters_outside(self.model, each)
        inner = ", ".join(type(each).__name__ for one in self.opts for each in one.inners or (one,))
        of_loop = "stepped in the loop's body" if any(map(has_scheduler, self.opts)) else None
        self.facts = (
            by_key(of_training(settings))
            | rules.run_facts(self.schedule.total, settings["lr_decay"], settings["lr_decay_fraction"])
            | by_key(self.session.comm.named())
            | {"job": "elastic" if self.session.elastic else "fixed"}
            | rules.policy_facts(self.policy)
            | rules.optimizer_facts(type(opt), inner)
            | {"optimizers": len(self.opts)}
            | {"scheduler": of_loop if scheduler is None else scheduler.name}
            | {"data": "stream" if self.samples_an_epoch is None else "data set"}
            | {"heldout": self.heldout is not None, "step_fn": self.objective.step_fn is not None}
            | {"streams": streams, "weight_fn": self.objective.weight_fn is not None}
            | {"metrics": ", ".join(self.metrics or ()) or None}
        )
        rules.check(self.facts)
        began_with = {
            "batch_size": settings["batch_size"],
            "optimizer": inner.removeprefix("Fused"),
            "seed": settings["seed"],
            "dataset size": self.samples_an_epoch,
        }
        self.progress = Progress(settings["batch_size"], self.session.comm.sync, began_with=began_with)
        self.progress.updates = [0] * len(self.opts) if self.further else []
        self.reporter = Reporter(self.session, settings, self.samples_an_epoch, self.output)
        self.may_draw = may_draw(self)

    @property
    def opts(self) -> tuple[DistributedOptimizer, ...]:
        return (self.opt, *self.further)

    def _streams(self) -> int | None:
        """Returns the streams of the model's `CarriedState`, one sample of each in every step; None: it has none.

        Raises ValueError where they differ, and for data in kfuse's own order or with a shorter last step.
        """
        counts = {len(state) for state in carried_states(self.model)}
        if not counts:
            return None
        if len(counts) > 1:
            raise ValueError(f"CarriedState of {sorted(counts)} streams in one model: must be the same number")
        (streams,), data = counts, self.data
        if isinstance(data, Dataset) and (len(data) % streams or type(data).order is Dataset.order):
            raise ValueError(
                f"CarriedState of {streams} streams: data must have an order of their own, in which each {streams} "
                f"samples are one of each stream: an iterable, or a subclass of kfuse.data.Dataset or MapData with a "
                f"method order(epoch), of a multiple of {streams} samples (docs/data.md)"
            )
        return streams

    @property
    def samples_an_epoch(self) -> int | None:
        """The samples of an epoch; None for a stream."""
        return self.sampler.length

    def refuse_other_length(self) -> None:
        """Raises ValueError where the data set has more or fewer samples than as training began: the order is drawn for
        those.
        """
        if not isinstance(self.data, Stream) and len(self.data) != self.samples_an_epoch:
            raise ValueError(
                f"the data set has {len(self.data)} samples now, and had {self.samples_an_epoch} as training began: "
                "must stay the same; for other lengths take a stream, or train on each data set by itself"
            )

    @contextlib.contextmanager
    def optimizers_prepared(self, presented: bool) -> Iterator[None]:
        """Context: sets up the optimizers for this training; on exit, also by an early Ctrl-C, resets their settings.

        presented: as of `Statistics.begin_run`.
        """
        clip_norm, own = self.settings["train_clip_norm"], [opt.clip_norm for opt in self.opts]
        try:
            for opt in self.opts:
                if clip_norm is not None:
                    opt.set_clip_norm(clip_norm)
                opt.zero_grad()  # gradients of an interrupted step, or of an earlier backward, are not this training's
                opt.reducer.lost_worker_error = None  # nor is a worker that was lost in a step whose body left the loop
                opt.statistics.begin_run(presented)
                opt.statistics.keep_unread = opt is self.opt
                opt.engine.step = 0
                opt.engine.bare_backwards = not self.further
                opt.reducer.loop_handles_lost_workers = self.user_loop and self.session.elastic
            self.opt.make_latest()
            yield
        finally:
            for opt, its_own in zip(self.opts, own, strict=True):
                opt.reducer.loop_handles_lost_workers = False
                opt.engine.bare_backwards = opt.reducer.has_pass = True
                opt.statistics.end_run()
                opt.lr_factor = 1.0
                if clip_norm is not None:  # else it is the user's, who may have changed it meanwhile
                    opt.clip_norm = its_own

    def lost_worker(self) -> RuntimeError | None:
        """Returns the error of a worker that was lost in the loop's body; None: none was."""
        return next(filter(None, [opt.reducer.lost_worker_error for opt in self.opts]), None)

    def new_fetcher(self) -> Fetcher:
        """Fetches in the step's own thread, or in loader processes. Raises DataError where these cannot."""
        settings = self.settings
        loading = Loading(settings["data_workers"], settings["data_prefetch"], self.worker_init_fn)
        check_loaders(self.data, loading.workers)
        if not loading.workers:
            return Fetcher(self.data, self.sampler)
        from kfuse.data.feeder import Feeder

        def report(pid: int, how: str) -> None:
            about = {"step": self.progress.step, "kind": "loader_lost", "worker": self.session.worker}
            self.reporter.of_any_worker({**about, "pid": pid, "how": how})

        return Feeder(self.data, self.sampler, loading, self.session.group.device, report)


def _refuse_uneven_embeddings(model: nn.Module) -> None:
    """Raises ValueError for an embedding that renormalises its weights in forward: each worker would change others."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ValueError(
                f"module {name or type(model).__name__}: {type(module).__name__}(max_norm={module.max_norm}) changes "
                "its weights in forward, each worker differently; use max_norm=None and clip weights after opt.step()"
            )


_RUNNING: list[Trainer] = []  # in the order in which they began
_GIVEN: list[Mapping[str, Any]] = []  # at most one: the state that the next training begins from


@contextlib.contextmanager
def active(trainer: Trainer) -> Iterator[None]:
    """Context of a training: it is the `newest`. It begins from the state that was given, if one was."""
    if _GIVEN:
        trainer.load_state_dict(_GIVEN.pop())
    _RUNNING.append(trainer)
    try:
        yield
    finally:
        _RUNNING[:] = [each for each in _RUNNING if each is not trainer]


def newest() -> Trainer | None:
    """Returns the training that began last and has not ended; None if there is none."""
    return _RUNNING[-1] if _RUNNING else None


def load_state_dict(state: Mapping[str, Any]) -> None:
    """As `kf.load_state_dict`."""
    if not isinstance(state, Mapping):
        raise TypeError(f"kf.load_state_dict takes what kf.state_dict returned, not {type(state).__name__}")
    if _RUNNING:
        _RUNNING[-1].load_state_dict(state)
    else:
        _GIVEN[:] = [state]


@contextlib.contextmanager
def exits_are_errors() -> Iterator[None]:
    """Context: a SystemExit of the model, the data or the policy of a job that has no script becomes a RuntimeError: it
    would end a worker as if all was well.
    """
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(f"training has raised SystemExit: {error}") from error
