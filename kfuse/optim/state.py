"""What an optimizer has that workers save, give each other, and average: its state, and with local SGD its weights."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from kfuse.comm.engine import Engine
from kfuse.membership import Session
from kfuse.optim.consistency import average
from kfuse.optim.parameters import ParameterGroups
from kfuse.statistics.step_stats import Statistics

_KFUSE = "kfuse"  # a key of state_dict


class OptimizerState(ParameterGroups):
    """Mix-in over a torch optimizer. With sharded state a subclass has some of these methods otherwise."""

    engine: Engine
    statistics: Statistics
    _session: Session
    _weight_names: tuple[str, ...] = ()
    """Entries of `state` that `weights` returns already: they are not averaged twice."""

    def state_dict(self) -> dict[str, Any]:
        """As torch's, and kfuse's statistics under the key "kfuse", which torch's optimizers leave alone."""
        return self._with_statistics(super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what `state_dict` gave, or a torch optimizer's; after that one the statistics are as they were."""
        super().load_state_dict(state_dict)
        self._load_statistics(state_dict)

    def make_room(self, state_dict: dict[str, Any]) -> None:
        """Makes the state tensors that `state_dict` has and this optimizer has not, where its class knows how.

        So a state that arrives from another worker is written where it stays. It is loaded once all has arrived.
        """

    def gathered_state(self, rank: int) -> dict[str, Any]:
        """As `state_dict` on rank `rank`; on the others, with sharded state, without the tensors of the shards.

        Every rank calls it at the same point. Raises CommError.
        """
        return self.state_dict()

    def load_gathered_state(self, state: dict[str, Any]) -> None:
        """On one worker: takes all of a state_dict over, with sharded state also what the others are to own.

        These get it by `regroup`.
        """
        self.load_state_dict(state)

    def common_state(self) -> dict[str, Any]:
        """What every worker has alike: with sharded state all but the shards. No collective."""
        return self.state_dict()

    def load_common_state(self, state: dict[str, Any], keeps_shards: bool) -> None:
        """Takes over another worker's `common_state`. The shards come by `regroup`.

        keeps_shards: those that this worker has are of the same step.
        """
        self.load_state_dict(state)

    def regroup(self, has_state: bool) -> None:
        """After the group has changed, on every worker of the new one: each gets the shards that are its own now.

        has_state: this worker's shards are of the newest state. Raises CommError, and ShardsLost where no worker has a
        part of the state. After an error nothing is lost that was there.
        """

    def _hand_over(self, new_ranks: Sequence[int | None], size: int) -> None:
        """Before a planned change of the view, on every worker: those that leave give their shards to the others.

        new_ranks: of each rank, its rank in the next view, of `size` workers; None: it leaves. Raises CommError.
        """

    def _with_statistics(self, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, _KFUSE: self.statistics.state_dict()}

    def _load_statistics(self, state: dict[str, Any]) -> None:
        if _KFUSE in state:
            self.statistics.load_state_dict(state[_KFUSE])

    # -- averages -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def agree_on_state(self) -> None:
        """Before states are averaged, on every worker: all have state of the same parameters afterwards.

        For after steps in which some workers made no update. What a worker lacks is zeros, as of no update. Raises
        CommError; calling it again is harmless.
        """
        if self._session.group.size == 1 or not self.engine.params:
            return
        mine = torch.tensor([float(self._has_state(p)) for p in self.engine.params], device=self._session.group.device)
        everywhere = mine.clone()
        self._session.group.all_reduce(everywhere, "which parameters have optimizer state").wait()
        lacking = ((mine == 0) & (everywhere > 0)).tolist()
        self._make_state([index for index, lacks in enumerate(lacking) if lacks])

    def _has_state(self, p: Parameter) -> bool:
        state = self.state.get(p, {})
        return any(isinstance(value, Tensor) for name, value in state.items() if name not in self._weight_names)

    @abstractmethod
    def _make_state(self, lacking: Sequence[int]) -> None:
        """Makes the state of these parameters (indices in `engine.params`, perhaps none), as of no update."""

    @torch.no_grad()
    def average_models(self, weights: bool = True, states: bool = True) -> None:
        """Makes parameters, optimizer state and BatchNorm's running statistics the mean of all workers' (local SGD).

        Between steps, on every worker. All of it or nothing is replaced. weights, states: whether parameters and
        optimizer state are averaged. Raises CommError, and RuntimeError with sharded state.
        """
        if self.engine.options.sharded:
            raise RuntimeError("opt.average_models: comm.state=sharded has one model only; use comm.state=replicated")
        values = self.weights() if weights else []
        if states:
            kept = [state for p in self.engine.params if (state := self.state.get(p))]
            held = [state[name] for state in kept for name in sorted(state) if name not in self._weight_names]
            values += [value for value in held if isinstance(value, Tensor)]
        average(self._session.group, [*values, *self.engine.averaged.tensors])
        if weights:
            self.weights_changed()

    def weights(self) -> list[Tensor]:
        """The tensors that updates change: the parameters, or what they are computed from. Between steps."""
        return [p.detach() for p in self.engine.params]

    def weights_changed(self) -> None:
        """The caller has changed what `weights` returned: parameters that are computed from them follow."""
