"""The training loop: one step, from its samples to its report.

`Trainer.steps` shows the parts of a step in order; the other methods follow in that order. With kf.fit and `kfuse` a
step's forward, backward and update are in `Trainer.run`; with kf.DataLoader they are the body of the user's loop.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from kfuse.comm.group import CommError
from kfuse.comm.step import StepPlan
from kfuse.data import Stream
from kfuse.data.fetching import Fetcher
from kfuse.membership import Session
from kfuse.statistics.figures import StepContext
from kfuse.train.arguments import TrainArguments
from kfuse.train.decisions import Decisions, PolicyCalls
from kfuse.train.evaluation import Evaluations
from kfuse.train.loss import Forward
from kfuse.train.progress import Progress, Stage
from kfuse.train.recovery import Recovery
from kfuse.train.reporter import Reporter
from kfuse.train.step import Sampling, Step
from kfuse.train.synchronisation import Synchronisation

if TYPE_CHECKING:
    from kfuse.train.audit import Audit
    from kfuse.train.curvature import Curvature
    from kfuse.train.passes import Passes


@dataclass(eq=False)
class Trainer:
    """One training of a model, on this worker. `kfuse.train.assemble` makes it."""

    # Those under way, in the order in which they began; and the state that the next one begins from, if one was given.
    running: ClassVar[list[Trainer]] = []
    next_state: ClassVar[Mapping[str, Any] | None] = None

    given: TrainArguments
    session: Session
    progress: Progress
    reporter: Reporter
    sampling: Sampling
    fetcher: Fetcher
    forward: Forward
    decisions: Decisions
    calls: PolicyCalls
    synchronisation: Synchronisation
    recovery: Recovery
    evaluations: Evaluations
    passes: Passes | None  # where there are several optimizers
    audit: Audit | None
    curvature: Curvature | None
    over: bool = False  # training has ended, and the supervisor, if there is one, has the summary
    result: dict[str, Any] | None = None  # the summary, once training is over
    _newest: Step | None = None
    _body_runs: bool = False  # the newest step's, which the user may have written
    _started: float = 0.0
    _device_wait_s: float = 0.0  # how long the host, which is ahead of a GPU, waited for it after the last step

    def __post_init__(self) -> None:
        self.opt, self.settings = self.given.opt, self.given.settings
        self.samples_an_epoch = self.sampling.sampler.length
        self._exits = _exits_are_errors if self.given.exits_are_errors else contextlib.nullcontext

    # -- the loop -------------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any] | None:
        """Trains; returns the summary, or None on a worker that left before the end.

        Raises CommError if a worker is lost and there is no supervisor, ControlError if the supervisor is lost.
        """
        model = self.given.model
        if not model.training:  # if it is, modules that the user put into eval mode (a frozen BatchNorm) stay so
            model.train()
        for step in self.steps():
            try:
                with self._exits():
                    for j in step.mine:
                        with step.micro_batch(j, self.opt) as batch:
                            step.loss, step.figures = self.forward(batch)
                            step.loss.backward()  # type: ignore[no-untyped-call]
                    if self.audit is not None:
                        self.audit.compare(step)
                    if self.curvature is not None:
                        self.curvature.measure(step)
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
        at, recovery = self.progress, self.recovery
        self._started = time.perf_counter()
        with self._prepared(), self._active(), self.fetcher.running(), recovery.guarded(), self._exits():
            self.calls.hook("before_train")
            while not (self.over or self.session.left):
                try:
                    recovery.join()
                    if at.stage == Stage.BOUNDARY and at.exit_reason(self.settings) is not None:
                        self._conclude()
                        continue
                    at.once(Stage.BOUNDARY, recovery.cross_boundary)  # a checkpoint, the next view
                    if self.session.left:
                        break
                    self.decisions.rate.set()  # also where the step comes again, with another worker's state
                    at.once(Stage.BEFORE_STEP, self._before_step)
                    if at.stage == Stage.UPDATE:
                        step = self._next_step()  # its samples
                        yield from self._yielded(step)  # forward, backward (buckets are reduced meanwhile), update
                        self._end_update(step)
                    at.once(Stage.AFTER_STEP, partial(self.calls.hook, "after_step"))
                    at.once(Stage.DECIDE, self._report_and_decide)  # applies what was announced
                    at.once(Stage.AVERAGE, self._synchronise)
                    at.once(Stage.EVALUATE, self._evaluate_when_due)
                    at.once(Stage.AFTER_EPOCH, self._after_epoch_when_over)
                    at.once(Stage.END, self._end_epoch_when_over)
                    at.step, at.stage = at.step + 1, Stage.BOUNDARY
                except CommError as error:
                    recovery.recover(error)
        if self.over:
            with self._exits():
                self.calls.hook("after_train")

    @contextlib.contextmanager
    def _prepared(self) -> Iterator[None]:
        """Context: sets up the optimizers for this training, and the first step's transport and rate. On exit, also by
        an early Ctrl-C, resets all of it.
        """
        opts, clip_norm = self.given.opts, self.settings["clip_norm"]
        own = [opt.clip_norm for opt in opts]
        try:
            for opt in opts:
                if clip_norm is not None:
                    opt.set_clip_norm(clip_norm)
                opt.zero_grad()  # gradients of an interrupted step, or of an earlier backward, are not this training's
                opt.reducer.lost_worker_error = None  # nor is a worker that was lost in a step whose body left the loop
                opt.statistics.begin_run(self._presents)
                opt.statistics.keep_unread = opt is self.opt
                opt.engine.step = 0
                opt.engine.bare_backwards = len(opts) == 1
                opt.reducer.loop_handles_lost_workers = self.given.user_loop and self.session.elastic
            self.opt.make_latest()
            self.decisions.use_transport()  # an earlier training's decision no longer applies
            self.decisions.rate.set()
            yield
        finally:
            for opt, its_own in zip(opts, own, strict=True):
                opt.reducer.loop_handles_lost_workers = False
                opt.engine.bare_backwards = opt.reducer.has_pass = True
                opt.statistics.end_run()
                opt.lr_factor = opt.batch_factor = 1.0
                if clip_norm is not None:  # else it is the user's, who may have changed it meanwhile
                    opt.clip_norm = its_own
            self.synchronisation.close()

    @contextlib.contextmanager
    def _active(self) -> Iterator[None]:
        """Context: this is the `newest` training. It begins from the state that kf.load_state_dict was given."""
        if (state := Trainer.next_state) is not None:
            Trainer.next_state = None
            self.recovery.begin_from(state)
        Trainer.running.append(self)
        try:
            yield
        finally:
            Trainer.running.remove(self)

    # -- the parts of a step, in order ----------------------------------------------------------------------------

    def _before_step(self) -> None:
        """The policy's hooks before a step. They may call kf.set_lr, also before the first one.

        Raises ValueError where the data set has more or fewer samples than as training began: the order is drawn for
        those.
        """
        data = self.given.data
        if self.progress.cursor == 0:
            if not isinstance(data, Stream) and len(data) != self.samples_an_epoch:
                raise ValueError(
                    f"the data set has {len(data)} samples now, and had {self.samples_an_epoch} as training began: "
                    "must stay the same; for other lengths take a stream, or train on each data set by itself"
                )
            self.calls.hook("before_epoch")
        self.calls.hook("before_step")

    def _next_step(self) -> Step:
        """Chooses the coming step's samples, and gives the optimizer the step's plan."""
        at, rank = self.progress, self.session.group.rank
        samples = self.sampling.of_next_step()
        own = samples.ranges[rank]
        mine = sum(samples.sizes[own.start : own.stop])
        self.synchronisation.before_step()
        by_weight = self.given.objective.weight_fn is not None
        audited = None if self.audit is None else self.audit.before_step(samples)
        if self.session.apart:  # its engine has this worker alone
            plan = StepPlan(mine, (range(len(own)),), mine, by_weight=by_weight)
        else:
            local = mine if self.session.group.size > 1 and at.is_local else None
            plan = StepPlan(
                len(samples.indices),
                samples.ranges,
                local,
                0 if at.updated else self.decisions.announce(),  # of several, one that is made has announced
                self.sampling.times_before(),
                by_weight=by_weight,
                audited=audited,
            )
        if self.passes is None:
            self.opt.begin(plan)
        else:
            self.passes.new_body(plan)
        epochs = self.settings["epochs"]
        self.fetcher.expect(samples.task_plan(rank, at.batch_size, self.samples_an_epoch, epochs))
        ends_epoch = at.cursor + len(samples.indices) == self.samples_an_epoch
        self._newest = Step(at.step, samples, self.session, self.fetcher, self.given, self.passes, ends_epoch)
        return self._newest

    def _yielded(self, step: Step) -> Iterator[Step]:
        """Yields the step, once. Raises what ended its body early, RuntimeError if the body has not called opt.step().

        If the body leaves the loop (`break`) after opt.step(), the step is still reported.
        """
        self._body_runs = True
        try:
            yield step
        except GeneratorExit:
            if not sys.is_finalizing() and self._has_stepped(step):
                self._end_update(step)
                if not self.session.loses_supervisor():  # else the last checkpoint has this step without its decisions
                    self.recovery.keep_ended()
                    self.evaluations.take_logged()
                    self._report_and_decide(lag=0)
            elif not sys.is_finalizing():
                for opt in self.given.opts:
                    opt.engine.abort()  # backwards that follow belong to no plan
            raise
        finally:
            self._body_runs = False
        has_stepped = self._has_stepped(step)  # of several optimizers some may have, before a worker was lost
        error = step.error
        if error is None:
            error = self._lost_worker()
            for opt in self.given.opts:
                opt.reducer.lost_worker_error = None
        if error is not None:
            raise error
        if not has_stepped:
            raise RuntimeError(
                "a step's body must call opt.step() once, after all of its micro-batches; of several optimizers the "
                "first one's in each body, and any other's where it has had a pass"
            )

    def _lost_worker(self) -> RuntimeError | None:
        """Returns the error of a worker that was lost in the loop's body; None: none was."""
        return next(filter(None, [opt.reducer.lost_worker_error for opt in self.given.opts]), None)

    def _has_stepped(self, step: Step) -> bool:
        """Whether the step was reduced, and the optimizer has updated by it.

        The reduction is over with the last micro-batch's backward, before opt.step().
        """
        engine = self.opt.engine
        if self.passes is not None:
            self.passes.record()
            return self.passes.complete
        return engine.step == step.number + 1 and engine.reduced is None and self.opt.reducer.lost_worker_error is None

    def record_finished_update(self) -> None:
        """A worker was lost in a step's update, and the others have ended it: as after opt.step()."""
        assert self._newest is not None and self.opt.begun is not None
        self.opt.take_statistics(self.opt.begun)
        self._end_update(self._newest)

    def _end_update(self, step: Step) -> None:
        """After opt.step(), once: keeps the step's settings until its statistics arrive, and updates `Progress`."""
        self.progress.once(Stage.UPDATE, partial(self._record_update, step))

    def keep_context(self, **times: float) -> None:
        """Keeps the settings that the newest step was announced with (of the first optimizer), and known times."""
        assert self._newest is not None
        at, step, rate = self.progress, self._newest, self.decisions.rate
        count = len(step.samples.indices)
        self.decisions.announcement_sent()
        own = self.session.group.rank if self.session.apart else None
        at.contexts[at.step] = StepContext(
            epoch=at.epoch,
            cursor=at.cursor,
            samples=at.samples + count,
            lr=rate.now,
            lr_scale=at.lr_scale,
            batch_size=at.batch_size,
            workers=step.samples.workers,
            done=rate.done(at.samples + count),
            members=step.members if own is None else (step.members[own],),
            share=(step.mine.start, step.mine.stop) if own is not None and isinstance(step.mine, range) else None,
            micro_batch=step.samples.micro_batch,
            **at.curvature_figures(),
            **{"step_time_s": 0.0, "data_wait_s": 0.0, **times},
        )

    def _record_update(self, step: Step) -> None:
        at, count = self.progress, len(step.samples.indices)
        # With fp32's precision, as the next step's tail sends them: the next step's signals have the same bits.
        step_time_s = float(np.float32(time.perf_counter() - step.began + self._device_wait_s))
        self.decisions.rate.count_update(count)
        if self.curvature is not None:
            self.curvature.take(step.number)
        times: dict[str, Any] = {"step_time_s": step_time_s, "data_wait_s": float(np.float32(step.data_wait_s))}
        times["data_bytes_per_s"] = step.data_bytes / step_time_s
        if self.passes is None:
            self.keep_context(**times)
        else:
            at.contexts[at.step] = replace(at.contexts[at.step], **times)
        at.updated = []
        if self.given.scheduler is not None:
            self.given.scheduler.after("step")
        at.samples += count
        at.cursor += count
        if at.is_local:
            at.drifted += 1
            at.uneven |= not all(step.samples.ranges)

    @property
    def _presents(self) -> bool:
        """Whether somebody sees each step's figures: a policy that decides by them, or a record."""
        return self.calls.decides or self.reporter.records

    def _report_and_decide(self, lag: int = 1) -> None:
        """For each step whose statistics have arrived, but not the newest `lag`: reports it, decides, applies."""
        started = time.perf_counter()
        self.decisions.receive(lag)
        self._device_wait_s = time.perf_counter() - started
        for stats in self.opt.statistics.read(lag):
            context, logged = self.progress.contexts.pop(stats.step), self.progress.logged.pop(stats.step, {})
            for straggler in self.sampling.take_measured(stats, context):
                self.reporter.event(self.progress.step, "straggler", **straggler)
            if self._presents:
                used = self.sampling.of_finished_step(stats, context) if self.settings["observe_ledger"] else None
                signals = self.calls.signals(stats, context)
                self.reporter.step(stats, context, signals, used, logged)
                self.calls.decide("decide", signals)
            self.decisions.apply_announced(stats, context)

    def _synchronise(self) -> None:
        """Beside synchronous SGD: brings the workers' models together, as the mode says."""
        if not self.synchronisation.acts:
            return
        at = self.progress
        over = at.is_last_step(self.settings, self._epoch_is_over)
        checkpoints = self.given.checkpoints
        saves = at.is_apart and checkpoints is not None and checkpoints.is_due_after(at.step + 1)
        common = saves or self._epoch_is_over or self.evaluations.is_due(self._epoch_is_over)
        self.synchronisation.after_step(common, over)

    @property
    def _epoch_is_over(self) -> bool:
        return self.progress.cursor == self.samples_an_epoch

    def _evaluate_when_due(self) -> None:
        if self.evaluations.is_due(self._epoch_is_over):
            self.evaluations.evaluate_once(self.progress.step + 1)

    def _after_epoch_when_over(self) -> None:
        if self._epoch_is_over:
            self.calls.hook("after_epoch")  # if a collective in it fails, it is called again

    def _end_epoch_when_over(self) -> None:
        self.evaluations.take_logged()
        if self._epoch_is_over:
            self.progress.epoch, self.progress.cursor = self.progress.epoch + 1, 0
            if self.given.scheduler is not None:
                self.given.scheduler.after("epoch")

    def _conclude(self) -> None:
        """Training is over: evaluates, writes a last checkpoint and the model, waits until the summary has arrived."""
        self.synchronisation.method.finish()
        if not self.progress.stop:
            self.evaluations.evaluate_once(self.progress.step)
        self.recovery.save_last()
        if self.given.user_loop:  # its loader's state_dict may be called later
            self.recovery.keep_ended()
        self._report_and_decide(lag=0)
        self.result = self.evaluations.summary(self.decisions.rate.now, time.perf_counter() - self._started)
        self.reporter.summary(self.result)
        self.over = self.session.finish()
        if not self.over:
            self.session.check()

    def log(self, figures: Mapping[str, float]) -> None:
        """Records figures of the user's own with the step under way: see `kf.log`."""
        at = self.progress
        at.logged.setdefault(at.step, {}).update(figures)

    def agree(self) -> None:
        """At a meeting of workers that were apart: reports what was measured, and takes the leader's state."""
        self._report_and_decide(lag=0)
        self.recovery.take_leaders_state()

    # -- the state, for kf.state_dict -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """A copy of the training state on the host. Raises RuntimeError in the middle of a step, or before the first.

        In a step's body it is the state after the update, in a policy's hook that after the hook.
        """
        step = self._newest
        if not self._body_runs or step is None:
            return self.recovery.snapshot(in_body=False)
        if self._has_stepped(step):
            self._end_update(step)
        elif self._lost_worker() is None:  # else the step comes again, and the state is as before it
            raise RuntimeError("kf.state_dict: a step is under way: call it after opt.step()")
        return self.recovery.snapshot(in_body=True)


def newest() -> Trainer | None:
    """Returns the training that began last and has not ended; None if there is none."""
    return Trainer.running[-1] if Trainer.running else None


@contextlib.contextmanager
def _exits_are_errors() -> Iterator[None]:
    """Context: a SystemExit of the model, the data or the policy of a job that has no script becomes a RuntimeError: it
    would end a worker as if all was well.
    """
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(f"training has raised SystemExit: {error}") from error
