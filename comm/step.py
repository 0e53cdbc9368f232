"""A step as data: its plan, its micro-batches, and how far it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from torch import Tensor

from kfuse.comm.sum_tree import WRITE, LeafStep

REMEDY = (
    "one backward is one micro-batch. For several a step, iterate over a step of kf.DataLoader, or wrap each in "
    "`with opt.micro_batch(samples=len(x), last=...)`; call opt.step() and opt.zero_grad() once after the last. "
    "Several losses of the same samples: add them up and call backward once, or give opt.micro_batch (kf.DataLoader) "
    "several_backwards=True. For ACC backwards of loss / ACC: opt.accumulate(ACC)"
)


@dataclass
class StepPlan:
    """A step as its training loop knows it before the first forward."""

    samples: int
    ranges: tuple[range, ...]  # by rank, the micro-batches that the worker is to run
    local: int | None = None  # this worker's own samples, if each worker updates with its own mean gradient (local SGD)
    # The next three are rank 0's alone.
    decision: int = 0  # the number of the decision that is announced; 0: none
    times: tuple[float, float] = (0.0, 0.0)  # seconds of the step before, and of its wait for data; 0.0: unknown
    by_weight: bool = False  # micro-batches weigh otherwise than by samples: the sum is known after the reduction
    audited: int | None = None  # the micro-batch whose gradient's digest its worker takes (`AuditedGradient`)

    @property
    def micro_batches(self) -> int:
        """M, over all workers."""
        return sum(map(len, self.ranges))


class MicroBatch:
    """One micro-batch. Set `loss` (its mean loss) to have it averaged too. With `engine` a context manager:
    gradients that arrive inside belong to it.
    """

    loss: Tensor | float | None = None
    figures: Sequence[Tensor | float] = ()  # scalars to be averaged like the loss, one for each slot at most
    leaf: LeafStep = WRITE  # what its worker does with its gradients
    scale: float = 1.0  # by which they are multiplied

    def __init__(self, weight: float, last: bool, several_backwards: bool = False, engine: Any = None) -> None:
        """weight: in the mean gradient: its samples, if not told otherwise. last: of this worker's in the step.

        several_backwards: gradients add up in `p.grad` until the micro-batch closes. engine: to use it in `with`.
        """
        self.weight, self.last, self.several_backwards, self.engine = weight, last, several_backwards, engine
        self.missed = set[int]()  # parameters that it gave no gradient

    def __enter__(self) -> MicroBatch:
        self.loss, self.figures, self.missed = None, (), set()  # it may have been used before
        self.engine.open(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.engine.close_micro_batch()
        else:
            self.engine.abort()


class Phase(IntEnum):
    """How far a step is."""

    OPEN = 0  # micro-batches come
    CLOSED = 1  # the last one is finished, or under way with all of its buckets packed
    SUMMED = 2  # this worker has its sums; of others it is not known
    REDUCED = 3  # all workers have theirs: the mean gradient and the record are there for the optimizer
    TAKEN = 4  # by the optimizer, which updates; or they were dropped
    UPDATED = 5  # with sharded state: the optimizer has updated this worker's part


class Step:
    """One step, from its first micro-batch to the optimizer's update."""

    number = 0  # counted from 0; known once it is summed
    plan: StepPlan | None = None
    is_local = False  # gradients stay with their worker; only the tail is reduced
    mine: range | None = None  # what this worker is to run: in the plan, or of bare backwards. None: not known before
    implicit = False  # of bare backwards, outside opt.micro_batch
    parts = 1  # those bare backwards, each of a loss divided by their number
    weights_are_known = False  # the sum of the weights is, before: gradients are scaled to their mean while packing
    current: MicroBatch | None = None
    done = 0  # micro-batches finished
    weight = 0.0  # sum of the finished ones' weights
    phase = Phase.OPEN
    had_graph = False  # a gradient came with its graph: backward(create_graph=True)
    # The current micro-batch is the step's only one, on a CPU: its gradient is the mean, and its norm the mean's. (A
    # GPU's kernel measures as it copies, at no further cost.)
    alone = False
    leaves: Sequence[LeafStep] | None = None  # with the canonical tree: how this worker sums its own
    unused: set[int]  # parameters that none of this worker's finished micro-batches gave a gradient
    # Of a step that is summed. Tensors are on the device.
    # fp32: its summed tail, where somebody reads it (`Engine.finish`). First, by parameter, how many micro-batches of
    # all workers gave it a gradient.
    tail: Tensor
    changes: Sequence[Tensor] = ()  # the averaged buffers' summed changes, in the order of their bucket
    # Of one that is reduced. The mean gradient is in the buckets.
    record: Tensor | None = None  # float64 [RECORD_SLOTS + workers + figures]: see `Measurement.record`
    left_out: set[int]  # parameters that no worker gave a gradient, where the host knows it
    in_doubt: set[int]  # whose `.grad` is set, perhaps to zeros, though perhaps no worker gave them a gradient
    differs = False  # the workers no longer have the same model, as they found in it
    resumed = False  # it is being ended in another group: what is updated is not shared

    def __init__(self) -> None:
        self.unused = set()

    @property
    def begun(self) -> bool:
        return self.done > 0 or self.current is not None

    @property
    def closed(self) -> bool:
        return self.phase >= Phase.CLOSED

    # -- what is refused ------------------------------------------------------------------------------------------

    def refuse_to_open(self, untaken: bool) -> None:
        """Raises RuntimeError where no micro-batch may begin now. untaken: the step before is not taken yet."""
        if untaken or self.phase is not Phase.OPEN:
            if self.parts > 1:
                raise RuntimeError(f"opt.accumulate({self.parts}): another backward after the {self.parts} of a step")
            raise RuntimeError(
                f"another backward before opt.step(): {REMEDY}. Where the earlier one was for another optimizer, as a "
                "GAN's generator's is, call opt.zero_grad() before this one; of several that one loss trains make one: "
                "kf.Optimizer(a, b). Before an optimizer of torch's trains the same model: opt.close()"
            )
        if self.current is not None:
            raise RuntimeError("opt.micro_batch is already open: micro-batches do not nest")
        if self.mine is not None and self.done >= len(self.mine):
            raise RuntimeError(f"the plan has {len(self.mine)} micro-batches for this worker: one more was begun")

    def refuse_to_end(self) -> None:
        """Raises RuntimeError if the step has begun, and its last micro-batch has not been run, or is being run."""
        if self.current is not None:
            raise RuntimeError(f"opt.step() inside a micro-batch: {REMEDY}")
        if self.done and self.implicit and not self.closed:
            raise RuntimeError(
                f"opt.accumulate({self.parts}): opt.step() after {self.done} of {self.parts} backwards. Where the last "
                "batches of an epoch are fewer, leave them out with opt.zero_grad(), or use opt.micro_batch"
            )
        if self.done and not self.closed:
            raise RuntimeError(f"opt.step() before the step's last micro-batch: {REMEDY}")
