"""Training by asynchronous pair averaging (`comm.sync=pair`): each worker at a step of its own, and where all meet.

Between meetings a worker's step has no collective: it averages its model with another's (`kfuse.comm.sync.pair`). The
leader's announcements, views, stops and ledger lines go over the control channel. docs/synchronisation.md says when
workers meet (`kfuse.elastic.meetings`), and what a lost worker changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kfuse.comm.group import CommError, Group
from kfuse.comm.sync.pair import Pair, random_peer
from kfuse.elastic.protocol import Met
from kfuse.elastic.rendezvous import own_address
from kfuse.train.progress import STOP_REASONS, Stage
from kfuse.train.synchronisation import SyncMethod


class PairAveraging(SyncMethod):
    """The `SyncMethod` of `pair`, on one worker. One worker alone has nobody to average with, and trains as ever."""

    keeps_weights = True

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._client: Any = self._session.link
        self._pair: Pair | None = None
        self._group: Group | None = None  # the group that `_pair` belongs to
        # This worker, for the engine: it reduces over nobody.
        self._alone = Group(device=self._session.group.device, timeout_s=self._session.group.timeout_s)
        self._together = True  # all have the same model and step: since the view, or the last meeting
        self._until = 0  # a meeting is called, and another worker has made so many steps: it is held there

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
        self._opt.pair = pair

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
        # After a loss a step may end in a new view, in which the workers first meet in `before_step`. Until then nobody
        # waits here for a meeting: the others may not know of it yet, and wait in `before_step`.
        is_open = self._group is self._session.group
        called = (self._apply_at_once() or self._is_called) and is_open
        step = at.step + 1
        if common or over or (called and step >= self._until):
            self._meet(step)

    def _pass_on(self) -> None:
        """Sends what is requested on rank 0. Each worker gets it from the supervisor, this one too."""
        requested = self._decisions.take_requested()
        if requested and self._session.group.rank == 0:
            self._session.link.send("announce", announcement=requested)

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
        session = self._session
        return session.proposed_generation() > 0 or session.link.stop in STOP_REASONS

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
        self._opt.updates.agree_on_state()  # each worker knows of its own steps only
        self._opt.updates.average_models()
        self._agree()
        self._apply_all(met.announced)
        at.generation = max(at.generation, met.generation)
        at.stop = STOP_REASONS.index(met.stop) if met.stop in STOP_REASONS else at.stop
        at.drifted, at.uneven, self._together = 0, False, True

    def _apply_all(self, until: int) -> None:
        at = self._progress
        for number, announced in self._client.announced(at.announced).items():
            if number <= until:
                self._decisions.apply(announced)
        at.announced = until

    def close(self) -> None:
        """Serves and pulls nothing any more. The engine reduces over all workers again."""
        if self._pair is None:
            return
        self._opt.pair = None
        self._pair.close()
        self._pair = self._group = None
        self._session.apart, self._together, self._client.step = False, True, None
        if self._opt.engine.group.size < self._session.group.size:
            self._opt.engine.set_group(self._session.group)


def left_out(positions: Sequence[int], workers: Sequence[int]) -> dict[int, int]:
    """In a view after a loss all go on from the furthest one's step: by worker, by how many steps it was behind.

    positions: by rank, of `Progress`; -1 for a worker without state. workers: by rank, their numbers.
    """
    stages = len(Stage)
    made = {rank: p // stages + (p % stages > Stage.UPDATE) for rank, p in enumerate(positions) if p >= 0}
    behind = {workers[rank]: max(made.values()) - steps for rank, steps in made.items()}
    return {worker: steps for worker, steps in behind.items() if steps}
