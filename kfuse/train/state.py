"""The training state, declared once: the parts that it consists of.

The first broadcast, joins, recovery and checkpoints all use the same declaration (`TrainingState`). What is not in it
need not be saved: data are a pure function of (seed, epoch, cursor), and random numbers are seeded from (seed, step,
micro-batch) before each micro-batch's forward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from kfuse.optim import DistributedOptimizer

# Parts that are the user's, and stay when training ends. Further optimizers are "optimizer 1", "optimizer 2", ...
STAYS = ("model", "trainable", "optimizer")
LARGE = (*STAYS, "synchronisation")  # parts that are large, or tell how the models are kept together


class Stateful(Protocol):
    """A part of the state: tensors and plain values (None, bool, int, float, str, lists, tuples, dicts)."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


class Trainable:
    """Which of an optimizer's parameters are trained: a script may freeze and unfreeze some while it trains."""

    def __init__(self, opt: DistributedOptimizer) -> None:
        self._opt = opt

    def state_dict(self) -> dict[str, Any]:
        return {"requires_grad": [p.requires_grad for group in self._opt.param_groups for p in group["params"]]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError where the other optimizer has more or fewer parameters."""
        params, wanted = [p for group in self._opt.param_groups for p in group["params"]], state["requires_grad"]
        if len(params) != len(wanted):
            raise ValueError(
                f"another program's state: its optimizer has {len(wanted)} parameters, not {len(params)}: parameter "
                "groups that a loop added must be there before it"
            )
        if wanted != [p.requires_grad for p in params]:
            for p, trained in zip(params, wanted, strict=True):
                p.requires_grad_(trained)
            self._opt.rebuild()


class TrainingState:
    """The named parts whose states, together, are the training state."""

    def __init__(self, parts: Mapping[str, Stateful]) -> None:
        self._parts = dict(parts)

    def capture(
        self,
        only: Collection[str] | None = None,
        without: Collection[str] = (),
        of_optimizer: Callable[[DistributedOptimizer], dict[str, Any]] = lambda opt: opt.state_dict(),
        of_part: Callable[[Stateful], dict[str, Any]] = lambda part: part.state_dict(),
    ) -> dict[str, Any]:
        """Returns the state of each part, by name, or of `only` these. Tensors are the parts' own, not copies.

        only, without: names of parts, without a number.
        Shards of the optimizer's state are gathered: every worker calls it, and gets all. Raises CommError.
        """
        return {
            name: of_optimizer(part) if isinstance(part, DistributedOptimizer) else of_part(part)
            for name, part in self._parts.items()
            if name.split()[0] not in without and (only is None or name.split()[0] in only)
        }

    def capture_on_leader(self) -> dict[str, Any]:
        """As `capture`, but rank 0 alone gets the shards, of the optimizer's state or of the model."""
        return self.capture(
            of_optimizer=lambda opt: opt.with_statistics(opt.updates.state_dict(only=0)),
            of_part=lambda part: getattr(part, "leaders_state", part.state_dict)(),
        )

    def capture_common(self, only: Collection[str] | None = None) -> dict[str, Any]:
        """As `capture`, without the shards of the optimizer's state, and with this process's alone where the model is
        sharded over a worker's ranks: no collective.
        """
        return self.capture(
            only,
            of_optimizer=lambda opt: opt.with_statistics(opt.updates.common_state()),
            of_part=lambda part: getattr(part, "common_state", part.state_dict)(),
        )

    def restore_some(self, state: Mapping[str, Any]) -> None:
        """Loads the parts that `capture` returned with a selection."""
        for name in state:
            self._parts[name].load_state_dict(state[name])

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError where the state is of other parts: a learning-rate scheduler that only one of them has."""
        if state.keys() != self._parts.keys():
            unknown = sorted(state.keys() - self._parts.keys())
            missing = sorted(self._parts.keys() - state.keys())
            raise ValueError(f"another program's state: parts unknown here are {unknown}, missing are {missing}")

    def room_for(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the model's and the optimizer's own tensors, to be overwritten by another worker's `state`.

        Optimizer state that this worker does not have yet is made. Other parts are small, and get new tensors.
        """
        for name, part in self._parts.items():
            if isinstance(part, DistributedOptimizer) and name in state:
                part.updates.make_room(state[name])
        return self.capture_common(("model", "optimizer"))

    def restore(self, state: Mapping[str, Any], keeps_shards: bool | None = None) -> None:
        """Loads what `capture` returned, here or in another process, part by part, in the order of declaration.

        Sharded optimizer state stays whole on this worker; the others get their shards by its `regroup`.
        keeps_shards: for what `capture_common` returned: the shards that this worker has are of the same step.
        Raises ValueError as `check` does, and for a part that does not take its state.
        """
        self.check(state)
        for name, part in self._parts.items():
            try:
                if not isinstance(part, DistributedOptimizer):
                    part.load_state_dict(state[name])
                    continue
                if keeps_shards is None:
                    part.updates.load_state_dict(state[name], whole=True)
                else:
                    part.updates.load_common_state(state[name], keeps_shards)
                part.load_statistics(state[name])
            except (KeyError, RuntimeError, TypeError, ValueError) as error:
                why = " ".join(f"{type(error).__name__}: {error}".split())
                raise ValueError(f"rank 0's or another program's state: its {name} does not fit: {why}") from error
        for part in self._parts.values():
            if isinstance(part, DistributedOptimizer):
                part.reducer.follow_buffers()
