"""Keeps a training run together while workers come and go: position, views, recovery, decisions.

Everything a decision rests on is the same on every worker: data order is a pure function of the position, statistics
come out of the reduction, and the leader's decision travels in a step's tail. What is measured in step s is read after
step s + 1 (by then it has reached the host without a wait), announced with step s + 2, and in force from step s + 4.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kfuse.checkpoint.manager import Checkpoints
from kfuse.comm.group import CommError, drop_retired
from kfuse.data import Dataset, EpochSampler
from kfuse.elastic import state_transfer as transfer
from kfuse.elastic.client import ControlError
from kfuse.optim import ConsistencyError, DistributedOptimizer
from kfuse.policies import BasePolicy
from kfuse.session import STOP_REASONS, Session
from kfuse.train import load_balance
from kfuse.train.decisions import Decisions
from kfuse.train.evaluation import params_sha256
from kfuse.train.lr_schedule import LRSchedule
from kfuse.train.model_checks import BufferWatch, GeneratorWatch, refuse_uneven_embeddings
from kfuse.train.progress import Phase, Position, Settings, StepSamples
from kfuse.train.reporter import Reporter
from kfuse.train.rng import generators_restored, micro_batch_key, seed_device, seed_host
from kfuse.train.training_state import Stateful, Trainable, TrainingState
from kfuse.train.user_schedule import UserSchedule


class Left(Exception):
    """This worker is not in the new view: it leaves in good order."""


class Coordinator:
    """One run's agreement among its workers. `Loop` and `DataLoader` train by it."""

    def __init__(
        self,
        model: nn.Module,
        train: Dataset,
        opt: DistributedOptimizer,
        *,
        session: Session,
        policy: BasePolicy,
        schedule: LRSchedule,
        settings: Settings,
        user_schedule: UserSchedule | None = None,
        clip_norm: float | None = None,
    ) -> None:
        """clip_norm: the optimizer's in this run; None: its own.

        Raises ValueError for a model or an optimizer that several workers cannot train alike.
        """
        several = session.elastic or session.group.size > 1 or session.comm.reproducible
        if several:
            refuse_uneven_embeddings(model)
        self.model, self.opt, self.session, self.policy = model, opt, session, policy
        self.schedule, self.settings = schedule, settings
        self.reports = Reporter(session, settings)
        self.position = Position(settings.batch_size, settings.sync_every)
        self._decisions = Decisions(session, policy, opt, schedule, settings, self.reports)
        self._train = train
        self._sampler = EpochSampler(len(train), settings.seed)
        self._user_schedule, self._clip_norm = user_schedule, clip_norm
        self._has_state = False
        self.over = False
        """Training has come to its end, and the supervisor knows."""
        self.result: dict[str, Any] | None = None
        """The summary, once training has come to its end."""
        self.checkpoints = Checkpoints(settings.checkpoints, session)
        opt.sync_buffers(model)
        buffers = BufferWatch(model, opt.engine.averaged.tensors, several)
        self._watches: list[BufferWatch | GeneratorWatch] = [buffers]
        if several:
            self._watches.append(GeneratorWatch(train))
        parts: dict[str, Stateful] = {
            "model": model,
            "trainable": Trainable(opt),
            "optimizer": opt,
            "statistics": opt.statistics,
            "policy": policy,
            "position": self.position,
            "session": session,
            "records": self.reports,
        }
        if user_schedule is not None:
            parts["scheduler"] = user_schedule.scheduler
        self.state = TrainingState(parts)

    # -- recovery -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """While the run lasts. If it cannot go on a last checkpoint is written, where any are.

        That is when the supervisor is lost, or a worker and there is no supervisor. A worker that is lost before it has
        the run's state writes none: that would replace the checkpoints which the run was to resume from.
        """
        failed_at, own_clip_norm = None, self.opt.clip_norm
        if self._clip_norm is not None:
            self.opt.set_clip_norm(self._clip_norm)
        self._set_learning_rate()
        try:
            with generators_restored(self.session.group.device):
                yield
        except Exception as error:
            failed_at = self.position.step
            if isinstance(error, ControlError | CommError):
                self.session.lost = True
                self.opt.engine.abort()
                if self._has_state:
                    self.checkpoints.save_last(self.position.step, self.state.capture)
            elif isinstance(error, ConsistencyError):
                self.session.give_up(str(error))
            raise
        finally:
            self.opt.statistics.end_run()
            self.opt.lr_factor = 1.0
            if self._clip_norm is not None:
                self.opt.set_clip_norm(own_clip_norm)
            self.session.lr = None
            self.session.end_training(failed_at)

    @contextlib.contextmanager
    def absorbing_failures(self) -> Iterator[None]:
        """As `in_force`; and a loss inside a loop's body ends the step without an error: see `take_failure`."""
        with self.in_force():
            self.session.absorbs = self.session.elastic
            try:
                yield
            finally:
                self.session.absorbs = False

    def take_failure(self) -> CommError | None:
        """What ended the last step's body early, once."""
        failure, self.session.failure = self.session.failure, None
        return failure

    def start(self) -> bool:
        """Calls the policy's first hook; then, in the first view, takes over the others' state if there is one."""
        self.session.begin_training()
        self.opt.zero_grad()  # gradients of an interrupted step, or of a backward before this run, are not this run's
        self.opt.statistics.begin_run()
        self.opt.engine.step = 0
        self.policy.before_train()
        return self.attempt(self._join)

    def _join(self) -> None:
        self.session.ensure_joined()
        self._synchronize()

    def attempt(self, act: Callable[[], None]) -> bool:
        """Runs `act`. If a worker was lost meanwhile: regroups; the position then says what to do next.

        False if this worker is in no view any more. Raises CommError where there is no supervisor to regroup with,
        ControlError where that one is lost.
        """
        try:
            act()
        except Left:
            return False
        except CommError as error:
            if not self.session.elastic:
                raise
            return self.recover(error)
        return True

    def do(self, act: Callable[[], None]) -> None:
        """A phase: acts, then moves on to the next."""
        act()
        self.advance()

    def advance(self) -> None:
        """To the next phase, and from the last one to the next step."""
        at = self.position
        following = Phase((at.phase + 1) % len(Phase))
        at.step += following is Phase.SWITCH
        at.phase = following

    def recover(self, error: CommError) -> bool:
        """Regroups with the survivors, as often as it takes, and goes on from the most advanced one's state."""
        started = time.perf_counter()
        while True:
            self.opt.engine.abort()
            try:
                if not self.session.recover(error):
                    return False
                self._synchronize(time.perf_counter() - started)
                return True
            except CommError as again:
                error = again

    def switch(self) -> None:
        """Writes a checkpoint if one is due, and moves to the view that the leader announced, if there is one."""
        if self.session.elastic:
            self.session.check()
            drop_retired()
        self.checkpoints.save_when_due(self.position.step, self.state.capture)
        view = self.session.view
        if view is None or self.position.generation <= view.generation:
            return
        started = time.perf_counter()
        if not self.session.switch(self.position.generation):
            self.checkpoints.close()
            raise Left
        self._synchronize(time.perf_counter() - started)

    def _synchronize(self, regroup_s: float = 0.0) -> None:
        """In a new view: workers that are behind (a joiner is far behind) get the most advanced one's state."""
        view, group = self.session.view, self.session.group
        if view is None:
            if not self._has_state:
                self._begin(restarted=False)
            return
        started = time.perf_counter()
        orders = self._gather_orders()
        begins = max(orders) < 0  # nobody has any state: the job starts, or starts anew
        if begins:
            if group.rank == 0:
                self._begin(restarted=view.reason != "start")
            orders = self._gather_orders()  # rank 0's state is everybody's, whatever each one has built
        newest = max(orders)
        if min(orders) < newest:
            shared = transfer.share(group, orders.index(newest), lambda: [self._arguments(), self.state.capture()])
            if orders[group.rank] < newest:
                arguments, state = transfer.decode(shared, group.device)
                self._refuse_other_arguments(arguments)
                self._restore(state)
        self._has_state = True
        if begins:
            self.session.workers_asked = view.size
            self.reports.start(len(self._train), self.position.step)
            self.reports.resend(events=False)
        elif group.rank == 0:
            self.session.ask(workers=self.session.workers_asked)  # the last leader may not have come to it
            self.reports.resend(events=True)
        self.reports.view(self.position.step, view, regroup_s, time.perf_counter() - started)

    def _arguments(self) -> dict[str, Any]:
        """What the script gave on this worker and must be the same on all: each one computes its share from it."""
        settings, schedule, bounds = self.settings, self.schedule, self.settings.bounds
        return {
            "samples of data": len(self._train),
            "seed": settings.seed,
            "batch_size": settings.batch_size,
            "micro_batch": settings.micro_batch,
            "max_batch_size": bounds.batch_max,
            "epochs": settings.epochs,
            "steps": settings.steps,
            "eval_every": settings.eval_every,
            "target_accuracy": settings.target_accuracy,
            "precision": settings.precision,
            "lr_scaling": schedule.scaling,
            "warmup_steps": schedule.warmup_steps,
            "decay": schedule.decay,
        }

    def _refuse_other_arguments(self, theirs: Mapping[str, Any]) -> None:
        """Raises ValueError where this worker's arguments are not those of the one whose state it is to take."""
        mine = self._arguments()
        different = [f"{name} {mine[name]} here, {theirs[name]} there" for name in mine if mine[name] != theirs[name]]
        if different:
            raise ValueError(
                f"this worker was given other arguments than the one whose state it takes ({'; '.join(different)}): "
                "all workers must be given the same"
            )

    def _gather_orders(self) -> list[int]:
        """How far each worker is; -1 for one without state."""
        group = self.session.group
        mine = torch.tensor([self.position.order if self._has_state else -1], device=group.device)
        return [int(order) for order in group.all_gather(mine, "positions")]

    def _begin(self, restarted: bool) -> None:
        """Takes up a checkpoint, if there is one to take up; else the policy has the first word."""
        saved = self.checkpoints.load(restarted)
        if saved is not None:
            self._restore(saved)
            if self.settings.base_lr is not None:
                for group in self.opt.param_groups:
                    group["lr"] = self.settings.base_lr
            self.position.stop = self.position.generation = 0
            self.position.resumed_at = self.position.step
        else:
            self._decisions.begin(self.position)
        self._has_state = True

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.state.restore(state)
        self.opt.engine.step = self.position.step

    # -- steps ----------------------------------------------------------------------------------------------------

    def begin_step(self) -> StepSamples:
        """The coming step's samples; the optimizer is told of them, and has its learning rate."""
        at = self.position
        samples = self._samples(at.epoch, at.cursor, at.batch_size)
        self._set_learning_rate()
        workers = self.session.group
        for watch in self._watches:
            watch.before_step()
        if self._user_schedule is not None:
            self._user_schedule.before_step()
        alone = workers.size > 1 and (at.sync_every > 1 or at.drifted > 0)
        self.opt.begin(samples.plan(workers.rank if alone else None))
        return samples

    def _set_learning_rate(self) -> None:
        """The coming step's, for the optimizer and for kf.set_lr."""
        at = self.position
        statistics = (at.mean_grad_sq, at.mean_grad_variance)
        self.opt.lr_factor = self.schedule.factor(at.schedule, at.batch_size, at.lr_scale, *statistics)
        self.session.lr = (self.opt.base_lr * self.opt.lr_factor, at.lr_scale)

    def _samples(self, epoch: int, cursor: int, count: int) -> StepSamples:
        indices = self._sampler.indices(epoch, cursor, count)
        workers = self.session.workers
        relative = load_balance.relative_throughput(self.position.throughput, workers)
        shares = load_balance.shares(relative) if self.settings.balance else None
        return StepSamples(indices, self.settings.micro_batch, len(workers), shares)

    def fetch(self, samples: StepSamples, j: int) -> tuple[Tensor, Tensor, float]:
        """Micro-batch j's inputs and targets on this worker's device, and the seconds that took.

        The generators are seeded for it, before its samples are fetched and again before its forward.
        """
        key, device = micro_batch_key(self.settings.seed, self.position.step, j), self.session.group.device
        started = time.perf_counter()
        seed_host(key)
        x, y = self._train.fetch(samples.of(j), torch.Generator().manual_seed(key))
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        seconds = time.perf_counter() - started
        seed_device(device, key)
        return x, y, seconds

    def end_step(self, samples: StepSamples, step_time_s: float, data_wait_s: float) -> None:
        """The optimizer has stepped: the position moves on."""
        at, count = self.position, len(samples.indices)
        lr_now, _ = self.session.lr or (0.0, 1.0)
        at.contexts[at.step] = {
            "epoch": at.epoch,
            "cursor": at.cursor,
            "samples": at.samples + count,
            "lr": lr_now,
            "lr_scale": at.lr_scale,
            "batch_size": at.batch_size,
            "workers": samples.workers,
            "members": self.session.workers,
            "step_time_s": step_time_s,
            "data_wait_s": data_wait_s,
        }
        statistics = (at.mean_grad_sq, at.mean_grad_variance)
        at.schedule = self.schedule.advance(at.schedule, count, *statistics)
        if self._user_schedule is not None:
            self._user_schedule.after_step()
        for watch in self._watches:
            watch.after_step(self.session.group.rank == 0)
        at.samples += count
        at.cursor += count
        if at.sync_every > 1 or at.drifted > 0:
            at.drifted += 1

    @property
    def epoch_over(self) -> bool:
        return self.position.cursor >= len(self._train)

    @property
    def evaluation_due(self) -> bool:
        """Whether the held-out data's turn comes after the step under way."""
        every = self.settings.eval_every
        return (self.position.step + 1) % every == 0 if every else self.epoch_over

    def synchronize_models(self) -> None:
        """Where workers drift apart: makes their models one again when it is time, or something needs one model."""
        at, view = self.position, self.session.view
        over = at.stop > 0 or at.step + 1 == self.settings.steps
        switches = view is not None and at.generation > view.generation
        if at.drifted >= at.sync_every or (at.drifted and (self.epoch_over or self.evaluation_due or over or switches)):
            self.opt.average_models()
            at.drifted = 0

    def begin(self) -> None:
        """The policy's hooks before a step. They may call kf.set_lr, also before the first one."""
        self._set_learning_rate()
        if self.position.cursor == 0:
            self.policy.before_epoch()
        self.policy.before_step()

    def end(self) -> None:
        """The step is over, perhaps the epoch: then the next one begins."""
        at = self.position
        if self.epoch_over:
            self.policy.after_epoch()  # first: where its collective fails it is called again
            at.epoch, at.cursor = at.epoch + 1, 0
            if self._user_schedule is not None:
                self._user_schedule.after_epoch()

    def conclude(self, wall_s: float, facts: Mapping[str, float] | None = None) -> None:
        """Training is over: sees to it that the summary arrives. `over` is then set."""
        self.checkpoints.save_last(self.position.step, self.state.capture)
        if not self.position.stop:  # then there is no hurry
            self.checkpoints.close()
        self.read_statistics(lag=0)
        self.result = self.summary(wall_s, facts)
        self.reports.summary(self.result)
        self.over = self.session.finish()
        if not self.over:
            self.session.check()

    def summary(self, wall_s: float, facts: Mapping[str, float] | None = None) -> dict[str, Any]:
        """What summary.json holds."""
        at = self.position
        return {
            "steps": at.step,
            "epochs": at.epoch,
            "samples": at.samples,
            "wall_s": wall_s,
            "loss": at.loss,
            "eval_loss": at.eval_loss,
            "eval_accuracy": at.accuracy,
            **(facts or {}),
            "batch_size": at.batch_size,
            "lr": self.session.lr[0] if self.session.lr else self.opt.base_lr,
            "workers": self.session.group.size,
            "params_sha256": params_sha256(self.model),
            "exit_reason": self.finished(),
        }

    def finished(self) -> str | None:
        """Why training is over, or None."""
        at, settings = self.position, self.settings
        if at.stop:
            return STOP_REASONS[at.stop]
        target = settings.target_accuracy
        if target is not None and at.accuracy is not None and at.accuracy >= target:
            return "target_accuracy"
        if settings.steps is not None and at.step >= settings.steps:
            return "steps"
        if settings.epochs is not None and at.epoch >= settings.epochs:
            return "epochs"
        return None

    def read_statistics(self, lag: int = 1) -> None:
        """Takes in what has arrived of all steps but the newest `lag`: reports, decides, applies."""
        for stats in self.opt.statistics.read(lag):
            context = self.position.contexts.pop(stats.step)
            self._decisions.take_in(self.position, stats, context.pop("members"))
            used = None
            if self.settings.ledger:
                used = self._samples(context["epoch"], context["cursor"], round(stats.samples))
            self.reports.step(stats, context, used)
            self._decisions.decide(self.position, stats, context)
