"""Where training is, how far it is to go, and the samples of one step: what every worker agrees on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np

from kfuse.checkpoint.manager import CheckpointSettings
from kfuse.comm.plan import StepPlan
from kfuse.data.sampler import micro_batch_sizes, worker_range
from kfuse.policies.signals import Bounds
from kfuse.train.load_balance import Throughput


@dataclass(frozen=True)
class Settings:
    """How long, how large, how precise."""

    batch_size: int
    micro_batch: int
    bounds: Bounds
    epochs: int | None = 1
    steps: int | None = None
    target_accuracy: float | None = None
    eval_every: int | None = None
    """In steps; None: after each epoch."""
    precision: str = "fp32"
    seed: int = 0
    base_lr: float | None = None
    """The configured learning rate, which wins over a checkpoint's; None: group["lr"] is the user's."""
    sync_every: int = 1
    balance: bool = True
    """Give slower workers fewer micro-batches."""
    ledger: bool = False
    checkpoints: CheckpointSettings | None = None


class Phase(IntEnum):
    """What a worker does next. (step, phase) says how far it is: after a failure the most advanced state counts."""

    SWITCH = 0
    BEGIN = 1
    STEP = 2
    AFTER_STEP = 3
    READ = 4
    SYNC = 5
    EVALUATE = 6
    END = 7


@dataclass
class Position:
    """Where training is. The same on every worker; a joiner gets it with the rest of the state."""

    batch_size: int
    sync_every: int = 1
    """Steps between synchronisations of the workers; above 1, each updates with its own gradients (local SGD)."""
    drifted: int = 0
    """Steps that the workers have made each for itself since they last had the same parameters."""
    phase: Phase = Phase.SWITCH
    step: int = 0
    epoch: int = 0
    cursor: int = 0
    samples: int = 0
    lr_scale: float = 1.0
    schedule: float = 0.0
    """Progress of the learning-rate schedule, in steps of the base batch size."""
    mean_grad_sq: float | None = None
    mean_grad_variance: float | None = None
    throughput: Throughput = field(default_factory=dict)
    stragglers: tuple[int, ...] = ()
    """Workers that were reported as such."""
    accuracy: float | None = None
    eval_loss: float | None = None
    evaluated: int = 0
    """Steps that the last evaluation came after."""
    loss: float | None = None
    generation: int = 0
    """The view to switch to, if it is above the one in force."""
    resumed_at: int = 0
    """The step that a checkpoint was taken up at: what earlier ones said of views and stopping was for another run."""
    stop: int = 0
    """Index into STOP_REASONS."""
    contexts: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Of each step whose statistics are not read yet: the settings it was made with."""

    @property
    def order(self) -> int:
        """How far this worker is: (step, phase) as one number."""
        return self.step * len(Phase) + self.phase

    def state_dict(self) -> dict[str, Any]:
        """All fields, as plain values."""
        return asdict(self) | {"phase": int(self.phase)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets all fields, in place."""
        vars(self).update(vars(Position(**{**state, "phase": Phase(state["phase"])})))


@dataclass(frozen=True)
class StepSamples:
    """The samples of one step, cut into micro-batches and shared out among the workers."""

    indices: np.ndarray
    """int64 [samples], in the order of the epoch."""
    micro_batch: int
    workers: int
    shares: tuple[int, ...] | None = None
    """Weights of the workers; None: all the same."""

    @cached_property
    def sizes(self) -> list[int]:
        return micro_batch_sizes(len(self.indices), self.micro_batch)

    def range_of(self, rank: int) -> range:
        """The micro-batches of this worker."""
        return worker_range(len(self.sizes), self.workers, rank, self.shares)

    def of(self, j: int) -> np.ndarray:
        """The samples of micro-batch j."""
        return self.indices[j * self.micro_batch : j * self.micro_batch + self.sizes[j]]

    def plan(self, local_rank: int | None = None) -> StepPlan:
        """What the engine is told; for a step that each worker makes for itself, with this worker's rank."""
        ranges = tuple(self.range_of(rank) for rank in range(self.workers))
        local = None if local_rank is None else sum(self.sizes[j] for j in ranges[local_rank])
        return StepPlan(len(self.indices), ranges, local)
