"""All that training depends on, declared once: where it is (`Progress`), and the parts that make up its state.

The first broadcast, joins, recovery and checkpoints all use the same declaration (`TrainingState`). What is not in it
needs no keeping: the data order is a pure function of (seed, epoch, cursor), and random numbers are seeded from (seed,
step, micro-batch) before each micro-batch. Parameters are compared between workers besides (`comm.check_every`).
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


class Stateful(Protocol):
    """Something with a state of tensors and plain values (None, bool, int, float, str, lists, tuples, dicts)."""

    def state_dict(self) -> dict[str, Any]:
        """The state; tensors may be the object's own."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Takes over what `state_dict` returned, here or in another process."""


class Trainable:
    """Which of an optimizer's parameters are trained: a script may freeze and unfreeze some as it goes."""

    def __init__(self, opt: DistributedOptimizer) -> None:
        self._opt = opt

    def _params(self) -> list[Parameter]:
        return [p for group in self._opt.param_groups for p in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """By parameter, whether it is trained."""
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

    def restore(self, state: Mapping[str, Any]) -> None:
        """Loads what `capture` returned, here or in another process, part by part, in the order of declaration.

        Raises ValueError where the state is of other parts: a learning-rate scheduler that only one of them has.
        """
        if state.keys() != self._parts.keys():
            unknown = sorted(state.keys() - self._parts.keys())
            missing = sorted(self._parts.keys() - state.keys())
            raise ValueError(f"another program's state: parts unknown here are {unknown}, missing are {missing}")
        for name, part in self._parts.items():
            part.load_state_dict(state[name])


def share(group: Group, source: int, make: Callable[[], Any]) -> bytes:
    """Gives every rank what `make` makes on rank `source`: tensors and plain values, encoded. Raises CommError."""
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
    """What `share` made `payload` of, tensors on `device`, wherever the sender had them.

    Only tensors and plain values are accepted: nothing in it can run code.
    """
    return torch.load(io.BytesIO(payload), map_location=device, weights_only=True)
