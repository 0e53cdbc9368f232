"""The training state, declared once: the parts that it consists of.

The first broadcast, joins, recovery and checkpoints all use the same declaration (`TrainingState`). What is not in it
need not be saved: data are a pure function of (seed, epoch, cursor), and random numbers are seeded from (seed, step,
micro-batch) before each micro-batch's forward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import nn
from torch.nn import Parameter

from kfuse.checkpoint import snapshot
from kfuse.comm.group import CommError, Pending
from kfuse.membership import Session
from kfuse.optim import DistributedOptimizer

if TYPE_CHECKING:
    from kfuse.optim.flat_updates import FlatUpdates
    from kfuse.optim.layout import Part

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

    def _params(self) -> list[Parameter]:
        return [p for group in self._opt.param_groups for p in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        return {"requires_grad": [p.requires_grad for p in self._params()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError where the other optimizer has more or fewer parameters."""
        params, wanted = self._params(), state["requires_grad"]
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
    ) -> dict[str, Any]:
        """Returns the state of each part, by name, or of `only` these. Tensors are the parts' own, not copies.

        only, without: names of parts, without a number.
        Shards of the optimizer's state are gathered: every worker calls it, and gets all. Raises CommError.
        """
        return {
            name: of_optimizer(part) if isinstance(part, DistributedOptimizer) else part.state_dict()
            for name, part in self._parts.items()
            if name.split()[0] not in without and (only is None or name.split()[0] in only)
        }

    def capture_on_leader(self) -> dict[str, Any]:
        """As `capture`, but rank 0 alone gets the shards of the optimizer's state."""
        return self.capture(of_optimizer=lambda opt: opt.with_statistics(opt.updates.state_dict(only=0)))

    def capture_common(self) -> dict[str, Any]:
        """As `capture`, without the shards of the optimizer's state: no collective."""
        return self.capture(of_optimizer=_common_state)

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
        kinds = DistributedOptimizer | nn.Module
        own = [name.split()[0] for name, part in self._parts.items() if isinstance(part, kinds)]
        return self.capture(only=own, of_optimizer=_common_state)

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
                raise ValueError(f"another program's state: its {name} does not fit: {why}") from error


def _common_state(opt: DistributedOptimizer) -> dict[str, Any]:
    """What all workers have alike. No collective."""
    return opt.with_statistics(opt.updates.common_state())


@dataclass
class _Snapshot:
    step: int
    common: dict[str, Any]  # what all workers have alike, on the host
    shards: list[list[Part]]  # of each bucket: this worker's own, and the one of the worker before
    arriving: list[Pending]  # the messages that bring the latter

    def is_complete(self) -> bool:
        """Whether all has arrived. Does not wait; a message that has failed never arrives."""
        try:
            while self.arriving and self.arriving[-1].done():
                self.arriving[-1].wait()
                self.arriving.pop()
        except CommError:
            return False
        return not self.arriving


class Snapshots:
    """This worker's snapshots of one training."""

    def __init__(self, session: Session, opt: DistributedOptimizer, state: TrainingState) -> None:
        self._session, self._opt, self._state = session, opt, state
        self._updates = cast("FlatUpdates", opt.updates)  # the only ones with sharded state
        self._every = session.comm.snapshot_every
        self._newest: _Snapshot | None = None
        # One or two, the newer one last: another worker may still wait for its part of that.
        self._complete: list[_Snapshot] = []

    def take_when_due(self, step: int) -> None:
        """Between two steps, on every worker: copies the state, and starts sending the shards. step: completed ones.

        Raises CommError where those of the snapshot before do not arrive.
        """
        group = self._opt.engine.group
        if self._newest is not None and step > self._newest.step:
            # All workers have made a step since it was taken, and so had all of the one before.
            self._complete = self._complete[-1:]
        if step % self._every or group.size == 1:
            return
        if self._newest is not None:
            for message in self._newest.arriving:
                message.wait()
        self._keep_complete()
        copied, arriving = self._updates.copy_shards(step)
        common = snapshot(self._state.capture_common(), "the training state")
        self._newest = _Snapshot(step, common, copied, arriving)

    def _keep_complete(self) -> None:
        if self._newest is not None and self._newest.is_complete():
            self._newest.shards = [[part.on("cpu") for part in parts] for parts in self._newest.shards]
            self._complete, self._newest = [*self._complete, self._newest], None

    def agree(self) -> None:
        """In a new view, on every worker: keeps the newest snapshot that is complete on all workers that have any.

        Raises CommError.
        """
        self._keep_complete()
        group = self._session.group
        mine = torch.tensor([self._complete[-1].step if self._complete else -1], device=group.device)
        steps = [int(step) for step in group.all_gather(mine, "newest snapshot of each worker")]
        agreed = min((step for step in steps if step >= 0), default=-1)
        self._complete, self._newest = [each for each in self._complete if each.step == agreed], None

    def go_back(self) -> bool:
        """In a new view, on every worker: takes the snapshot that they `agree` on. Returns whether this worker has it.

        The shards come to their owners by the optimizer's `regroup`. Raises CommError.
        """
        self.agree()
        if not self._complete:
            return False
        self._state.restore(self._complete[-1].common, keeps_shards=False)
        self._updates.take_shards(self._complete[-1].shards)
        return True
