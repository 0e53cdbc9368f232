"""Keeps the workers of one training in the same state: at the start, in each new view, and after a lost worker.

After a worker is lost nothing is restarted: the survivors form a new group, take the state of the most advanced one,
which is at most one stage ahead (with comm.sync=pair it may be steps ahead), and continue. With replicated state no
update is made in part; with sharded state one may be, and the survivors finish it first.
"""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kfuse.comm.devices import generators_restored
from kfuse.comm.group import CommError, drop_retired
from kfuse.elastic.protocol import ControlError
from kfuse.membership import Session
from kfuse.optim import ConsistencyError
from kfuse.optim.consistency import parameter_layout
from kfuse.optim.updates import ShardsLost
from kfuse.settings.tree import ConfigError
from kfuse.train.arguments import TrainArguments
from kfuse.train.decisions import Decisions, PolicyCalls
from kfuse.train.progress import STOP_REASONS, Progress, Stage
from kfuse.train.reporter import Reporter
from kfuse.train.state import LARGE, STAYS, TrainingState

if TYPE_CHECKING:
    from kfuse.elastic.protocol import View

_LOG = logging.getLogger("kfuse")


@dataclass(eq=False)
class Recovery:
    """Shares the state of one training among its workers, and writes it to checkpoints."""

    given: TrainArguments
    session: Session
    decisions: Decisions
    calls: PolicyCalls
    state: TrainingState
    progress: Progress
    reporter: Reporter
    record_update: Callable[[], None]  # called where a step's update was finished here

    def __post_init__(self) -> None:
        comm = self.session.comm
        params = (p for each in self.given.opts for group in each.param_groups for p in group["params"])
        # What must be equal on all workers, by name: each computes its share of a step from it.
        self._arguments = self.given.shared | {
            "samples of data": self.progress.began_with["dataset size"],
            "comm.audit_every": comm.audit_every,
            "comm.audit_on_corruption": comm.audit_on_corruption,
            "comm.state": comm.state,
            "types and memory layouts of parameters": parameter_layout(params),
        }
        self._has_state = False
        self._torn = False  # this worker's tensors are parts of two states: the worker that sent one was lost
        # The worker whose shards this one mirrors since the newest view in which all had the state.
        self._mirrored: int | None = None
        self._to_begin_from: Mapping[str, Any] | None = None  # where there is no checkpoint to resume from
        # The state that training ended with, without the model and the optimizer; None: it has not ended.
        self._ended: Mapping[str, Any] | None = None
        # (step, reason) of the last loss of parts of sharded optimizer state; None once training goes on.
        self._lost: tuple[int, str] | None = None
        # Step at which training began without a checkpoint: up to its update, workers keep the shards from before it.
        self._fresh_at: int | None = None
        if self.given.checkpoints is not None and not self.session.elastic:
            self.session.group.waits_each_step = True  # a last checkpoint must not hold an update by an incomplete sum

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Context of a training. If the supervisor is lost, or in a job without one another worker, a worker that has
        the training state writes a last checkpoint. Where the supervisor is lost, also if something else ends the loop:
        mostly a print whose reader is gone.
        """
        self.session.begin_training()
        failed_at = None
        try:
            with generators_restored(self.session.group.device):
                yield
        except (Exception, GeneratorExit) as error:
            failed_at = self.progress.step if isinstance(error, Exception) else None
            if self.session.replica is not None:
                self.session.replica.await_end()
            if isinstance(error, ConsistencyError | ConfigError):
                self.session.link.give_up(str(error))
            elif isinstance(error, ControlError | CommError) or self.session.loses_supervisor():
                self.session.lost = True
                self._abort()
                if self.session.comm.sharded:
                    _LOG.warning("no last checkpoint is written: comm.state=sharded, and not all workers are there")
                elif self._has_state and self.given.checkpoints is not None:
                    with self.session.link.saving():
                        writes = self.session.writes_last
                        self.given.checkpoints.save_last(self.progress.step, self.state.capture_on_leader, alone=writes)
            raise
        finally:
            self.session.end_training(failed_at)

    def join(self) -> None:
        """Enters the first view, once, and takes over the others' state if there is one. Raises CommError."""
        if not self._has_state:
            self.session.ensure_joined()
            self._share_state()

    def cross_boundary(self) -> None:
        """Between two steps: writes a checkpoint if one is due, and switches to the view that the leader announced.

        If this worker is not in it, `session.left` is set. Raises CommError if the view cannot be formed.
        """
        session, at = self.session, self.progress
        if session.elastic:
            if session.replica is None:  # else its other ranks would be left alone in the next forward
                session.check()
            elif self.given.checkpoints is not None and self.given.checkpoints.is_due_after(at.step):
                session.together(session.check, "a checkpoint")  # the leader may be lost, who would write it
            session.form_early()
            drop_retired()
        if self.given.checkpoints is not None and not session.apart:  # else each worker has a model of its own
            self.given.checkpoints.save_when_due(at.step, at.epoch, self.state.capture_on_leader)
        if session.view is None or at.generation <= session.view.generation:
            self.decisions.measure_links()
            return
        started = time.perf_counter()
        if session.switch(at.generation):
            self._share_state(time.perf_counter() - started)
            # A worker that joins begins here. With sharded state all must send it what is due: a checkpoint
            # that had to wait for the last one's writing.
            self.cross_boundary()
        elif self.given.checkpoints is not None:
            self.given.checkpoints.close()

    def recover(self, error: CommError) -> None:
        """Forms a group with the survivors, repeatedly if needed, and takes over the most advanced one's state.

        If this worker is in no view any more, `session.left` is set. Raises `error` itself if there is no supervisor,
        ControlError if the supervisor is lost.
        """
        if not self.session.elastic:
            raise error
        started = time.perf_counter()
        while True:
            traceback.clear_frames(error.__traceback__)  # messages there would keep the group's connections open
            self._abort()
            for opt in self.given.opts:
                opt.zero_grad()  # an update that failed has left the step's gradients
            self._align_engine()
            try:
                if self.session.recover(error):
                    self._share_state(time.perf_counter() - started)
                return
            except CommError as again:
                error = again

    def _abort(self) -> None:
        for opt in self.given.opts:
            opt.engine.abort()

    def take_leaders_state(self) -> None:
        """All workers have averaged their models: each takes rank 0's state of all else. Raises CommError."""
        group = self.session.group
        room = None if group.rank == 0 else lambda structure: None
        received = self._shared(0, partial(self.state.capture, without=LARGE), room)
        if received is not None:
            self.state.restore_some(received)

    def save_last(self, fails: bool = False) -> None:
        """fails: training has not come to its end, but must not go on here."""
        if self.given.checkpoints is not None:
            ends = STOP_REASONS[self.progress.stop] in ("", "stopped")  # else it was told to stop: little time is left
            self.given.checkpoints.save_last(self.progress.step, self.state.capture_on_leader, ends and not fails)
            if ends:
                self.given.checkpoints.close()

    # -- for kf.state_dict ----------------------------------------------------------------------------------------

    def snapshot(self, in_body: bool) -> dict[str, Any]:
        """As `Trainer.state_dict`. in_body: it is called in a step's body, after the update."""
        from kfuse.checkpoint import snapshot  # few trainings need it

        if self._ended is not None:
            return {**snapshot(self.state.capture(only=STAYS), "the training state"), **self._ended}
        stage = self.progress.stage
        in_hook = not in_body and stage in (Stage.AFTER_STEP, Stage.AFTER_EPOCH)
        if not (self._has_state and (in_body or in_hook or stage == Stage.BOUNDARY)):
            raise RuntimeError(
                "kf.state_dict: call it between steps: in the loop's body after opt.step(), in a policy's after_step "
                "or after_epoch, or when training is over"
            )
        state: dict[str, Any] = snapshot(self.state.capture(), "the training state")
        state["progress"]["stage"] += in_hook  # the hook counts as done
        return state

    def keep_ended(self) -> None:
        """Training ends with the present state, which `snapshot` returns from now on, with the model as it is then."""
        from kfuse.checkpoint import snapshot

        self._ended = snapshot(self.state.capture(without=STAYS), "the training state")

    def begin_from(self, state: Mapping[str, Any]) -> None:
        """Begins from this state, where there is no checkpoint to resume from. Raises RuntimeError once training has
        begun, and ValueError for the state of another training.
        """
        if self._has_state:
            raise RuntimeError("kf.load_state_dict: training has begun: call it before the first step")
        self.state.check(state)
        self._to_begin_from = state

    # -- a new view -----------------------------------------------------------------------------------------------

    def _share_state(self, regroup_s: float = 0.0) -> None:
        """In a new view: the most advanced worker's state comes to all that are behind it (new ones have none).

        Where a part of the sharded optimizer state is lost with its workers, all go back to a checkpoint.
        """
        if (replica := self.session.replica) is not None:  # a state of some of its ranks alone is none
            mine = [self.progress.position if self._has_state else -1, self._torn]
            places, torn = zip(*replica.every(mine, "who has the training state"), strict=True)
            self._has_state = self._has_state and len({*places}) == 1
            self._torn = any(torn) or len({*places}) > 1
        self.session.together(partial(self._share_own_state, regroup_s), "sharing the training state")

    def _share_own_state(self, regroup_s: float) -> None:
        """As `_share_state`, of this process alone."""
        try:
            self._share_newest_state(regroup_s)
        except ShardsLost as error:  # on all workers alike
            self._lost, requested = (self.progress.step, str(error)), self.decisions.workers_requested
            self._has_state = False
            self._align_engine()
            self._share_newest_state(regroup_s, requested)

    def _share_newest_state(self, regroup_s: float, requested: int = 0) -> None:
        """Shares the state and reports the view. requested: the workers that this job was last asked for; 0: none."""
        view, group = self.session.view, self.session.group
        if view is None:  # one process, and nobody to share with
            if self._load_or_begin(restarted=False):
                self.reporter.resend()
            return
        started = time.perf_counter()
        if self._has_state:
            self.decisions.leave_view()
        if self.given.opt.engine.options.sharded:
            self._finish_interrupted_update()
        positions = self._gather_positions()
        begins = max(positions) < 0  # no worker has a state: the job starts, or restarts
        loaded, at = False, self.progress
        if begins:
            if group.rank == 0:
                loaded = self._load_or_begin(restarted=view.reason != "start")
                self.decisions.workers_requested = requested or self.decisions.workers_requested or view.size
                self._fresh_at = None if loaded else at.step
            positions = self._gather_positions()  # now rank 0 is the most advanced: its state replaces the others'
        no_update = self._fresh_at == at.step and at.stage <= Stage.UPDATE  # since it began without a checkpoint
        in_shards = self._take_newest_state(positions, begins, no_update)
        self._fresh_at = at.step if in_shards else None
        self.given.opt.updates.regroup(self._has_state or in_shards)
        if self.given.checkpoints is not None:
            self.given.checkpoints.agree()
        self._has_state, self._torn = True, False
        self._mirrored = self.session.workers[group.before[group.rank]]
        if group.rank == 0 and not begins:
            self.decisions.request(workers=self.decisions.workers_requested)  # the last leader may not have sent it
        if group.rank == 0 and (loaded or not begins):
            self.reporter.resend()
        self._report_view(view, regroup_s, time.perf_counter() - started, positions)
        self.decisions.measure_links()
        if self.given.opt.engine.choice is not None and self.given.opt.engine.topology is None:
            self.reporter.event(self.progress.step, "schedule", **asdict(self.given.opt.engine.choice))

    def _gather_positions(self) -> list[int]:
        """Returns by rank `Progress.position`; -1 for a worker without state."""
        group = self.session.group
        mine = torch.tensor([self.progress.position if self._has_state else -1], device=group.device)
        return [int(position) for position in group.all_gather(mine, "progress of each worker")]

    def _take_newest_state(self, positions: Sequence[int], begins: bool, in_shards: bool) -> bool:
        """The workers that are behind take the state of the most advanced one.

        positions: by rank. in_shards: all workers have shards of its optimizer state; it tells the others, to whom that
        is returned.
        """
        newest, is_behind = max(positions), positions[self.session.group.rank] < max(positions)
        if min(positions) == newest:
            return in_shards
        received = self._shared(
            positions.index(newest),
            lambda: [self._arguments, in_shards, self.state.capture_common()],
            partial(self._make_room, begins=begins) if is_behind else None,
        )
        if received is None:
            return in_shards
        theirs, in_shards, newest_state = received
        for name, own in self._arguments.items():
            if own != theirs[name]:
                raise ValueError(
                    f"this worker was given other arguments than the one whose state it takes ({name} {own} here, "
                    f"{theirs[name]} there): all workers must be given the same"
                )
        self.state.restore(newest_state, keeps_shards=self._has_state or in_shards)
        self._align_engine()
        return bool(in_shards)

    def _shared(self, source: int, capture: Callable[[], Any], room: Callable[[Any], Any] | None) -> Any:
        """As `chunks.share`, in the session's group. Raises CommError."""
        from kfuse.comm import chunks  # where there are several workers

        return chunks.share(self.session.group, source, capture, room)

    def _make_room(self, structure: Any, begins: bool) -> list[Any] | None:
        """Returns this worker's own tensors, for the newest state to overwrite. None where it has a state, or in a
        beginning may have one: if the sender is lost meanwhile, training must be able to go on from that.
        """
        if self._has_state or (begins and not self._torn):
            return None
        self._torn = True
        *_, state = structure
        return [None, None, self.state.room_for(state)]

    def _finish_interrupted_update(self) -> None:
        """With sharded state: where a survivor has begun the step's update, all end it, and one has all parameters.

        That one is the most advanced then, and the others take over the rest of the state from it.
        """
        from kfuse.optim.resume import begun_update, has_begun, resume_update  # few jobs need it

        opt, at, group = self.given.opt, self.progress, self.session.group
        begun = self._has_state and at.stage == Stage.UPDATE and has_begun(opt, at.step)
        mine = torch.tensor([at.position if self._has_state else -1, begun], device=group.device)
        places = [row.tolist() for row in group.all_gather(mine, "how far the step's update is")]
        newest = max(places)
        if not newest[1]:
            return  # nobody has: the step is made again. Or one is beyond it: then each has updated all of its part
        source = places.index(newest)
        take = None if begun else lambda structure: None
        given = self._shared(source, lambda: begun_update(opt), take)
        if self._has_state:
            owner_is_lost = self._mirrored not in self.session.workers
            resume_update(opt, given or begun_update(opt), at.step, owner_is_lost)
        opt.updates.collect_parameters(source, self._has_state)
        if group.rank == source:
            self.record_update()
            self._align_engine()

    def _load_or_begin(self, restarted: bool) -> bool:
        """Begins from a checkpoint, or the state given, if there is one, and returns whether there is; else applies the
        policy's initial settings.
        """
        checkpoints = self.given.checkpoints
        saved: Mapping[str, Any] | None = None if checkpoints is None else checkpoints.load(restarted)
        if saved is None and self._lost is not None:
            why = f"{self._lost[1]}, and there is no checkpoint to go on from"
            self.session.link.give_up(why)
            raise ShardsLost(why)
        saved = self._to_begin_from if saved is None else saved
        if saved is None and self._torn:
            raise RuntimeError(
                "the training state is lost: the only worker that had the newest one was lost while it sent it to the "
                "others, and there is no checkpoint to go on from"
            )
        if saved is not None:
            self._restore(saved)
        # The first step whose statistics are not read yet; without one the coming step. Reported before the others have
        # the state: a view after a loss until then counts as no beginning.
        unreported = min(self.progress.contexts, default=self.progress.step)
        self.reporter.start(unreported, checkpoints is not None and checkpoints.restarts)
        if saved is None:
            self.calls.begin()
        self._has_state, self._torn = True, False
        return saved is not None

    def _restore(self, saved: Mapping[str, Any]) -> None:
        """Takes over an earlier run's state, without what its workers were told. Raises ConfigError for another's."""
        at = self.progress
        began_with = at.began_with
        at.refuse_other_beginning(saved["progress"])
        configured = [group.get("lr") for group in self.given.opt.param_groups]
        self.state.restore(saved)
        self.reporter.forget_events()
        self._align_engine()
        at.began_with = began_with
        if "lr_base" in self.given.settings:  # the groups of an optimizer of one's own may have several rates
            for group, rate in zip(self.given.opt.param_groups, configured, strict=True):
                if rate is not None:
                    group["lr"] = rate
        at.corrupt = ()  # numbers of another job's workers
        self.decisions.forget_job()

    def _align_engine(self) -> None:
        """Gives each engine the number of its coming step: it may have reduced one whose update was not made."""
        for index, opt in enumerate(self.given.opts):
            opt.engine.step = self.progress.updates_of(index)

    def _report_view(self, view: View, regroup_s: float, transfer_s: float, positions: Sequence[int]) -> None:
        """Reports the view, and a return to the last checkpoint."""
        went_back, self._lost = self._lost, None
        at, workers = self.progress, self.session.workers
        self.reporter.view(at.step, view, regroup_s, transfer_s)
        group, comm = self.session.group, self.session.comm
        if self.session.elastic and comm.sharded and comm.redundancy != "none" and len({*group.hosts}) > 1:
            from kfuse.comm.copies import beside

            if ranks := beside(group.hosts):
                self.reporter.event(at.step, "copy_beside", workers=[workers[rank] for rank in ranks])
        if went_back is not None:
            step, why = went_back
            self.reporter.event(at.step, "went_back", steps=step - at.step, why=why)
        if at.is_apart:
            from kfuse.train.pair import left_out

            if behind := left_out(positions, workers):
                self.reporter.event(at.step, "left_out", workers=list(behind), steps=list(behind.values()))
