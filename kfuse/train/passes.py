"""Several optimizers that step one after the other in a loop's body, as a GAN's two do.

Each has a pass of its own over the step's micro-batches, then its update. Where a worker is lost in one of them, the
body comes again on the survivors. An update that is made is not taken back: its optimizer has an empty pass then, and
its `step` does nothing; the passes that follow start from the parameters that it has left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kfuse.comm.step import StepPlan
from kfuse.optim import DistributedOptimizer
from kfuse.train.progress import Progress, Stage


class Passes:
    """The passes of each body, at most one for each optimizer, the same on every worker. The first optimizer has one in
    every body: its messages carry the announcements, and its statistics are the training's.
    """

    def __init__(
        self, opts: Sequence[DistributedOptimizer], progress: Progress, first_updated: Callable[[], None]
    ) -> None:
        """first_updated: called once in each step, when the first optimizer's update is made."""
        self._opts, self._progress, self._first_updated = opts, progress, first_updated
        self._plan: StepPlan | None = None  # the first optimizer's, in the step under way
        self._begun: set[int] = set()  # optimizers that have had a pass in this body, by index

    def new_body(self, plan: StepPlan) -> None:
        """plan: of the first optimizer's pass."""
        self._plan, self._begun = plan, set()
        for opt in self._opts:
            opt.reducer.has_pass = False

    def begin(self, opt: DistributedOptimizer) -> bool:
        """The body begins the pass of `opt`. Returns whether it has any micro-batches: not where its update is made, or
        a worker was lost in this body.

        Raises ValueError for another optimizer, RuntimeError for a pass that may not begin now.
        """
        index = next((k for k, each in enumerate(self._opts) if each is opt), None)
        if index is None:
            raise ValueError("step.micro_batches(opt): opt must be one of the optimizers given to kf.DataLoader")
        opt.reducer.has_pass = True
        if any(each.reducer.lost_worker_error is not None for each in self._opts):
            return False
        self.record()
        if index in self._begun:
            raise RuntimeError(
                f"step.micro_batches: optimizer {index} has had its pass in this body: each has one at most; for more "
                "updates of the first one leave out the others' passes in some bodies, by step.number"
            )
        if self._progress.stage > Stage.UPDATE:
            raise RuntimeError("step.micro_batches: kf.state_dict has ended this step: call it after all passes")
        if (other := self._under_way()) is not None:
            raise RuntimeError(f"step.micro_batches: call step() of optimizer {other}, whose pass this follows, before")
        self._begun.add(index)
        opt.zero_grad()  # of a backward outside all passes, which would count in this worker's first micro-batch
        if index in self._progress.updated:
            return False
        assert self._plan is not None
        opt.begin(replace(self._plan, decision=0, times=(0.0, 0.0)) if index else self._plan)
        return True

    def _under_way(self) -> int | None:
        """The index of an optimizer whose pass has begun, and whose update is not made; None: there is none."""
        engines = enumerate(opt.engine for opt in self._opts)
        return next((k for k, each in engines if each.now.plan is not None or each.reduced is not None), None)

    @property
    def complete(self) -> bool:
        """Whether the first optimizer's update is made, and each other one's that has begun."""
        is_over = self._progress.stage > Stage.UPDATE  # kf.state_dict has ended the step
        return is_over or (0 in self._progress.updated and self._under_way() is None)

    def record(self) -> None:
        """Writes which updates were made into `Progress`. Nothing has happened where none was since."""
        at = self._progress
        for index, opt in enumerate(self._opts):
            is_over = opt.engine.reduced is None and opt.reducer.lost_worker_error is None
            if is_over and opt.engine.step == at.updates[index] + 1:
                at.updates[index] += 1
                at.updated.append(index)
                if index == 0:
                    self._first_updated()

    def drop_others(self, opt: DistributedOptimizer) -> None:
        """After a micro-batch of the pass of `opt`: what its backward left in other optimizers' parameters goes."""
        for other in self._opts:
            if other is not opt:
                other.zero_grad()
