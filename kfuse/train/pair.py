"""Training by asynchronous pair averaging (`comm.sync=pair`): each worker at a step of its own, and where all meet.

Between meetings a worker's step has no collective: its gradients stay with it, and it averages its model with another
worker's (`kfuse.comm.sync.pair`). What else workers tell each other goes over the control channel, by the supervisor:

- The leader's announcements. They reach each worker while it makes a step, and count from its next step boundary on. A
  factor of the learning rate is applied there. Anything else must be applied by all workers at one step: at a meeting,
  which it calls.
- A view, and a request to stop, which the supervisor sends to all workers: they call a meeting too.
- Each worker's own ledger lines; the leader's loss.

A meeting (`kfuse.elastic.meetings`): workers that are behind go on to the step of the furthest one, so that no sample
is left out. (When the job stops, they have a few seconds for that.) There all average their models, take the leader's
state of all else (statistics, policy, progress), and go on with one state, asynchronously again if that is still the
mode. Meetings that no one calls are at the end of an epoch, at an evaluation, at a checkpoint and at the end of
training.

A lost worker ends nothing: the others make the step under way, and form a view without it, as in any mode. One that is
behind takes the furthest one's state then, and the samples that it had left up to there are left out. What the lost one
had used beyond that is used again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from kfuse.comm.group import CommError, Group
from kfuse.comm.sync.pair import Pair, random_peer
from kfuse.elastic.client import ControlClient, Met
from kfuse.elastic.rendezvous import own_address
from kfuse.membership import Session
from kfuse.optim import DistributedOptimizer
from kfuse.train.decisions import Decisions
from kfuse.train.progress import STOP_REASONS, Progress


class PairAveraging:
    """The `SyncMethod` of `pair`, on one worker. One worker alone has nobody to average with, and trains as ever."""

    keeps_weights = True

    def __init__(
        self,
        session: Session,
        opt: DistributedOptimizer,
        progress: Progress,
        decisions: Decisions,
        seed: int,
        agree: Callable[[], None],
    ) -> None:
        """seed: of the choice of peers. agree: at a meeting, once models are averaged: reports what this worker has
        measured so far, then gives all workers the leader's state of all else than the model and the optimizer.
        """
        self._session, self._opt, self._progress, self._decisions = session, opt, progress, decisions
        self._seed, self._agree = seed, agree
        self._pair: Pair | None = None
        self._group: Group | None = None
        """The group that `_pair` belongs to."""
        self._alone = Group(device=session.group.device, timeout_s=session.group.timeout_s)
        """This worker, for the engine: it reduces over nobody."""
        self._together = True
        """All workers have the same model and are at the same step: since the view, or the last meeting."""
        self._until = 0
        """A meeting is called, and another worker has made so many steps: it is held there."""

    # -- a step ---------------------------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Takes leave of the others, after a meeting or in a new view; chooses whom to pull from. Raises CommError."""
        group, step = self._session.group, self._progress.step
        if group.size == 1:
            self.close()
            return
        if self._pair is None or self._group is not group:
            self._open(group)
        elif self._together:
            self._pair.restart(self._opt.updates.weights(), step)
            group.barrier("all workers offer the common model")
        assert self._pair is not None
        self._together = False
        if self._opt.engine.group is not self._alone:
            self._opt.engine.set_group(self._alone)
        self._session.apart = True
        self._client.step = step
        self._pair.begin_step(step)

    def _open(self, group: Group) -> None:
        """In a new view: serves this worker's model, and learns where the others' are. Raises CommError."""
        self.close()
        view = self._session.view
        assert view is not None
        host, step = own_address(*view.store), self._progress.step
        pair = Pair(self._opt.updates.weights(), group.rank, host, random_peer(self._seed, group.rank), step)
        try:
            pair.meet(group)
        except CommError:
            pair.close()
            raise
        self._pair, self._group, self._until = pair, group, 0
        self._opt.average_with(pair)

    def after_step(self, every: int, common: bool, over: bool) -> None:
        """At a step boundary: sends and applies announcements, and meets the others where that is due.

        common, over: all workers need one model after this step. Raises CommError.
        """
        at = self._progress
        if not at.drifted:
            return
        if self._session.group.size == 1:  # the others are lost, and what was announced before is not
            self._apply_all(max(self._client.announced(at.announced), default=at.announced))
            return
        self._pass_on()
        called = self._apply_at_once() or self._is_called
        step = at.step + 1
        if common or over or (called and step >= self._until):
            self._meet(step)

    def _pass_on(self) -> None:
        """Sends what is requested on rank 0. Each worker gets it from the supervisor, this one too."""
        requested = self._decisions.take_requested()
        if requested and self._session.group.rank == 0:
            self._session.announce(requested)

    def _apply_at_once(self) -> bool:
        """Applies factors of the learning rate that have arrived. Returns whether more has, which needs a meeting."""
        at = self._progress
        for number, announced in self._client.announced(at.announced).items():
            if announced.keys() != {"lr_scale"}:  # the factor that leads to a rate differs from step to step
                return True
            self._decisions.apply(announced)
            at.announced = number
        return False

    @property
    def _is_called(self) -> bool:
        """Whether the supervisor has told all workers of a view or of a stop."""
        session = self._session
        return session.proposed_generation() > 0 or session.stop_reason() in STOP_REASONS

    # -- a meeting ------------------------------------------------------------------------------------------------

    def meet(self, every: int) -> None:
        """Another mode begins. Where there are several workers they have just met: it was announced so."""
        self._progress.drifted = 0

    def _meet(self, step: int) -> None:
        """Waits for the others at `step`. Where one of them is further, returns: this worker goes on up to there."""
        while True:
            met = self._session.meet(step, self._progress.announced)
            if met.low == met.high:
                break
            if step < met.high:
                self._until = met.high
                return
        self._hold(met)

    def _hold(self, met: Met) -> None:
        """All workers are here: one model, one state, the same settings."""
        at, session = self._progress, self._session
        session.apart, self._client.step, self._until = False, None, 0
        self._opt.engine.set_group(session.group)
        self._decisions.use_transport()
        self._opt.agree_on_state()  # each worker knows of its own steps only
        self._opt.average_models()
        self._agree()
        self._apply_all(met.announced)
        at.generation = max(at.generation, met.generation)
        at.stop = STOP_REASONS.index(met.stop) if met.stop in STOP_REASONS else at.stop
        at.drifted, at.uneven, self._together = 0, False, True

    def _apply_all(self, until: int) -> None:
        """Applies the announcements up to this number."""
        at = self._progress
        for number, announced in self._client.announced(at.announced).items():
            if number <= until:
                self._decisions.apply(announced)
        at.announced = until
        self._client.forget_announced(until)

    def shown(self) -> contextlib.AbstractContextManager[None]:
        """The models are the same: `after_step` was told."""
        return contextlib.nullcontext()

    def finish(self) -> None:
        """All workers have the same model: they have met after the last step."""

    def close(self) -> None:
        """Serves and pulls nothing any more. The engine reduces over all workers again."""
        if self._pair is None:
            return
        self._opt.average_with(None)
        self._pair.close()
        self._pair = self._group = None
        self._session.apart, self._together, self._client.step = False, True, None
        if self._opt.engine.group.size < self._session.group.size:
            self._opt.engine.set_group(self._session.group)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the model is in the optimizer's, the rest in the progress."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to take over."""

    @property
    def _client(self) -> ControlClient:
        client = self._session.control_client
        assert client is not None, "there is no supervisor"  # refused before training
        return client
