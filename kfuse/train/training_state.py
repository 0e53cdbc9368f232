"""All that training depends on, declared once: the first broadcast, joins, recovery and checkpoints all use it.

What is not here needs no keeping: the data order is a pure function of (seed, epoch, cursor), and random numbers are
seeded from (seed, step, micro-batch) before each micro-batch. Parameters are compared between workers besides
(`comm.check_every`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch.nn import Parameter

from kfuse.optim import DistributedOptimizer


class Stateful(Protocol):
    """Something with a state of tensors and plain values (None, bool, int, float, str, lists, tuples, dicts)."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


class Trainable:
    """Which of an optimizer's parameters are trained: a script may freeze and unfreeze some as it goes."""

    def __init__(self, opt: DistributedOptimizer) -> None:
        self._opt = opt

    def _params(self) -> list[Parameter]:
        return [p for group in self._opt.param_groups for p in group["params"]]

    def state_dict(self) -> dict[str, Any]:
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
