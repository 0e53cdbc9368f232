"""What one training is given, and what all of its parts share: built once, by kf.fit, kf.DataLoader or `kfuse`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from torch import nn

from kfuse.data import Dataset, EpochSampler, Stream, StreamSampler
from kfuse.data.fetching import Fetcher
from kfuse.data.sources import check_loaders
from kfuse.membership import Session
from kfuse.optim import DistributedOptimizer
from kfuse.policies import BasePolicy
from kfuse.session import current
from kfuse.settings import rules
from kfuse.settings.tree import by_key
from kfuse.train.loss import Metric, Objective
from kfuse.train.lr_schedule import LRSchedule, UserSchedule, has_scheduler
from kfuse.train.progress import Progress
from kfuse.train.reporter import Reporter
from kfuse.train.settings import Settings, session_facts

if TYPE_CHECKING:
    from kfuse.checkpoint.manager import Checkpoints, SavedModel
    from kfuse.train.output import Output


@dataclass
class TrainContext:
    """Raises ConfigError or ValueError for settings, data, a policy, an optimizer and a job that do not go together."""

    model: nn.Module
    data: Dataset | Stream
    opt: DistributedOptimizer
    settings: Settings
    policy: BasePolicy = field(default_factory=BasePolicy)
    objective: Objective = field(default_factory=Objective)
    """How a batch becomes a loss."""
    scheduler: UserSchedule | None = None
    """A torch scheduler that training steps."""
    heldout: Dataset | None = None
    metrics: Mapping[str, Metric] | None = None
    """Functions (output, target) that are evaluated on `heldout`."""
    checkpoints: Checkpoints | None = None
    """None: none are written or read."""
    saved_model: SavedModel | None = None
    """Writes the model when training is over, and the best one by evaluation; None: neither is written."""
    output: Output | None = None
    """A script's own files and display, which get the records too."""
    user_loop: bool = False
    """The user does a step's forward, backward and update, in the body of a loop over `Trainer.steps`."""
    several_backwards: bool = False
    """The user runs several in each micro-batch: see opt.micro_batch."""
    exits_are_errors: bool = False
    """A SystemExit of the model, the data or the policy is an error: no script means it."""
    session: Session = field(init=False)
    sampler: EpochSampler | StreamSampler = field(init=False)
    schedule: LRSchedule = field(init=False)
    progress: Progress = field(init=False)
    reporter: Reporter = field(init=False)

    def __post_init__(self) -> None:
        settings, opt, scheduler = self.settings, self.opt, self.scheduler
        for name, metric in (self.metrics or {}).items():
            if not callable(metric):
                raise TypeError(f"metrics[{name!r}]={metric!r}: must be a function(output, target)")
        if isinstance(self.data, Stream):
            self.sampler = StreamSampler(settings.seed)
        else:
            self.sampler = EpochSampler(len(self.data), settings.seed)
        if scheduler is not None and scheduler.interval == "epoch" and self.samples_an_epoch is None:
            raise ValueError("scheduler_interval=epoch: must be step with data=stream (a stream has no epochs)")
        self.schedule = settings.schedule(self.samples_an_epoch)
        self.session = current()
        if self.has_several_workers or self.session.comm.reproducible:
            _refuse_uneven_embeddings(self.model)
        inner = type(getattr(opt, "inner", opt)).__name__
        of_loop = "stepped in the loop's body" if has_scheduler(opt) else None
        rules.check(
            by_key({each.name: getattr(settings, each.name) for each in fields(settings)})
            | rules.run_facts(self.schedule.total, settings.lr_decay, settings.lr_decay_fraction)
            | session_facts(self.session)
            | rules.policy_facts(self.policy)
            | rules.optimizer_facts(type(opt), inner)
            | {"scheduler": of_loop if scheduler is None else type(scheduler.scheduler).__name__}
            | {"data": "stream" if self.samples_an_epoch is None else "data set"}
            | {"heldout": self.heldout is not None, "step_fn": self.objective.step_fn is not None}
            | {"metrics": ", ".join(self.metrics or ()) or None}
        )
        began_with = {
            "batch_size": settings.batch_size,
            "optimizer": inner.removeprefix("Fused"),
            "seed": settings.seed,
            "dataset size": self.samples_an_epoch,
        }
        self.progress = Progress(settings.batch_size, self.session.comm.sync, began_with=began_with)
        self.reporter = Reporter(self.session, settings, self.samples_an_epoch, self.output)

    @property
    def samples_an_epoch(self) -> int | None:
        """The samples of an epoch; None for a stream."""
        return self.sampler.length

    @property
    def has_several_workers(self) -> bool:
        """Whether there are several workers, or can be."""
        return self.session.elastic or self.session.group.size > 1

    def new_fetcher(self) -> Fetcher:
        """Fetches in the step's own thread, or in loader processes. Raises DataError where these cannot."""
        loading = self.settings.loading
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
