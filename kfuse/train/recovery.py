"""Keeps the workers of one training together: who starts from what, new views, and the loss of a worker.

After a loss nothing is restarted. The survivors form a new group, take the state of the most advanced one (nobody can
be more than one stage ahead, and updates are never torn), and go on; the samples of the lost worker's step are spread
over the rest.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from kfuse.comm.group import CommError, drop_retired
from kfuse.elastic.client import ControlError
from kfuse.optim import ConsistencyError, DistributedOptimizer
from kfuse.session import Session
from kfuse.train import state as training_state
from kfuse.train.decisions import Decisions
from kfuse.train.reporter import Reporter
from kfuse.train.state import Progress, TrainingState
from kfuse.train.step import generators_restored

if TYPE_CHECKING:
    from kfuse.checkpoint.manager import Checkpoints


class Recovery:
    """The state of one training, and the workers that share it."""

    def __init__(
        self,
        session: Session,
        opt: DistributedOptimizer,
        progress: Progress,
        decisions: Decisions,
        state: TrainingState,
        checkpoints: Checkpoints | None,
        reporter: Reporter,
        arguments: Mapping[str, Any],
        base_lr: float | None,
    ) -> None:
        """arguments: what must be the same on all workers, by name: each one computes its share from it.

        base_lr: the configured learning rate, which wins over a checkpoint's; None: the checkpoint's.
        """
        self._session, self._opt, self._progress, self._decisions = session, opt, progress, decisions
        self._state, self._checkpoints, self._reporter = state, checkpoints, reporter
        self._arguments, self._base_lr = dict(arguments), base_lr
        self._joined = self._has_state = False

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Context of a training. If it fails and checkpoints are enabled, writes a last one before re-raising.

        It fails for good where the supervisor is lost, or a worker is and there is no supervisor. A worker that is lost
        before it has the training's state writes none: that would replace the checkpoints which it was to resume from.
        """
        self._session.begin_training()
        failed_at = None
        try:
            with generators_restored(self._session.group.device):
                yield
        except Exception as error:
            failed_at = self._progress.step
            if isinstance(error, ControlError | CommError):
                self._session.lost = True
                self._opt.engine.abort()
                if self._has_state and self._checkpoints is not None:
                    self._checkpoints.save_last(self._progress.step, self._state.capture)
            elif isinstance(error, ConsistencyError):
                self._session.give_up(str(error))
            raise
        finally:
            self._session.end_training(failed_at)

    def join(self) -> None:
        """Enters the first view, once, and takes over the others' state if there is one. Raises CommError."""
        if not self._joined:
            self._joined = True  # also where it fails: then `recover` enters the next view
            self._session.ensure_joined()
            self._synchronize()

    def cross_boundary(self) -> None:
        """Between two steps: writes a checkpoint if one is due, and moves to the view that the leader announced.

        Where this worker is not in it, `session.left` is set. Raises CommError where it does not come about.
        """
        session, at = self._session, self._progress
        if session.elastic:
            session.check()
            drop_retired()
        if self._checkpoints is not None:
            self._checkpoints.save_when_due(at.step, self._state.capture)
        if session.view is None or at.generation <= session.view.generation:
            return
        started = time.perf_counter()
        if session.switch(at.generation):
            self._synchronize(time.perf_counter() - started)
        elif self._checkpoints is not None:
            self._checkpoints.close()

    def recover(self, error: CommError) -> None:
        """Regroups with the survivors, as often as it takes, and takes over the most advanced one's state.

        Where this worker is in no view any more, `session.left` is set. Raises the error itself where there is no
        supervisor, ControlError where that one is lost.
        """
        if not self._session.elastic:
            raise error
        started = time.perf_counter()
        while True:
            self._opt.engine.abort()
            try:
                if self._session.recover(error):
                    self._synchronize(time.perf_counter() - started)
                return
            except CommError as again:
                error = again

    def _synchronize(self, regroup_s: float = 0.0) -> None:
        """In a new view: workers that are behind (a joiner is far behind) get the most advanced one's state."""
        view, group = self._session.view, self._session.group
        if view is None:
            self._take_up(restarted=False)
            return
        started = time.perf_counter()
        orders = self._gather_orders()
        begins = max(orders) < 0  # nobody has any state: the job starts, or starts anew
        if begins:
            if group.rank == 0:
                self._take_up(restarted=view.reason != "start")
            orders = self._gather_orders()  # rank 0's state is everybody's, whatever each one has built
        newest = max(orders)
        if min(orders) < newest:
            source = orders.index(newest)
            shared = training_state.share(group, source, lambda: [self._arguments, self._state.capture()])
            if orders[group.rank] < newest:
                arguments, state = training_state.decode(shared, group.device)
                self._refuse_other_arguments(arguments)
                self._restore(state)
        self._has_state = True
        if begins:
            self._decisions.workers_requested = view.size
            self._reporter.start(self._progress.step)
        elif group.rank == 0:
            self._decisions.request(workers=self._decisions.workers_requested)  # the last leader may not have done it
        if begins or group.rank == 0:
            self._reporter.resend(events=not begins)
        self._reporter.view(self._progress.step, view, regroup_s, time.perf_counter() - started)

    def save_last(self) -> None:
        """Training is over: writes a last checkpoint, where any are written."""
        if self._checkpoints is not None:
            self._checkpoints.save_last(self._progress.step, self._state.capture)
            if not self._progress.stop:  # then there is no hurry
                self._checkpoints.close()

    def _gather_orders(self) -> list[int]:
        """How far each worker is; -1 for one without state."""
        group = self._session.group
        mine = torch.tensor([self._progress.order if self._has_state else -1], device=group.device)
        return [int(order) for order in group.all_gather(mine, "progress of each worker")]

    def _refuse_other_arguments(self, theirs: Mapping[str, Any]) -> None:
        """Raises ValueError where this worker's arguments are not those of the one whose state it is to take."""
        mine = self._arguments
        different = [f"{name} {mine[name]} here, {theirs[name]} there" for name in mine if mine[name] != theirs[name]]
        if different:
            raise ValueError(
                f"this worker was given other arguments than the one whose state it takes ({'; '.join(different)}): "
                "all workers must be given the same"
            )

    def _take_up(self, restarted: bool) -> None:
        """Resumes from a checkpoint, if there is one to resume from; else training begins."""
        at, saved = self._progress, None if self._checkpoints is None else self._checkpoints.load(restarted)
        if saved is None:
            self._decisions.begin()
        else:
            self._restore(saved)
            if self._base_lr is not None:
                for group in self._opt.param_groups:
                    group["lr"] = self._base_lr
            at.stop = at.generation = 0
            at.resumed_at = at.step
        self._has_state = True

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._state.restore(state)
        self._opt.engine.step = self._progress.step
