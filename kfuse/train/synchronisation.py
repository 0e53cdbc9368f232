"""How the workers' models are kept together in a training, as `comm.sync` says, and what a change of mode does.

With ssgd there is nothing to do: all workers make the same update. In every other mode each worker updates with its own
gradients, and a `SyncMethod` brings the models together. docs/synchronisation.md says what each mode promises.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn import Parameter

from kfuse.comm.sync import Sync
from kfuse.comm.sync.central import CentralModel
from kfuse.comm.sync.outer import OuterMomentum
from kfuse.comm.sync.weights import write
from kfuse.train.context import TrainContext


class SyncMethod:
    """What a mode does beside each worker's own update: by itself nothing, as with ssgd. Its methods may raise
    CommError: then nothing has changed.
    """

    keeps_weights = False
    """Whether it keeps weights of the trained parameters, which must stay the same ones then."""

    def __init__(self, training: TrainContext) -> None:
        self._session, self._opt, self._progress = training.session, training.opt, training.progress

    def before_step(self) -> None:
        """Before forward: may start messages. Called again where the step is repeated after a worker was lost."""

    def after_step(self, every: int, common: bool, over: bool) -> None:
        """After the update. every: steps between synchronisations. common: all workers need one model now, to evaluate
        it or to let one join. over: this was the last step.
        """

    def meet(self, every: int) -> None:
        """In place of `after_step`, as the mode ends: all workers get one model, optimizer state and buffers."""

    def finish(self) -> None:
        """Training is over: this worker has the model that is the result. Without messages."""

    def shown(self) -> contextlib.AbstractContextManager[None]:
        """Context in which the module has the weights that are evaluated, the same on all workers."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """The mode is over, or this worker takes over another one's state of it."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what is the same on all workers, and needed to go on."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over another worker's, or a checkpoint's, once the model and the optimizer have."""


class LocalSGD(SyncMethod):
    """local:N: the models are averaged every N steps (Stich 2019), and whenever one common model is needed.

    With `comm.outer_momentum` or `comm.outer_lr` the average is followed by an outer step (DiLoCo), every N steps. As
    in DiLoCo the state of the workers' own optimizers then stays with them: averaging it did not help there, and with
    Adam it sends two more models' bytes, so three times as many. Where one model is needed within a round the models
    are averaged without an outer step, and the round goes on.
    """

    def __init__(self, training: TrainContext) -> None:
        super().__init__(training)
        self._comm = self._session.comm
        self._outer = OuterMomentum(self._opt.updates.weights()) if self._comm.has_outer_step else None
        self.keeps_weights = self._outer is not None
        self._round_began = self._progress.step
        """The step at which the round began, where there is an outer step."""

    def after_step(self, every: int, common: bool, over: bool) -> None:
        at = self._progress
        if self._outer is None:
            if at.drifted >= every or common or over:
                self.meet(every)
        elif (complete := self._round_is_complete(every)) or ((common or over) and at.drifted):
            self._opt.updates.average_models(states=False)
            if complete:
                self._outer_step()
            at.drifted = 0

    def meet(self, every: int) -> None:
        """Averages models, buffers and optimizer states, unless that has just been done. Where a round is complete its
        outer step follows.
        """
        if self._progress.drifted:
            if self._progress.uneven:
                self._opt.updates.agree_on_state()
            self._opt.updates.average_models()
            if self._round_is_complete(every):
                self._outer_step()
            self._progress.drifted, self._progress.uneven = 0, False

    def _round_is_complete(self, every: int) -> bool:
        return self._outer is not None and self._progress.step + 1 - self._round_began >= every

    def _outer_step(self) -> None:
        assert self._outer is not None
        self._outer.step(self._opt.updates.weights(), self._comm.outer_lr, self._comm.outer_momentum)
        self._opt.updates.weights_changed()
        self._round_began = self._progress.step + 1

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

    def __init__(self, training: TrainContext) -> None:
        super().__init__(training)
        self._centre: CentralModel | None = None

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


_METHODS: dict[str, type[SyncMethod]] = {"ssgd": SyncMethod, "local": LocalSGD, "sma": ModelAveraging}


class Synchronisation:
    """Keeps the workers' models together, as `Progress.sync` says. A part of the training state.

    A decision changes the mode on all workers after the same step. Then the models meet in one, as the former mode
    says, and the new mode begins from it.
    """

    def __init__(self, training: TrainContext, new_pair: Callable[[], SyncMethod]) -> None:
        """new_pair: makes the method of the mode `pair`, which needs more of the training."""
        self._training, self._new_pair = training, new_pair
        self._session, self._opt, self._progress = training.session, training.opt, training.progress
        self._sync = Sync()
        """In force in the step under way, up to the meeting at its end."""
        self.method = SyncMethod(training)
        """Of the mode in force; that of ssgd until the first step of another mode."""
        self._params: list[Parameter] = []
        """Those that were trained as the method began: what it keeps is laid out as they are."""

    def before_step(self) -> None:
        """Before forward. Raises CommError, and RuntimeError where the trained parameters must stay, and did not."""
        wanted = Sync.parse(self._progress.sync)
        if self._sync.mode != wanted.mode:
            self._begin(wanted.mode)
        self._sync = wanted
        self._refuse_other_parameters()
        self.method.before_step()

    def after_step(self, common: bool, over: bool) -> None:
        """After the update, and after decisions are applied, which count from the next step on.

        common, over: see `SyncMethod.after_step`. Raises as `before_step`.
        """
        self._refuse_other_parameters()
        view, every = self._session.view, self._sync.every
        if Sync.parse(self._progress.sync).mode == self._sync.mode:
            view_changes = view is not None and self._progress.generation > view.generation
            self.method.after_step(every, common or view_changes, over)
        else:
            self.method.meet(every)
            self._begin("ssgd")

    def _refuse_other_parameters(self) -> None:
        if not self.method.keeps_weights:
            return
        if list(map(id, self._opt.engine.params)) != list(map(id, self._params)):
            raise RuntimeError(
                f"comm.sync={self._progress.sync}: the trained parameters have changed since this mode began: call "
                "kf.set_sync('ssgd') first, change them, then set the mode again"
            )

    def close(self) -> None:
        self._begin("ssgd")

    def _begin(self, mode: str) -> None:
        self.method.close()
        self._sync, self._params = Sync(mode), list(self._opt.engine.params)
        self.method = self._new_pair() if mode == "pair" else _METHODS[mode](self._training)

    def state_dict(self) -> dict[str, Any]:
        return {"mode": self._sync.mode, "every": self._sync.every, "method": self.method.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError where it does not fit."""
        self._begin(state["mode"])
        self._sync = Sync(state["mode"], state["every"])
        self.method.load_state_dict(state["method"])
