"""All that training depends on, declared once: the first broadcast, joins, recovery and checkpoints all use it.

What is not here needs no keeping: the data order is a pure function of (seed, epoch, cursor), and random numbers are
seeded from (seed, step, micro-batch) before each micro-batch. Parameters are compared between workers besides
(`comm.check_every`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Stateful(Protocol):
    """Something with a state of tensors and plain values (None, bool, int, float, str, lists, tuples, dicts)."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


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
