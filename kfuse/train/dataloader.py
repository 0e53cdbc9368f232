"""`kf.DataLoader`: steps of micro-batches for a training loop of one's own, elastic all the same."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from kfuse.comm.group import CommError
from kfuse.data import as_dataset
from kfuse.optim import DistributedOptimizer
from kfuse.policies import BasePolicy
from kfuse.train.coordinator import Coordinator
from kfuse.train.fit import plan_run
from kfuse.train.lr_schedule import Decay, Scaling
from kfuse.train.progress import Phase, StepSamples
from kfuse.train.user_schedule import Interval


class DataLoader:
    """Yields the steps of a run; a step yields this worker's micro-batches, already wrapped in opt.micro_batch.

        for step in kf.DataLoader(data, model, opt, batch_size=64, epochs=3):
            for x, y in step:
                F.cross_entropy(model(x), y).backward()      # the MEAN loss of these samples
            opt.step()
            opt.zero_grad()

    Workers may join and leave between steps. Where one is lost, `opt.step()` does nothing and the step comes again,
    with the lost worker's micro-batches spread over the rest: the loop's body must not mind. The random state is keyed
    by (seed, step, micro-batch). On a worker that is asked to leave, iteration ends and `kf.rank()` is -1.
    All workers may `break` at the same step: that ends this training. Where one alone breaks, the others go on without
    it once it has ended, or has kept them waiting for the timeout of kf.init.
    """

    def __init__(
        self,
        data: Any,
        model: nn.Module,
        opt: DistributedOptimizer,
        *,
        batch_size: int = 32,
        micro_batch: int | None = None,
        max_batch_size: int | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        lr_scaling: Scaling = "sqrt",
        warmup_steps: int = 0,
        decay: Decay = "none",
        scheduler: Any = None,
        scheduler_interval: Interval = "step",
        clip_norm: float | None = None,
        seed: int = 0,
        policy: BasePolicy | None = None,
    ) -> None:
        """Arguments as for kf.fit, and the same errors.

        A torch scheduler is either given here, and stepped here, or stepped by the loop's body; the latter not in a job
        whose workers may change.
        """
        if policy is not None and not isinstance(policy, BasePolicy):
            raise TypeError(f"kf.DataLoader takes policy= a kf.BasePolicy, not {type(policy).__name__}")
        self._begun = False
        self._opt, self._policy = opt, policy or BasePolicy()
        self._run = plan_run(
            model,
            as_dataset(data),
            opt,
            self._policy,
            batch_size=batch_size,
            micro_batch=micro_batch,
            max_batch_size=max_batch_size,
            epochs=epochs,
            steps=steps,
            lr_scaling=lr_scaling,
            warmup_steps=warmup_steps,
            decay=decay,
            scheduler=scheduler,
            scheduler_interval=scheduler_interval,
            clip_norm=clip_norm,
            seed=seed,
        )

    def __iter__(self) -> Iterator[Step]:
        """Raises RuntimeError the second time: a loader is one run, over all of its epochs."""
        if self._begun:
            raise RuntimeError(
                "this kf.DataLoader has been iterated over: one goes through all of its epochs= and ends. For several "
                "epochs pass epochs= and iterate once; for another training make a new one"
            )
        self._begun = True
        return self._steps()

    def _steps(self) -> Iterator[Step]:
        run = self._run
        phases = {
            Phase.SWITCH: run.switch,
            Phase.BEGIN: run.begin,
            Phase.AFTER_STEP: self._policy.after_step,
            Phase.READ: run.read_statistics,
            Phase.SYNC: run.synchronize_models,
            Phase.EVALUATE: lambda: None,
            Phase.END: run.end,
        }
        started = time.perf_counter()
        with run.absorbing_failures():
            stays = run.start()
            while stays and not run.over:
                phase = run.position.phase
                if phase is Phase.SWITCH and run.finished() is not None:
                    stays = run.attempt(lambda: run.conclude(time.perf_counter() - started))
                elif phase is not Phase.STEP:
                    stays = run.attempt(lambda act=phases[phase]: run.do(act))  # type: ignore[misc]
                else:
                    step = Step(run, run.begin_step())
                    taken = self._opt.engine.step
                    try:
                        yield step
                    except GeneratorExit:  # the body has left the loop: what it has done is recorded
                        if sys.is_finalizing():
                            raise
                        if self._opt.engine.step == taken + 1:
                            run.end_step(step.samples, step.seconds(), step.data_wait_s)
                            run.read_statistics(lag=0)
                        else:
                            self._opt.engine.abort()  # its plan is not for the backwards that may follow
                        raise
                    if (failure := run.take_failure()) is not None:
                        stays = run.recover(failure)
                        continue
                    if self._opt.engine.step != taken + 1:
                        raise RuntimeError("a step's body must call opt.step() once, after all of its micro-batches")
                    run.end_step(step.samples, step.seconds(), step.data_wait_s)
                    run.advance()
        if run.over:
            self._policy.after_train()


class Step:
    """One step's micro-batches, as far as they are this worker's. Set `loss` in the body to have it in the metrics."""

    def __init__(self, run: Coordinator, samples: StepSamples) -> None:
        self._run, self.samples = run, samples
        self._started = time.perf_counter()
        self.data_wait_s = 0.0
        self.loss: Tensor | float | None = None

    def seconds(self) -> float:
        return time.perf_counter() - self._started

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        run = self._run
        mine = self.samples.range_of(run.session.group.rank)
        try:
            for j in mine:
                x, y, waited = run.fetch(self.samples, j)
                self.data_wait_s += waited
                self.loss = None
                with run.opt.micro_batch(samples=self.samples.sizes[j], last=j == mine[-1]) as micro_batch:
                    yield x, y
                    loss = self.loss
                    micro_batch.loss = loss.detach() if isinstance(loss, Tensor) else loss
        except CommError as error:
            if not run.session.absorb(error):
                raise
            run.opt.engine.abort()
