"""What one training is given: a model, data, optimizers, a policy, and settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from kfuse.data import Dataset, Stream
from kfuse.elastic.link import Report, ignore
from kfuse.optim import DistributedOptimizer
from kfuse.policies import BasePolicy
from kfuse.settings.tree import SETTINGS, TrainSettings
from kfuse.train.loss import Metric, Objective

if TYPE_CHECKING:
    from kfuse.checkpoint.manager import Checkpoints, SavedModel
    from kfuse.train.learning_rate import UserSchedule

_SECTIONS = ("seed", "batch", "lr", "train", "statistics")  # whose settings training itself follows
# Settings of these sections that may differ between workers.
_OWN = ("batch_min", "clip_norm", "train_save_model", "lr_base")


@dataclass(frozen=True)
class TrainArguments:
    """The arguments of one training. `kfuse.train.assemble` makes a trainer of them."""

    model: nn.Module
    data: Dataset | Stream
    # The first one's statistics and learning rate are the training's. The others step in the same bodies of a user's
    # loop: see `Passes`.
    opts: tuple[DistributedOptimizer, ...]
    settings: TrainSettings  # completed; `lr_base`, where it is there, wins over a checkpoint's rate
    worker_init_fn: Callable[[int], object] | None = None  # called first in each loader process
    policy: BasePolicy = field(default_factory=BasePolicy)
    objective: Objective = field(default_factory=Objective)  # how a batch becomes a loss
    scheduler: UserSchedule | None = None  # torch schedulers that training steps
    heldout: Dataset | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)  # functions (output, target), evaluated on `heldout`
    checkpoints: Checkpoints | None = None  # None: none are written or read
    saved_model: SavedModel | None = None  # of the trained model and the best one by evaluation; None: not written
    report: Report = ignore  # takes what this worker has to report
    user_loop: bool = False  # a step's forward, backward and update are the body of a loop over `Trainer.steps`
    several_backwards: bool = False  # the user runs several backwards in each micro-batch: see opt.micro_batch
    exits_are_errors: bool = False  # a SystemExit of the model, the data or the policy is an error: no script means it

    @property
    def opt(self) -> DistributedOptimizer:
        return self.opts[0]

    @property
    def followed(self) -> dict[str, Any]:
        """The settings, by name, that the training itself follows."""
        sections = {name: SETTINGS[name].key.partition(".")[0] for name in self.settings}
        return {name: value for name, value in self.settings.items() if sections[name] in _SECTIONS}

    @property
    def shared(self) -> dict[str, Any]:
        """The settings, by name, that must be equal on all workers, as each plans by them."""
        return {name: value for name, value in self.followed.items() if name not in _OWN}
