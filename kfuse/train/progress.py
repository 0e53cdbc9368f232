"""Where training is: what every worker agrees on, and gets from the most advanced one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any

from kfuse.statistics.figures import StepContext
from kfuse.train.load_balance import Throughput


class Stage(IntEnum):
    """The parts of a step, in order. A worker that is lost in one of them ends it for all, undone: see `once`."""

    BOUNDARY = 0
    BEFORE_STEP = 1
    UPDATE = 2
    AFTER_STEP = 3
    DECIDE = 4
    AVERAGE = 5
    EVALUATE = 6
    END = 7


@dataclass
class Progress:
    """How far training is, and what is in force. The same on every worker; a joiner gets it with the state."""

    batch_size: int
    sync_every: int = 1
    """Steps between synchronisations of the workers; above 1, each updates with its own gradients (local SGD)."""
    drifted: int = 0
    """Steps that the workers have made each for itself since they last had the same parameters."""
    step: int = 0
    stage: int = Stage.BOUNDARY
    """What comes next in this step."""
    epoch: int = 0
    cursor: int = 0
    """Samples of the epoch that are used."""
    samples: int = 0
    """Samples used in all."""
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
    """Step at which this run resumed. Views and stops announced before it are ignored: they were another run's."""
    stop: int = 0
    """Why to stop: index into `decisions.STOP_REASONS`."""
    contexts: dict[int, StepContext] = field(default_factory=dict)
    """Of each step whose statistics are not read yet: the settings it was made with."""

    @property
    def order(self) -> int:
        """How far this worker is: (step, stage) as one number."""
        return self.step * len(Stage) + self.stage

    def once(self, stage: Stage, act: Callable[[], object]) -> None:
        """Does `act`, unless this step is past `stage`; after it, it is. If `act` raises, it is not."""
        if self.stage <= stage:
            act()
            self.stage = stage + 1

    def next_step(self) -> None:
        """All stages are done."""
        self.step, self.stage = self.step + 1, Stage.BOUNDARY

    def state_dict(self) -> dict[str, Any]:
        """All fields, as plain values."""
        return asdict(self) | {"stage": int(self.stage)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets all fields, in place."""
        contexts = {step: StepContext(**context) for step, context in state["contexts"].items()}
        vars(self).update(vars(Progress(**{**state, "contexts": contexts})))
