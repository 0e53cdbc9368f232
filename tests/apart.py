"""For jobs with pair averaging: `model._target_=apart.Paced policy._target_=apart.Orders`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

import kfuse as kf
from kfuse.elastic import protocol
from kfuse.models import MLP


class Paced(MLP):
    """Each micro-batch takes so many seconds, whatever else the machine does; on worker 1 `slow` times as many."""

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        seconds: float = 0.01,
        slow: float = 1.0,
        hidden: Sequence[int] = (16,),
    ) -> None:
        super().__init__(input_shape, num_classes, hidden=list(hidden))
        self._seconds = seconds * (slow if os.environ.get(protocol.ENV_WORKER) == "1" else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            time.sleep(self._seconds)
        return super().forward(x)


class Orders(kf.BasePolicy):
    """Decides what `orders` says for a step: {step: {field: value}}.

    collective: tries one at that step. hang: worker 1 makes no further step from there on, while its heartbeats go on.
    """

    def __init__(
        self, orders: Sequence[Mapping[str, Any]] = (), collective: int | None = None, hang: int | None = None
    ) -> None:
        self._orders = {each["step"]: {k: v for k, v in each.items() if k != "step"} for each in orders}
        self._collective, self._hang, self._steps = collective, hang, 0

    def decide(self, signals: kf.Signals) -> kf.Decision | None:
        order = self._orders.get(signals.step)
        return None if order is None else kf.Decision(**order)

    def after_step(self) -> None:
        self._steps += 1
        if self._steps == self._collective:
            kf.allreduce(1.0)
        if self._steps == self._hang and os.environ.get(protocol.ENV_WORKER) == "1":
            time.sleep(1000)

    def after_epoch(self) -> None:
        assert kf.allreduce(1.0) == kf.size()

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = state["steps"]
