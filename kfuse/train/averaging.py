"""Training by local SGD (`comm.sync=local:N`) and by synchronous model averaging (`sma`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from kfuse.comm.sync.averaging import CentralModel, OuterMomentum, write
from kfuse.train.synchronisation import SyncMethod


class LocalSGD(SyncMethod):
    """local:N: the models are averaged every N steps (Stich 2019), and whenever one common model is needed.

    With `comm.outer_momentum` or `comm.outer_lr` the average is followed by an outer step (DiLoCo), every N steps. As
    in DiLoCo the state of the workers' own optimizers then stays with them: averaging it did not help there, and with
    Adam it sends two more models' bytes, so three times as many. Where one model is needed within a round the models
    are averaged without an outer step, and the round goes on.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._comm = comm = self._session.comm
        steps_outside = (comm.outer_lr, comm.outer_momentum) != (1.0, 0.0)
        self._outer = OuterMomentum(self._opt.updates.weights()) if steps_outside else None
        self.keeps_weights = self._outer is not None
        self._round_began = self._progress.step  # the step at which the round began, where there is an outer step

    def after_step(self, every: int, common: bool, over: bool) -> None:
        drifted = self._progress.drifted
        if self._outer is None:
            if drifted >= every or common or over:
                self.meet(every)
        elif self._round_is_complete(every) or ((common or over) and drifted):
            self._average(every, states=False)

    def meet(self, every: int) -> None:
        """Averages models, buffers and optimizer states, unless that has just been done. Where a round is complete its
        outer step follows.
        """
        if self._progress.drifted:
            if self._progress.uneven:
                self._opt.updates.agree_on_state()
            self._average(every, states=True)
            self._progress.uneven = False

    def _average(self, every: int, states: bool) -> None:
        self._opt.updates.average_models(states=states)
        if self._outer is not None and self._round_is_complete(every):
            self._outer.step(self._opt.updates.weights(), self._comm.outer_lr, self._comm.outer_momentum)
            self._opt.updates.weights_changed()
            self._round_began = self._progress.step + 1
        self._progress.drifted = 0

    def _round_is_complete(self, every: int) -> bool:
        return self._progress.step + 1 - self._round_began >= every

    def state_dict(self) -> dict[str, Any]:
        outer = None if self._outer is None else self._outer.state_dict()
        return {"outer": outer, "round_began": self._round_began}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError where only one of both trainings has an outer step."""
        if (state["outer"] is None) != (self._outer is None):
            raise ValueError("comm.outer_lr, comm.outer_momentum: only one of both trainings has outer steps")
        self._round_began = state["round_began"]
        if self._outer is not None:
            self._outer.load_state_dict(state["outer"])


class ModelAveraging(SyncMethod):
    """sma: synchronous model averaging (CROSSBOW): each worker's model is drawn to a central one, at every step.

    The central model is the result: it is evaluated, and at the end all workers have it. A worker that joins, or takes
    another one's state, begins from it. One worker alone has no central model and trains as with ssgd.
    """

    keeps_weights = True
    _centre: CentralModel | None = None

    def before_step(self) -> None:
        if self._session.group.size == 1:
            self.finish()  # the others have left, or were lost
            return
        weights = self._opt.updates.weights()
        self._centre = self._centre or CentralModel(weights)
        self._centre.begin_step(weights, self._session.group)

    def after_step(self, every: int, common: bool, over: bool) -> None:
        if over:
            self.meet(every)
        else:
            self._end_step()

    def _end_step(self) -> None:
        """Corrects this worker's model, and moves the central one."""
        if self._centre is not None:
            group, comm = self._session.group, self._session.comm
            alpha = 1.0 / group.size if comm.sma_alpha is None else comm.sma_alpha
            self._centre.end_step(self._opt.updates.weights(), group, alpha, comm.sma_momentum)
            self._opt.updates.weights_changed()

    def meet(self, every: int) -> None:
        """All workers have the central model, and the mean of their optimizer states and buffers."""
        if self._centre is not None:
            # The central model moves last: where a worker is lost before, those that have not ended this stage begin it
            # again, and average once more what is equal by then.
            if self._progress.uneven:
                self._opt.updates.agree_on_state()
            self._opt.updates.average_models(weights=False)
            self._end_step()
            self.finish()
        self._progress.drifted, self._progress.uneven = 0, False

    def finish(self) -> None:
        if self._centre is not None:
            self._take(self._centre)
        self._centre = None

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """The central model, with the mean of the workers' buffers."""
        if self._centre is None:
            yield
            return
        self._opt.updates.average_models(weights=False, states=False)
        weights = self._opt.updates.weights()
        own = [weight.clone() for weight in weights]
        self._take(self._centre)
        try:
            yield
        finally:
            torch._foreach_copy_(weights, own)
            self._opt.updates.weights_changed()

    def _take(self, centre: CentralModel) -> None:
        write(centre.model, self._opt.updates.weights())
        self._opt.updates.weights_changed()

    def state_dict(self) -> dict[str, Any]:
        return {"centre": None if self._centre is None else self._centre.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._centre = None
        if state["centre"] is not None:
            weights = self._opt.updates.weights()
            self._centre = CentralModel(weights)
            self._centre.load_state_dict(state["centre"], weights)
            self._opt.updates.weights_changed()
