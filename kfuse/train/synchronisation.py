"""How the workers' models are kept together in a training, as `comm.sync` says, and what a change of mode does.

With ssgd there is nothing to do: all workers make the same update. In every other mode each worker updates with its own
gradients, and a `SyncMethod` brings the models together. docs/synchronisation.md says what each mode promises.
"""

from __future__ import annotations

import contextlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

from torch.nn import Parameter

from kfuse.comm.settings import Sync
from kfuse.membership import Session
from kfuse.optim import DistributedOptimizer
from kfuse.train.decisions import Decisions
from kfuse.train.progress import Progress


class SyncMethod:
    """What a mode does beside each worker's own update: by itself nothing, as with ssgd. Its methods may raise
    CommError: then nothing has changed.
    """

    keeps_weights = False  # whether it keeps weights of the trained parameters, which must stay the same ones then

    def __init__(
        self,
        session: Session,
        opt: DistributedOptimizer,
        progress: Progress,
        decisions: Decisions,
        seed: int,
        agree: Callable[[], None],
    ) -> None:
        """agree: at a meeting, once models are averaged: reports what this worker has measured so far, then gives all
        workers the leader's state of all else than the model and the optimizer.
        """
        self._session, self._opt, self._progress = session, opt, progress
        self._decisions, self._seed, self._agree = decisions, seed, agree

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


# The class of each mode. They are imported when a mode begins: most trainings have ssgd alone.
_METHODS = {
    "ssgd": "kfuse.train.synchronisation:SyncMethod",
    "local": "kfuse.train.averaging:LocalSGD",
    "sma": "kfuse.train.averaging:ModelAveraging",
    "pair": "kfuse.train.pair:PairAveraging",
}


class Synchronisation:
    """Keeps the workers' models together, as `Progress.sync` says. A part of the training state.

    A decision changes the mode on all workers after the same step. Then the models meet in one, as the former mode
    says, and the new mode begins from it.
    """

    def __init__(self, *given: Any) -> None:
        """given: the arguments of `SyncMethod`."""
        self._given = given
        self._session, self._opt, self._progress, *_ = given
        self._sync = Sync()  # in force in the step under way, up to the meeting at its end
        self.method = SyncMethod(*given)  # of the mode in force; that of ssgd until the first step of another mode
        self._params: list[Parameter] = []  # those trained as the method began, whose layout its state has

    @property
    def acts(self) -> bool:
        """Whether there is anything to do: a mode other than ssgd is in force, or comes."""
        return type(self.method) is not SyncMethod or self._progress.sync != "ssgd"

    def before_step(self) -> None:
        """Before forward. Raises CommError, and RuntimeError where the trained parameters must stay, and did not."""
        if not self.acts:
            return
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
        self.method = pkgutil.resolve_name(_METHODS[mode])(*self._given)

    def state_dict(self) -> dict[str, Any]:
        return {"mode": self._sync.mode, "every": self._sync.every, "method": self.method.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._begin(state["mode"])
        self._sync = Sync(state["mode"], state["every"])
        self.method.load_state_dict(state["method"])
