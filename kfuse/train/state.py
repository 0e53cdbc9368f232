"""The training state, declared once: how far training is (`Progress`), and the parts that it consists of.

The first broadcast, joins, recovery and checkpoints all use the same declaration (`TrainingState`). What is not in it
need not be saved: data are a pure function of (seed, epoch, cursor), and random numbers are seeded from (seed, step,
micro-batch) before each micro-batch's forward. That workers have the same parameters is checked (`comm.check_every`).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any, Protocol

import torch
from torch.nn import Parameter

from kfuse.comm.group import Group
from kfuse.optim import DistributedOptimizer
from kfuse.statistics.figures import StepContext
from kfuse.train.load_balance import Throughput

_TRANSFER = "state of the most advanced worker"


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


@dataclass
class Progress:
    """How far training is, and its settings now. The same on every worker; a new worker receives it with the state."""

    batch_size: int
    """Samples per optimizer step, over all workers."""
    sync_every: int = 1
    """Steps between synchronisations of the workers; above 1, each updates with its own gradients (local SGD)."""
    drifted: int = 0
    """Local steps since the workers last had the same parameters (local SGD)."""
    step: int = 0
    """Steps completed."""
    stage: int = Stage.BOUNDARY
    """The part of this step that comes next."""
    epoch: int = 0
    cursor: int = 0
    """Samples of this epoch that were used so far."""
    samples: int = 0
    """Samples used so far, over all epochs."""
    lr_scale: float = 1.0
    """The policies' factor on the learning rate."""
    schedule: float = 0.0
    """Progress of the learning-rate schedule, in steps of the base batch size."""
    mean_grad_sq: float | None = None
    mean_grad_variance: float | None = None
    throughput: Throughput = field(default_factory=dict)
    """By worker number: see `load_balance`."""
    stragglers: tuple[int, ...] = ()
    """Numbers of the workers that were reported as stragglers."""
    accuracy: float | None = None
    eval_loss: float | None = None
    best: float | None = None
    """The best evaluation so far: its accuracy where that is known, else minus its loss."""
    eval_metrics: dict[str, float] = field(default_factory=dict)
    evaluated: int = 0
    """Number of steps after which the last evaluation ran."""
    loss: float | None = None
    generation: int = 0
    """Generation of the view to switch to, if above that of the active view."""
    resumed_at: int = 0
    """Step at which this run resumed. Views and stops announced before it are ignored: they were another run's."""
    stop: int = 0
    """Why to stop: index into `decisions.STOP_REASONS`."""
    began_with: dict[str, Any] = field(default_factory=dict)
    """Arguments without which the rest would be another training, by name: see `refuse_other_beginning`."""
    contexts: dict[int, StepContext] = field(default_factory=dict)
    """By step, for steps whose statistics are not read yet: the settings it was made with."""

    @property
    def position(self) -> int:
        """How far this worker is: (step, stage) as one number. A larger one is further."""
        return self.step * len(Stage) + self.stage

    def once(self, stage: Stage, act: Callable[[], object]) -> None:
        """Calls `act`, then marks `stage` as done. Does nothing if it is done already. If `act` raises, it is not done.

        After a worker is lost, all continue from the state of the most advanced one: what it has done is not repeated.
        """
        if self.stage <= stage:
            act()
            self.stage = stage + 1

    def next_step(self) -> None:
        """All stages are done: moves on to the next step."""
        self.step, self.stage = self.step + 1, Stage.BOUNDARY

    def refuse_other_beginning(self, saved: Mapping[str, Any]) -> None:
        """Raises ValueError where a training with other arguments made `saved` (from `state_dict`), to go on from it.

        Learning rates are meant for the first batch size. Within an epoch the order of the samples counts as well:
        with another one, some of them would be used twice and others not at all.
        """
        theirs = saved.get("began_with", {})
        within_epoch = saved["cursor"] not in (0, theirs.get("dataset size"))
        for name, value in theirs.items():
            if value != self.began_with[name] and (within_epoch or name not in ("seed", "dataset size")):
                raise ValueError(
                    f"another training's state: it has {name}={value}, not {self.began_with[name]}: must be the same"
                )

    def state_dict(self) -> dict[str, Any]:
        """All fields, as plain values."""
        return asdict(self) | {"stage": int(self.stage)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets all fields, in place."""
        contexts = {step: StepContext(**context) for step, context in state["contexts"].items()}
        vars(self).update(vars(Progress(**{**state, "contexts": contexts})))


class Stateful(Protocol):
    """A part of the state: tensors and plain values (None, bool, int, float, str, lists, tuples, dicts)."""

    def state_dict(self) -> dict[str, Any]:
        """The state; tensors may be the object's own."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Takes over what `state_dict` returned, here or in another process."""


class Trainable:
    """Which of an optimizer's parameters are trained: a script may freeze and unfreeze some while it trains."""

    def __init__(self, opt: DistributedOptimizer) -> None:
        self._opt = opt

    def _params(self) -> list[Parameter]:
        return [p for group in self._opt.param_groups for p in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """For each parameter, whether it is trained."""
        return {"requires_grad": [p.requires_grad for p in self._params()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError where the other optimizer has more or fewer parameters."""
        params, wanted = self._params(), state["requires_grad"]
        if len(params) != len(wanted):
            raise ValueError(f"another program's state: its optimizer has {len(wanted)} parameters, not {len(params)}")
        if wanted != [p.requires_grad for p in params]:
            for p, trained in zip(params, wanted, strict=True):
                p.requires_grad_(trained)
            self._opt.rebuild()


class TrainingState:
    """The named parts whose states, together, are the training state."""

    def __init__(self, parts: Mapping[str, Stateful]) -> None:
        self._parts = dict(parts)

    def capture(self) -> dict[str, Any]:
        """The state of each part, by name. Tensors are the parts' own, not copies."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError where the state is of other parts: a learning-rate scheduler that only one of them has."""
        if state.keys() != self._parts.keys():
            unknown = sorted(state.keys() - self._parts.keys())
            missing = sorted(self._parts.keys() - state.keys())
            raise ValueError(f"another program's state: parts unknown here are {unknown}, missing are {missing}")

    def restore(self, state: Mapping[str, Any]) -> None:
        """Loads what `capture` returned, here or in another process, part by part, in the order of declaration.

        Raises ValueError as `check` does, and for a part that does not take its state.
        """
        self.check(state)
        for name, part in self._parts.items():
            try:
                part.load_state_dict(state[name])
            except (KeyError, RuntimeError, TypeError, ValueError) as error:
                why = " ".join(f"{type(error).__name__}: {error}".split())
                raise ValueError(f"another program's state: its {name} does not fit: {why}") from error


def share(group: Group, source: int, make: Callable[[], Any]) -> bytes:
    """Sends what `make` returns on rank `source` (tensors and plain values) to every rank; returns it encoded.

    Two broadcasts: the size, then the bytes. Decode with `decode`. Raises CommError.
    """
    payload = torch.empty(0, dtype=torch.uint8)
    if group.rank == source:
        buffer = io.BytesIO()
        torch.save(make(), buffer)
        payload = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8).to(group.device)
    size = torch.tensor([payload.numel()], device=group.device)
    group.broadcast(size, _TRANSFER, source).wait()
    if group.rank != source:
        payload = torch.empty(int(size.item()), dtype=torch.uint8, device=group.device)
    group.broadcast(payload, _TRANSFER, source).wait()
    return payload.cpu().numpy().tobytes()


def decode(payload: bytes, device: torch.device) -> Any:
    """Decodes `share`'s bytes, with all tensors on `device`.

    Only tensors and plain values are accepted: nothing in it can run code.
    """
    return torch.load(io.BytesIO(payload), map_location=device, weights_only=True)
