"""The training state, declared once: the parts that it consists of.

The first broadcast, joins, recovery and checkpoints all use the same declaration (`TrainingState`). What is not in it
need not be saved: data are a pure function of (seed, epoch, cursor), and random numbers are seeded from (seed, step,
micro-batch) before each micro-batch's forward. That workers have the same parameters is checked (`comm.check_every`).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch.nn import Parameter

from kfuse.comm.group import Group
from kfuse.optim import DistributedOptimizer

_TRANSFER = "state of the most advanced worker"


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
