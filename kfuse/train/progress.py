"""How far a training is, and when it is over."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any

from kfuse.settings.tree import ConfigError, TrainSettings
from kfuse.statistics.figures import StepContext

# Why training is told to stop, by the number in a decision; "": it is not; "stopped": by the training itself.
STOP_REASONS = ("", "interrupted", "terminated", "stopped")

Throughput = dict[int, tuple[float, int]]  # worker: (mean micro-batches of the first size a second, steps measured)


class Stage(IntEnum):
    """The parts of a step, in order. If a worker is lost in one of them, that part is repeated: see `Progress.once`."""

    BOUNDARY = 0
    BEFORE_STEP = 1
    UPDATE = 2
    AFTER_STEP = 3
    DECIDE = 4
    AVERAGE = 5
    EVALUATE = 6
    AFTER_EPOCH = 7
    END = 8


@dataclass(frozen=True)
class Evaluation:
    """What the model does on held-out data."""

    loss: float | None = None  # mean over the samples; None: there was no evaluation
    # Share of the targets hit, in [0, 1]; None where the output does not hold a score for each class, last.
    accuracy: float | None = None
    # By name: the user's metrics, or the figures of the step function. Means over the samples.
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class Progress:
    """How far training is, and its settings now. The same on every worker, but for pair averaging between meetings."""

    batch_size: int  # samples per optimizer step, over all workers
    sync: str = "ssgd"  # how the workers keep together: see `kfuse.comm.sync`
    drifted: int = 0  # local steps since the workers last had the same parameters (local SGD)
    uneven: bool = False  # some workers have made fewer updates than others since optimizer states were last averaged
    step: int = 0  # steps completed
    stage: int = Stage.BOUNDARY  # the part of this step that comes next
    # Of several optimizers: how many updates each has made, and whose are made in the step under way, by index.
    updates: list[int] = field(default_factory=list)
    updated: list[int] = field(default_factory=list)
    epoch: int = 0
    cursor: int = 0  # samples of this epoch that were used so far
    samples: int = 0  # samples used so far, over all epochs
    lr_scale: float = 1.0  # the policies' factor on the learning rate
    schedule: float = 0.0  # progress of the learning-rate schedule, in steps of the base batch size
    means: tuple[float | None, float | None] = (None, None)  # the running means of G2 and S; None while unknown
    # See `kfuse.train.curvature`: running means of slope, curvature, spread and length, and the newest |u|^2.
    curvature: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0, 0.0)
    waits: list[tuple[float, float]] = field(default_factory=list)  # see `kfuse.train.input_bound`
    throughput: Throughput = field(default_factory=dict)  # by worker number
    stragglers: dict[int, float] = field(default_factory=dict)  # by number, and for how many seconds each is one
    corrupt: tuple[int, ...] = ()  # numbers of the workers that audits have found to compute wrong gradients
    evaluation: Evaluation = Evaluation()  # the last one
    evaluated: int = 0  # number of steps after which it ran
    best: float | None = None  # the best evaluation so far: its accuracy where that is known, else minus its loss
    loss: float | None = None
    generation: int = 0  # generation of the view to switch to, if above that of the active view
    stop: int = 0  # why to stop: index into `STOP_REASONS`
    # Arguments without which the rest would be another training, by name: see `refuse_other_beginning`.
    began_with: dict[str, Any] = field(default_factory=dict)
    contexts: dict[int, StepContext] = field(default_factory=dict)  # by step, until its statistics are read
    logged: dict[int, dict[str, float]] = field(default_factory=dict)  # by step, until then: figures of `kf.log`
    # What pair averaging has done on all workers, up to their last meeting: see `kfuse.comm.sync.pair.Pair.counts`.
    pulls: dict[str, int] = field(default_factory=dict)

    @property
    def is_local(self) -> bool:
        """Whether each worker updates with its own gradients, in the coming step."""
        return self.drifted > 0 or self.sync != "ssgd"

    @property
    def is_apart(self) -> bool:
        """Whether each worker of several makes steps of its own (pair averaging), in the coming step."""
        return self.sync.startswith("pair")

    @property
    def epoch_samples(self) -> int | None:
        """Samples of an epoch, the same of all epochs so far; None for a stream, and where earlier ones had others."""
        length: int | None = self.began_with.get("dataset size")
        return length if length is not None and self.samples == self.epoch * length + self.cursor else None

    @property
    def position(self) -> int:
        """(step, stage, updates) as one number: of several workers the largest one is the furthest."""
        return self.step * len(Stage) + self.stage + sum(self.updates)

    def curvature_figures(self) -> dict[str, Any]:
        """Returns what a step's context has of the curvature. Where the mean that a ratio is over is not above zero, it
        is unknown; so is a rate or a batch size that would not be above zero.
        """
        slope, curvature, spread, length, _ = self.curvature
        ratios = {"curvature_noise_scale": spread, "best_lr": slope}
        known = {name: value / curvature if min(value, curvature) > 0 else None for name, value in ratios.items()}
        return known | {"curvature": curvature / length if length > 0 else None}

    def updates_of(self, index: int) -> int:
        """Returns how many updates the optimizer of this index has made."""
        return self.updates[index] if self.updates else self.step + (self.stage > Stage.UPDATE)

    def once(self, stage: Stage, act: Callable[[], object]) -> None:
        """Calls `act`, unless `stage` is done, and marks it as done; if `act` raises, it is not done.

        After a worker is lost, all continue from the state of the most advanced one: what it has done is not repeated.
        """
        if self.stage <= stage:
            act()
            self.stage = stage + 1

    def exit_reason(self, settings: TrainSettings) -> str | None:
        if self.stop:
            return STOP_REASONS[self.stop]
        target, accuracy = settings["train_target_accuracy"], self.evaluation.accuracy
        if target is not None and accuracy is not None and accuracy >= target:
            return "target_accuracy"
        if settings["steps"] is not None and self.counted(settings, self.step) >= settings["steps"]:
            return "steps"
        if settings["epochs"] is not None and self.epoch >= settings["epochs"]:
            return "epochs"
        return None

    def counted(self, settings: TrainSettings, steps: int) -> float:
        """So many optimizer steps in the unit of steps: with adascale the sum of their gains."""
        return self.schedule if settings["lr_scaling"] == "adascale" else steps

    def is_last_step(self, settings: TrainSettings, epoch_is_over: bool) -> bool:
        """Whether training ends with the step under way, after its update. An evaluation may end it all the same."""
        last_epoch = epoch_is_over and self.epoch + 1 == settings["epochs"]
        steps = settings["steps"]
        last_step = steps is not None and self.counted(settings, self.step + 1) >= steps
        return self.stop > 0 or last_epoch or last_step

    def planned_steps(self, settings: TrainSettings, length: int | None) -> int:
        """Steps of this training, those done included, if the batch size stays; with adascale at most so many.

        length: samples of an epoch, if known. Raises TypeError if the number is unknown.
        """
        limit = math.inf
        if (steps := settings["steps"]) is not None:
            limit = self.step + math.ceil(max(0, steps - self.counted(settings, self.step)))
        if (epochs := settings["epochs"]) is not None and length is not None:
            left = -(-(length - self.cursor) // self.batch_size)
            left += max(0, epochs - self.epoch - 1) * -(-length // self.batch_size)
            limit = min(limit, self.step + (left if self.epoch < epochs else 0))
        if limit == math.inf:
            raise TypeError("this training has no length: its data tell none, and steps= is not given")
        return int(limit)

    def take_evaluation(self, result: Evaluation, steps: int) -> bool:
        """Keeps the result of the evaluation after `steps` steps. Returns whether it is the best one so far."""
        self.evaluation, self.evaluated = result, steps
        loss = math.nan if result.loss is None else result.loss
        score = -loss if result.accuracy is None else result.accuracy
        best = math.isfinite(score) and (self.best is None or score > self.best)
        if best:
            self.best = score
        return best

    def refuse_other_beginning(self, saved: Mapping[str, Any]) -> None:
        """Raises ConfigError where a training with other arguments made `saved`, a `state_dict` to go on from.

        Learning rates are meant for the first batch size. Within an epoch the order of the samples counts as well.
        """
        theirs = saved["began_with"]
        within_epoch = saved["cursor"] not in (0, theirs["dataset size"])
        for name, value in theirs.items():
            if value != self.began_with[name] and (within_epoch or name not in ("seed", "dataset size")):
                why = f"it has {name}={value}, not {self.began_with[name]}: must be the same"
                raise ConfigError(f"another training's state: {why}")

    def state_dict(self) -> dict[str, Any]:
        return asdict(self) | {"stage": int(self.stage)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        contexts = {step: StepContext(**context) for step, context in state["contexts"].items()}
        evaluation = Evaluation(**state["evaluation"])
        vars(self).update(vars(Progress(**{**state, "contexts": contexts, "evaluation": evaluation})))
