"""Training by asynchronous pair averaging (`comm.sync=pair`): each worker at a step of its own, and where all meet.

Between meetings a worker's step has no collective: it averages its model with another's (`kfuse.comm.sync.pair`). The
leader's decisions, views, stops and ledger lines go over the session's link. docs/synchronisation.md says when workers
meet, and what a lost worker changes.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from kfuse.comm.group import CommError, Group, in_thread
from kfuse.comm.settings import Sync
from kfuse.comm.sync.pair import Pair, random_peer
from kfuse.elastic.protocol import HEARTBEAT_S, ControlError
from kfuse.elastic.rendezvous import own_address
from kfuse.membership import Session
from kfuse.train.progress import STOP_REASONS, Stage
from kfuse.train.synchronisation import SyncMethod

_POLL_S = 0.1  # at most; as long as a tenth of the time waited, up to this


class Meeting:
    """Where the workers of a view meet, over its store.

    In each round a worker writes how many steps it has made, waits until all have written, and reads all. Where they
    differ, those behind go on to the highest number, and another round follows.
    """

    def __init__(self, session: Session) -> None:
        self._session, self.group = session, session.group
        self._written: list[str] = []  # the keys of this worker in the meeting under way, one a round
        self._stands_since = self._moved_at = 0.0
        self._telling: Future[int] | None = None  # that it has moved; what fails there is noticed at the meeting

    def moved(self) -> None:
        """This worker has made a step: those that stand still wait on. It tells so once in a heartbeat's time.

        In a thread: the store may be beyond a link that is cut.
        """
        if (now := time.monotonic()) - self._moved_at >= HEARTBEAT_S and (not self._telling or self._telling.done()):
            self._moved_at, self._telling = now, in_thread(partial(self.group.store.add, "steps", 1))

    def round(self, met_at: int, said: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Stands still until all workers do, and returns by rank what each has said.

        met_at: the step of the last meeting, the same on all workers. said: `step`, and plain JSON values. Raises
        CommError if a worker is lost meanwhile, or none of the others makes a step for long, ControlError if the
        supervisor is lost.
        """
        keys = [f"met/{met_at}/{len(self._written)}/{rank}" for rank in range(self.group.size)]
        if not self._written:
            self._stands_since = time.monotonic()
        self._written.append(keys[self.group.rank])
        what = f"meeting of all workers after step {said['step']}"
        try:
            self.group.store.set(self._written[-1], json.dumps(said))
            self._await(keys, what)
            return [json.loads(each) for each in self.group.store.multi_get(keys)]
        except (CommError, ControlError):
            raise
        except RuntimeError as error:
            raise CommError(f"{what}: the view's store is lost: {error}") from error

    def _await(self, keys: list[str], what: str) -> None:
        session, store, link = self._session, self.group.store, self._session.link
        # A worker that is cut off may come back until the supervisor kills it.
        timeout_s = max(self.group.timeout_s, 2 * link.silence_s)
        began = moved_at = time.monotonic()
        made = store.add("steps", 0)
        while not store.check(keys):
            session.check()
            now = time.monotonic()
            if (newest := store.add("steps", 0)) != made:
                made, moved_at = newest, now
            if now - moved_at > timeout_s:
                raise CommError(f"{what}: {self.group.whom()} made no step for {timeout_s:.0f} s")
            if link.stop is not None and now - self._stands_since > link.catch_up_s:
                link.send("far_behind", generation=session.newest_generation())
            time.sleep(min(_POLL_S, 0.1 * (now - began) + 0.001))

    def end(self) -> None:
        """All workers have left the meeting."""
        with contextlib.suppress(RuntimeError):
            for key in self._written:
                self.group.store.delete_key(key)
        self._written = []


class PairAveraging(SyncMethod):
    """The `SyncMethod` of `pair`, on one worker. One worker alone has nobody to average with, and trains as ever."""

    keeps_weights = True

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._pair: Pair | None = None
        self._group: Group | None = None  # the group that `_pair` belongs to
        self._meeting = Meeting(self._session)
        # This worker, for the engine: it reduces over nobody.
        self._alone = Group(device=self._session.group.device, timeout_s=self._session.group.timeout_s)
        self._together = True  # all have the same model and step: since the view, or the last meeting
        self._met_at = self._progress.step  # the step at which all were together, in this mode, for the last time
        self._until = 0  # a meeting is called, and another worker has made so many steps: it is held there
        self._counts = Counter[str]()  # of all `Pair`s, since the last meeting
        self._pending: list[dict[str, Any]] = []  # the leader's decisions that the next meeting applies, in order

    def before_step(self) -> None:
        """Takes leave of the others, after a meeting or in a new view; chooses whom to pull from. Raises CommError."""
        group, step = self._session.group, self._progress.step
        if group.size == 1:
            self.close()
            return
        if self._pair is None or self._group is not group:
            self._open(group)
            self._of_view().end()
        elif self._together:
            self._pair.restart(self._opt.updates.weights(), step)
            group.barrier("all workers offer the common model")
            self._of_view().end()
        assert self._pair is not None
        self._together = False
        if self._opt.engine.group is not self._alone:
            self._opt.engine.set_group(self._alone)
        self._session.apart = True
        sync = Sync.parse(self._progress.sync)
        self._session.link.bears_cuts = sync.far is not None
        self._pair.begin_step(step, (0,) if sync.far is None else (sync.every, sync.far))

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
        pair.counts = self._counts
        self._opt.pair = pair
        pending, self._pending = self._pending, []
        if group.rank == 0:  # the others may have taken the state of a worker that did not know them
            for each in pending:
                self._announce(each)

    def after_step(self, every: int, common: bool, over: bool) -> None:
        """At a step boundary: sends and applies the leader's decisions, and meets the others where that is due.

        common, over: all workers need one model after this step. Raises CommError.
        """
        session = self._session
        if not self._progress.drifted:
            return
        for each in session.link.take_apart():
            if each["met_at"] == self._met_at:  # else it came late: the last meeting has applied it
                self._take(each["apart"])
        if session.group.size == 1:  # the others are lost, and what was announced before is not
            self._apply(self._pending)
            return
        requested = self._decisions.take_requested()
        if requested and session.group.rank == 0:
            self._announce(requested)
        self._of_view().moved()
        # After a loss a step may end in a new view, in which the workers first meet in `before_step`. Until then nobody
        # waits here for a meeting: the others may not know of it yet, and wait in `before_step`.
        called = self._pending or session.proposed_generation() > 0 or session.link.stop in STOP_REASONS
        step = self._progress.step + 1
        if common or over or (called and self._group is session.group and step >= self._until):
            self._meet(step)

    def _of_view(self) -> Meeting:
        if self._meeting.group is not self._session.group:
            self._meeting = Meeting(self._session)
        return self._meeting

    def _announce(self, decision: dict[str, Any]) -> None:
        """On rank 0: sends a decision, and takes it as the others do."""
        self._session.link.publish({"apart": decision, "met_at": self._met_at})
        self._take(decision)

    def _take(self, decision: dict[str, Any]) -> None:
        """Applies a factor of the learning rate; all else needs a meeting, and so does what comes after it."""
        if decision.keys() == {"lr_scale"} and not self._pending:  # the factor that leads to a rate differs by step
            self._decisions.apply(decision)
        else:
            self._pending.append(decision)

    def _apply(self, pending: Sequence[Mapping[str, Any]]) -> None:
        for each in pending:
            self._decisions.apply(each)
        self._pending = []

    def meet(self, every: int) -> None:
        """Another mode begins. Where there are several workers they have just met: it was announced so."""
        self._progress.drifted = 0

    def _meet(self, step: int) -> None:
        """Waits for the others at `step`. Where one of them is further, returns: this worker goes on up to there."""
        session = self._session
        while True:
            knows = {"generation": session.proposed_generation(), "stop": session.link.stop or ""}
            says = {"step": step, "pending": self._pending, "pulls": self._counts, **knows}
            said = self._of_view().round(self._met_at, says)
            self._until = max(each["step"] for each in said)
            if step < self._until:
                return
            if min(each["step"] for each in said) == step:
                break
        counts = [Counter(each.pop("pulls")) for each in said]
        self._counts.clear()
        self._hold(**said[0])
        self._progress.pulls = dict(sum(counts, Counter(self._progress.pulls)))

    def _hold(self, step: int, pending: Sequence[Mapping[str, Any]], generation: int, stop: str) -> None:
        """All workers are here, at one step: one model, one state, and what the leader said of all else."""
        at, session = self._progress, self._session
        session.apart, self._until = False, 0
        self._opt.engine.set_group(session.group)
        self._decisions.use_transport()
        self._opt.updates.agree_on_state()  # each worker knows of its own steps only
        self._opt.updates.average_models()
        self._agree()
        self._apply(pending)
        at.generation = max(at.generation, generation)
        at.stop = STOP_REASONS.index(stop) if stop in STOP_REASONS[1:] else at.stop
        at.drifted, at.uneven, self._together, self._met_at = 0, False, True, step

    def close(self) -> None:
        """Serves and pulls nothing any more. The engine reduces over all workers again."""
        if self._pair is None:
            return
        self._opt.pair = None
        self._session.link.bears_cuts = False
        self._pair.close()
        self._pair = self._group = None
        self._session.apart, self._together = False, True
        if self._opt.engine.group.size < self._session.group.size:
            self._opt.engine.set_group(self._session.group)

    def state_dict(self) -> dict[str, Any]:
        return {"pending": self._pending, "met_at": self._met_at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._pending, self._met_at = list(state["pending"]), state["met_at"]


def left_out(positions: Sequence[int], workers: Sequence[int]) -> dict[int, int]:
    """In a view after a loss all go on from the furthest one's step: by worker, by how many steps it was behind.

    positions: by rank, of `Progress`; -1 for a worker without state. workers: by rank, their numbers.
    """
    stages = len(Stage)
    made = {rank: p // stages + (p % stages > Stage.UPDATE) for rank, p in enumerate(positions) if p >= 0}
    behind = {workers[rank]: max(made.values()) - steps for rank, steps in made.items()}
    return {worker: steps for worker, steps in behind.items() if steps}
