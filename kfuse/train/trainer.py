"""The training loop: one step, from its samples to its report.

`Trainer.steps` shows the parts of a step in order; the other methods follow in that order. With
kf.fit and the command line, a step's forward, backward and update are in `Trainer.run`; with kf.DataLoader they are the
body of the user's own loop.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from kfuse.comm.group import CommError
from kfuse.data import Dataset, EpochSampler, Stream, StreamSampler
from kfuse.data.fetching import Fetcher
from kfuse.optim import DistributedOptimizer
from kfuse.optim.consistency import parameter_layout
from kfuse.policies import BasePolicy
from kfuse.session import current
from kfuse.statistics.figures import StepContext
from kfuse.train import running
from kfuse.train.decisions import Decisions
from kfuse.train.evaluation import Metric, check_metrics, evaluate, params_sha256
from kfuse.train.forward import Forward
from kfuse.train.loss import Objective
from kfuse.train.lr_schedule import UserSchedule, has_scheduler
from kfuse.train.model_checks import BufferWatch, refuse_uneven_embeddings
from kfuse.train.policy_calls import PolicyCalls
from kfuse.train.progress import Progress, Stage
from kfuse.train.recovery import Recovery
from kfuse.train.reporter import Reporter
from kfuse.train.sampling import Sampling
from kfuse.train.settings import Settings, check_training
from kfuse.train.state import Stateful, Trainable, TrainingState
from kfuse.train.step import Step
from kfuse.train.synchronisation import Synchronisation

if TYPE_CHECKING:
    from kfuse.checkpoint.manager import Checkpoints
    from kfuse.checkpoint.saved_model import SavedModel
    from kfuse.train.audit import Audit
    from kfuse.train.output import Output
    from kfuse.train.pair import PairAveraging


class Trainer:
    """One training of a model, on this worker."""

    def __init__(
        self,
        model: nn.Module,
        data: Dataset | Stream,
        opt: DistributedOptimizer,
        settings: Settings,
        *,
        policy: BasePolicy | None = None,
        scheduler: UserSchedule | None = None,
        checkpoints: Checkpoints | None = None,
        saved_model: SavedModel | None = None,
        output: Output | None = None,
        objective: Objective | None = None,
        heldout: Dataset | None = None,
        metrics: Mapping[str, Metric] | None = None,
        facts: Mapping[str, float] | None = None,
        user_loop: bool = False,
        several_backwards: bool = False,
        exits_are_errors: bool = False,
    ) -> None:
        """scheduler: a torch scheduler, stepped here. checkpoints: None: none are written or read.

        saved_model: writes the model when training is over, and the best one by evaluation; None: neither is written.
        output: of a script, in place of these two; its records go there.
        objective: how a batch becomes a loss; None: `kfuse.train.loss.default_loss` of pairs, or the model's own.
        metrics: functions (output, target) that are evaluated on `heldout`.
        facts: figures of the data that go into the summary, such as a corpus's entropy.
        user_loop: a step's forward, backward and update are done by the user, in the body of a loop over `steps`.
        several_backwards: of each micro-batch, by the user: see opt.micro_batch.
        exits_are_errors: a SystemExit of the model, the data or the policy is one: there is no script that means it.
        Raises ValueError for a model, data or settings that several workers cannot train alike.
        """
        # What is trained, and how.
        self.model, self.opt, self.settings = model, opt, settings
        self.policy = policy or BasePolicy()
        self._data, self._heldout, self._facts = data, heldout, dict(facts or {})
        self._exits: Callable[[], contextlib.AbstractContextManager[None]]
        self._exits = running.exits_are_errors if exits_are_errors else contextlib.nullcontext
        self._objective = objective or Objective()
        self._metrics = check_metrics(metrics, self._objective, heldout)
        seed = settings.seed
        self._sampler = StreamSampler(seed) if isinstance(data, Stream) else EpochSampler(len(data), seed)
        if scheduler is not None and scheduler.interval == "epoch" and self._sampler.length is None:
            raise ValueError("scheduler_interval=epoch: must be step with data=stream (a stream has no epochs)")
        self._scheduler = scheduler
        self._saved_model = saved_model if output is None else output.saved_model
        schedule = settings.schedule(self._sampler.length)
        # Who trains it.
        self.session = current()
        of_loop = "stepped in the loop's body" if has_scheduler(opt) else None
        check_training(
            settings,
            self.policy,
            opt,
            self.session,
            self._sampler.length,
            scheduler=of_loop if scheduler is None else type(scheduler.scheduler).__name__,
            heldout=heldout is not None,
            step_fn=self._objective.step_fn is not None,
        )
        several = self.session.elastic or self.session.group.size > 1 or self.session.comm.reproducible
        self._forward = Forward(
            model, self._objective, opt, heldout, settings.train_precision, self.session.group.device
        )
        self._user_loop, self._several_backwards = user_loop, several_backwards
        # How far training is, what is decided, and what is reported.
        self.progress = Progress(
            settings.batch_size,
            self.session.comm.sync,
            began_with={
                "batch_size": settings.batch_size,
                "optimizer": type(getattr(opt, "inner", opt)).__name__.removeprefix("Fused"),
                "seed": seed,
                "dataset size": self._sampler.length,
            },
        )
        self._sampling = Sampling(self.session, settings, self.progress, self._sampler, opt.engine.options.reproducible)
        self._synchronisation = Synchronisation(self.session, opt, self.progress, self._new_pair)
        self._reporter = Reporter(self.session, settings, self._sampler.length, output)
        self._calls = PolicyCalls(self.policy, self.session, self.progress, self._reporter)
        self.decisions = Decisions(self.session, self._calls, opt, schedule, settings, self.progress, self._reporter)
        if several:
            refuse_uneven_embeddings(model)
        opt.sync_buffers(model)
        self._buffers = BufferWatch(model, opt.engine.averaged.tensors, several)
        self._fetcher = self._new_fetcher()
        self._audit = self._new_audit()
        # The training state; `Recovery` keeps it the same on all workers.
        from kfuse.checkpoint.saved_model import uncompiled

        parts: dict[str, Stateful] = {
            "model": uncompiled(model),
            "trainable": Trainable(opt),
            "optimizer": opt,
            "statistics": opt.statistics,
            "policy": self._calls,
            "progress": self.progress,
            "synchronisation": self._synchronisation,
            "decisions": self.decisions,
            "records": self._reporter,
        }
        if scheduler is not None:
            parts["scheduler"] = scheduler.scheduler
        self._recovery = Recovery(
            self.session,
            opt,
            self.progress,
            self.decisions,
            TrainingState(parts),
            checkpoints if output is None else output.checkpoints,
            self._reporter,
            arguments=settings.shared()
            | {
                "samples of data": self._sampler.length,
                "comm.audit_every": self.session.comm.audit_every,
                "comm.state": self.session.comm.state,
                "types and memory layouts of parameters": parameter_layout(
                    p for group in opt.param_groups for p in group["params"]
                ),
            },
            base_lr=settings.lr_base,
            record_update=self._record_finished_update,
        )
        self._under_way: tuple[Step, int] | None = None
        """The step whose body runs, and how many steps the engine had made before it."""
        self._newest: Step | None = None
        """The newest step."""
        self._members: tuple[int, ...] = ()
        """The numbers of the workers that make it, in rank order."""
        self.over = False
        """Training has ended, and the supervisor, if there is one, has the summary."""
        self.result: dict[str, Any] | None = None
        """The summary, once training is over."""

    @property
    def planned_steps(self) -> int:
        """Steps of this training, those done included, if the batch size stays. Raises TypeError if it is unknown."""
        return self.progress.planned_steps(self.settings, self._sampler.length)

    # -- the loop -------------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any] | None:
        """Trains; returns the summary, or None on a worker that left before the end.

        Raises CommError if a worker is lost and there is no supervisor, ControlError if the supervisor is lost.
        """
        if not self.model.training:  # if it is, modules that the user put into eval mode (a frozen BatchNorm) stay so
            self.model.train()
        for step in self.steps():
            try:
                with self._exits():
                    for j in step.mine:
                        with step.micro_batch(j) as batch:
                            self._forward(step, batch).backward()  # type: ignore[no-untyped-call]
                    if self._audit is not None:
                        self._audit.compare(step)
                    self.opt.step()
                    self.opt.zero_grad()
            except Exception as error:  # `steps` handles it: a lost worker, above all
                step.error = error
        return self.result

    def steps(self) -> Iterator[Step]:
        """Yields each step for its forward, backward and update; all other parts of a step happen here, in this order.

        `once` skips parts that are done: after a worker is lost, all continue from the most advanced worker's state.
        On a worker that leaves, the iteration ends and `over` stays False.
        """
        at, recovery = self.progress, self._recovery
        self._started = time.perf_counter()
        prepared, decisions, fetching = self._optimizer_prepared(), self.decisions.active(), self._fetcher.running()
        with prepared, decisions, running.active(self), fetching, recovery.guarded(), self._exits():
            self._calls.hook("before_train")
            while not (self.over or self.session.left):
                try:
                    recovery.join()
                    if at.stage == Stage.BOUNDARY and at.exit_reason(self.settings) is not None:
                        self._conclude()
                        continue
                    at.once(Stage.BOUNDARY, recovery.cross_boundary)  # a checkpoint, the next view
                    if self.session.left:
                        break
                    at.once(Stage.BEFORE_STEP, self._before_step)
                    if at.stage == Stage.UPDATE:
                        step = self._next_step()  # its samples, its learning rate
                        yield from self._yielded(step)  # forward, backward (buckets are reduced meanwhile), update
                        at.once(Stage.UPDATE, partial(self._end_update, step))
                    at.once(Stage.AFTER_STEP, partial(self._calls.hook, "after_step"))
                    at.once(Stage.DECIDE, self._report_and_decide)  # applies what was announced
                    at.once(Stage.AVERAGE, self._synchronise)
                    at.once(Stage.EVALUATE, self._evaluate_when_due)
                    at.once(Stage.AFTER_EPOCH, self._after_epoch_when_over)
                    at.once(Stage.END, self._end_epoch_when_over)
                    at.next_step()
                except CommError as error:
                    recovery.recover(error)
        if self.over:
            with self._exits():
                self._calls.hook("after_train")

    def _new_fetcher(self) -> Fetcher:
        """Fetches in the step's own thread, or in loader processes. Raises DataError where these cannot."""
        if isinstance(self._data, Stream):
            self._data.check_workers(self.settings.loading.workers)
        if not self.settings.loading.workers:
            return Fetcher(self._data, self._sampler, self.settings.loading.pin_memory)
        from kfuse.data.feeder import Feeder

        def report(pid: int, how: str) -> None:
            self._reporter.loader_lost(self.progress.step, pid, how)

        return Feeder(self._data, self._sampler, self.settings.loading, self.session.group.device, report)

    def _new_pair(self) -> PairAveraging:
        """The `SyncMethod` of `comm.sync=pair`."""
        from kfuse.train.pair import PairAveraging  # only where it is used

        def agree() -> None:
            self._report_and_decide(lag=0)
            self._recovery.take_leaders_state()

        return PairAveraging(self.session, self.opt, self.progress, self.decisions, self.settings.seed, agree)

    def _new_audit(self) -> Audit | None:
        """As `comm.audit_every` says. Raises ValueError where kfuse cannot run a micro-batch again."""
        if self.session.comm.audit_every is None:
            return None
        from kfuse.train.audit import Audit, refuse_unrepeatable

        refuse_unrepeatable(self.session.comm.audit_every, self._data, self._user_loop)
        arguments = self.model, self.opt, self._forward, self.session, self.progress, self._reporter
        return Audit(*arguments, self.settings.seed)

    @contextlib.contextmanager
    def _optimizer_prepared(self) -> Iterator[None]:
        """Context: sets up the optimizer for this training; on exit, also by an early Ctrl-C, resets its settings."""
        opt, clip_norm, own = self.opt, self.settings.train_clip_norm, self.opt.clip_norm
        try:
            if clip_norm is not None:
                opt.set_clip_norm(clip_norm)
            opt.zero_grad()  # gradients of an interrupted step, or of an earlier backward, are not this training's
            opt.reducer.take_lost_worker_error()  # nor is a worker that was lost in a step whose body left the loop
            opt.statistics.begin_run()
            opt.engine.step = 0
            opt.reducer.loop_handles_lost_workers = self._user_loop and self.session.elastic
            yield
        finally:
            self._synchronisation.close()
            opt.reducer.loop_handles_lost_workers = False
            opt.statistics.end_run()
            opt.lr_factor = 1.0
            if clip_norm is not None:  # else it is the user's, who may have changed it meanwhile
                opt.clip_norm = own

    # -- the parts of a step, in order ----------------------------------------------------------------------------

    def _before_step(self) -> None:
        """The policy's hooks before a step. They may call kf.set_lr, also before the first one."""
        self.decisions.set_learning_rate()
        if self.progress.cursor == 0:
            self._calls.hook("before_epoch")
        self._calls.hook("before_step")

    def _next_step(self) -> Step:
        """Chooses the coming step's samples, sets its learning rate, and gives the optimizer the step's plan."""
        at, group = self.progress, self.session.group
        samples = self._sampling.of_next_step()
        self.decisions.set_learning_rate()
        self._buffers.before_step()
        if self._scheduler is not None:
            self._scheduler.before_step()
        self._synchronisation.before_step()
        weigh = None if self._objective.weight_fn is None else self._objective.weight
        audited = None if self._audit is None else self._audit.before_step(samples)
        if self.session.apart:
            plan = samples.plan_alone(group.rank, weigh is not None)
        else:
            local_rank = group.rank if group.size > 1 and at.is_local else None
            plan = samples.plan(
                self.decisions.announce(),
                local_rank,
                by_weight=weigh is not None,
                audited=audited,
                times=self._sampling.times_before(),
                fisher=self._fisher() if local_rank is None else None,
            )
        self.opt.begin(plan)
        self._fetcher.expect(
            samples.task_plan(group.rank, at.batch_size, self._sampler.length, self.settings.train_epochs)
        )
        self._members = tuple(self.session.workers)
        self._newest = Step(
            at.step, samples, group.rank, self._fetcher, self.opt, self.settings.seed, weigh, self._several_backwards
        )
        return self._newest

    def _fisher(self) -> Tensor | None:
        """On rank 0, in the steps in which the policy needs it: trace and largest entry of the diagonal Fisher."""
        every = self.policy.fisher_every
        if every is None or self.progress.step % every or self.session.group.rank:
            return None
        return self.opt.fisher()

    def _yielded(self, step: Step) -> Iterator[Step]:
        """Yields the step, once. Raises what ended its body early, RuntimeError if the body has not called opt.step().

        If the body leaves the loop (`break`) after opt.step(), the step is still reported.
        """
        opt, before = self.opt, self.opt.engine.step
        self._under_way = step, before
        try:
            yield step
        except GeneratorExit:
            if not sys.is_finalizing() and self._has_stepped(before):
                self.progress.once(Stage.UPDATE, partial(self._end_update, step))
                self._recovery.keep_ended()
                self._report_and_decide(lag=0)
            elif not sys.is_finalizing():
                opt.engine.abort()  # backwards that follow belong to no plan
            raise
        finally:
            self._under_way = None
        error = step.error or opt.reducer.take_lost_worker_error()
        if error is not None:
            raise error
        if not self._has_stepped(before):
            raise RuntimeError("a step's body must call opt.step() once, after all of its micro-batches")

    def _has_stepped(self, before: int) -> bool:
        """Whether a step was reduced since the engine had made `before` of them, and the optimizer has updated by it.

        The reduction is over with the last micro-batch's backward, before opt.step().
        """
        engine = self.opt.engine
        return engine.step == before + 1 and engine.reduced is None and not self.opt.reducer.worker_is_lost

    def _record_finished_update(self) -> None:
        """A worker was lost in a step's update, and the others have ended it: as after opt.step()."""
        assert self._newest is not None and self.opt.begun is not None
        self.opt.take_statistics(self.opt.begun)
        self.progress.once(Stage.UPDATE, partial(self._end_update, self._newest))

    def _end_update(self, step: Step) -> None:
        """After opt.step(): keeps the step's settings until its statistics arrive, and updates `Progress`."""
        at, count = self.progress, len(step.samples.indices)
        step_time_s, data_wait_s = _as_sent(step.seconds()), _as_sent(step.data_wait_s)
        self.decisions.announcement_sent()
        self.decisions.count_update(count)
        own = self.session.group.rank if self.session.apart else None
        at.contexts[at.step] = StepContext(
            epoch=at.epoch,
            cursor=at.cursor,
            samples=at.samples + count,
            lr=self.decisions.lr,
            lr_scale=at.lr_scale,
            batch_size=at.batch_size,
            workers=step.samples.workers,
            done=self.decisions.done(at.samples + count),
            members=self._members if own is None else (self.session.workers[own],),
            share=(step.mine.start, step.mine.stop) if own is not None and isinstance(step.mine, range) else None,
            step_time_s=step_time_s,
            data_wait_s=data_wait_s,
            data_bytes_per_s=step.data_bytes / step_time_s,
            micro_batch=step.samples.micro_batch,
        )
        if self._scheduler is not None:
            self._scheduler.after_step()
        self._buffers.after_step(self.session.group.rank == 0)
        at.samples += count
        at.cursor += count
        if at.is_local:
            at.drifted += 1
            at.uneven |= any(not step.samples.range_of(rank) for rank in range(step.samples.workers))

    def _report_and_decide(self, lag: int = 1) -> None:
        """For each step whose statistics have arrived, but not the newest `lag`: reports it, decides, applies."""
        self.decisions.receive(lag)
        for stats in self.opt.statistics.read(lag):
            context = self.progress.contexts.pop(stats.step)
            self.decisions.update_progress(stats, context)
            used = self._sampling.of_finished_step(stats, context) if self.settings.observe_ledger else None
            signals = self.decisions.signals(stats, context)
            self._reporter.step(stats, context, signals, used)
            self.decisions.decide(stats, context, signals)

    def _synchronise(self) -> None:
        """Beside synchronous SGD: brings the workers' models together, as the mode says."""
        at = self.progress
        over = at.is_last_step(self.settings, self._epoch_is_over)
        saves = at.is_apart and self._recovery.checkpoint_is_due(at.step + 1)
        self._synchronisation.after_step(self._epoch_is_over or self._evaluation_is_due or saves, over)

    @property
    def _epoch_is_over(self) -> bool:
        return self.progress.cursor == self._sampler.length

    @property
    def _evaluation_is_due(self) -> bool:
        every = self.settings.train_eval_every
        return (self.progress.step + 1) % every == 0 if every else self._epoch_is_over

    def _evaluate_when_due(self) -> None:
        if self._evaluation_is_due:
            self._evaluate(self.progress.step + 1)

    def _evaluate(self, steps: int) -> None:
        """Evaluates on the held-out data after `steps` steps, unless that has been done.

        Raises ValueError where training is to end at an accuracy, and the model has none.
        """
        at = self.progress
        if self._heldout is None or at.evaluated == steps:
            return
        group, precision = self.session.group, self.settings.train_precision
        with self._synchronisation.shown():
            result = evaluate(self.model, self._heldout, self._objective, group, precision, self._metrics)
            is_best = at.take_evaluation(result.accuracy, result.loss, result.metrics, steps)
            if self._scheduler is not None:
                self._scheduler.after_evaluation(result.loss)
            if is_best and self._saved_model is not None:
                self._saved_model.save_best(self.model)
        target = self.settings.train_target_accuracy
        if target is not None and result.accuracy is None:
            raise ValueError(
                f"target_accuracy={target}: the accuracy is unknown, since the output has no score for each class of "
                "an integer target"
            )
        self._reporter.event(at.step, "evaluation", accuracy=result.accuracy, loss=result.loss, metrics=result.metrics)

    def _after_epoch_when_over(self) -> None:
        if self._epoch_is_over:
            self._calls.hook("after_epoch")  # if a collective in it fails, it is called again

    def _end_epoch_when_over(self) -> None:
        if self._epoch_is_over:
            self.progress.epoch, self.progress.cursor = self.progress.epoch + 1, 0
            if self._scheduler is not None:
                self._scheduler.after_epoch()

    # -- the end --------------------------------------------------------------------------------------------------

    def _conclude(self) -> None:
        """Training is over: evaluates, writes a last checkpoint and the model, waits until the summary has arrived."""
        self._synchronisation.finish()
        if not self.progress.stop:
            self._evaluate(self.progress.step)
        self._recovery.save_last()
        if self._user_loop:  # its loader's state_dict may be called later
            self._recovery.keep_ended()
        self._report_and_decide(lag=0)
        self.result = self._summary()
        self._reporter.summary(self.result)
        self.over = self.session.finish()
        if not self.over:
            self.session.check()

    def _summary(self) -> dict[str, Any]:
        """The content of summary.json."""
        at = self.progress
        return {
            "steps": at.step,
            "epochs": at.epoch,
            "samples": at.samples,
            "wall_s": time.perf_counter() - self._started,
            "loss": at.loss,
            "eval_loss": at.eval_loss,
            "eval_accuracy": at.accuracy,
            "eval_metrics": at.eval_metrics,
            **self._facts,
            "batch_size": at.batch_size,
            "lr": self.decisions.lr,
            "workers": self.session.group.size,
            "params_sha256": params_sha256(self.model),
            "exit_reason": at.exit_reason(self.settings),
            **({} if self._saved_model is None else self._saved_model.save_last(self.model, at.best is not None)),
        }

    # -- the state, for kf.state_dict ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """A copy of the training state on the host. Raises RuntimeError in the middle of a step, or before the first.

        In a step's body, after opt.step(), that is the state after this step's update. In a policy's hook it is the
        state after that hook: a training that begins from it does not call the hook again for this step.
        """
        if self._under_way is None:
            return self._recovery.snapshot(in_body=False)
        step, before = self._under_way
        if self._has_stepped(before):
            self.progress.once(Stage.UPDATE, partial(self._end_update, step))
        elif not self.opt.reducer.worker_is_lost:  # then the step comes again, and the state is the one before it
            raise RuntimeError("kf.state_dict: a step is under way: call it after opt.step()")
        return self._recovery.snapshot(in_body=True)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Has training begin from what `state_dict` returned; where checkpoints are resumed from, those come first.

        Raises RuntimeError once training has begun, ValueError for another program's state.
        """
        self._recovery.begin_from(state)


def _as_sent(seconds: float) -> float:
    """Seconds with fp32's precision, as the next step's tail sends them.

    So step_time_s in a line of metrics.jsonl is previous_step_time_s in the next step's signals, bit by bit.
    """
    return float(np.float32(seconds))
