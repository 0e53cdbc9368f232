"""A step as data: its plan, its micro-batches, and how far it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from torch import Tensor

from kfuse.comm.sum_tree import WRITE, LeafStep


@dataclass(frozen=True)
class StepPlan:
    """A step as its training loop knows it before the first forward."""

    samples: int
    ranges: tuple[range, ...]  # by rank, the micro-batches that the worker is to run
    local: int | None = None  # this worker's own samples, if each worker updates with its own mean gradient (local SGD)
    # The next three are rank 0's alone.
    decision: int = 0  # the number of the decision that is announced; 0: none
    times: tuple[float, float] = (0.0, 0.0)  # seconds of the step before, and of its wait for data; 0.0: unknown
    fisher: Tensor | None = None  # fp32 [2] on the device: trace and largest entry of the diagonal Fisher information
    by_weight: bool = False  # micro-batches weigh otherwise than by samples: the sum is known after the reduction
    audited: int | None = None  # the micro-batch whose gradient's digest its worker takes (`AuditedGradient`)

    @property
    def micro_batches(self) -> int:
        """M, over all workers."""
        return sum(map(len, self.ranges))


class OpensMicroBatches(Protocol):
    """An engine, as a micro-batch knows it."""

    def open_micro_batch(self, micro_batch: MicroBatch) -> None: ...

    def close_micro_batch(self) -> None: ...

    def abort(self) -> None: ...


class MicroBatch:
    """Context of one micro-batch. Set `loss` (its mean loss, detached) before backward to have it averaged too."""

    def __init__(self, engine: OpensMicroBatches, weight: float, last: bool, several_backwards: bool = False) -> None:
        """weight: in the mean gradient: its samples, if not told otherwise. last: of this worker's in the step.

        several_backwards: gradients add up in `p.grad` until the micro-batch closes.
        """
        self._engine, self.weight, self.last, self.several_backwards = engine, weight, last, several_backwards
        self.loss: Tensor | float | None = None
        self.figures: Sequence[Tensor | float] = ()  # scalars to be averaged like the loss, one for each slot at most

    def __enter__(self) -> MicroBatch:
        self._engine.open_micro_batch(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self._engine.close_micro_batch()
        else:
            self._engine.abort()


class StepState:
    """How far the step under way is."""

    plan: StepPlan | None = None
    expected: int | None = None  # micro-batches that this worker has in the plan
    implicit: bool = False  # a bare backward, outside opt.micro_batch
    parts: int = 1  # bare backwards in the step, each of a loss divided by their number
    current: MicroBatch | None = None
    leaf: LeafStep = WRITE  # what this worker does with the current micro-batch's gradients
    scale: float = 1.0  # by which they are multiplied
    done: int = 0  # micro-batches finished
    told: bool = False  # the tail has what only this rank writes
    weight: float = 0.0  # sum of the finished ones' weights
    closed: bool = False  # the last one is finished, or under way with all of its buckets packed
    collects: bool = False  # hooks take gradients, and need not ask the engine
    had_graph: bool = False  # a gradient came with its graph: backward(create_graph=True)
    # The current micro-batch is the step's only one, on a CPU: its gradient is the mean, and its norm the mean's. (A
    # GPU's kernel measures as it copies, at no further cost.)
    alone: bool = False

    def __init__(self) -> None:
        self.missed = set[int]()  # parameters that the current micro-batch gave no gradient
        self.unused = set[int]()  # parameters that none of the finished micro-batches gave a gradient

    @property
    def begun(self) -> bool:
        return self.done > 0 or self.current is not None

    @property
    def is_local(self) -> bool:
        """Gradients stay with their worker; only the tail is reduced."""
        return self.plan is not None and self.plan.local is not None

    @property
    def weights_are_known(self) -> bool:
        """Gradients are scaled to their mean while packing, since the sum of the weights is known before."""
        return self.implicit or (self.plan is not None and not self.plan.by_weight)
