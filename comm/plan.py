"""The data of a step: its plan, a micro-batch, and the result of its reduction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from kfuse.comm.engine import Engine

REMEDY = (
    "one backward is one micro-batch. For several a step, iterate over a step of kf.DataLoader, or wrap each in "
    "`with opt.micro_batch(samples=len(x), last=...)`; call opt.step() and opt.zero_grad() once after the last. "
    "Several losses of the same samples: add them up and call backward once, or give opt.micro_batch (kf.DataLoader) "
    "several_backwards=True. For ACC backwards of loss / ACC: opt.accumulate(ACC)"
)


@dataclass(frozen=True)
class StepPlan:
    """A step as its training loop knows it before the first forward: total samples, each worker's micro-batches."""

    samples: int
    ranges: tuple[range, ...]
    """By rank, the micro-batches that the worker is to run."""
    local: int | None = None
    """This worker's own samples, if each worker is to update with its own mean gradient (local SGD)."""
    decision: int = 0
    """The number of the decision that this worker announces with the step; 0: none. Only rank 0's is sent."""
    times: tuple[float, float] = (0.0, 0.0)
    """Seconds that the step before took this worker, and the part of them that it waited for data; 0.0: unknown. Only
    rank 0's are sent."""
    fisher: Tensor | None = None
    """fp32 [2] on the device: trace and largest entry of the diagonal Fisher information by this worker's optimizer
    state; None: not in this step. Only rank 0's is sent."""
    by_weight: bool = False
    """Micro-batches weigh otherwise than by their samples; the sum of the weights is known once the step is reduced."""
    audited: int | None = None
    """The micro-batch of the step whose gradient's digest its worker takes (`AuditedGradient`); None: none."""

    @property
    def micro_batches(self) -> int:
        """M, over all workers."""
        return sum(map(len, self.ranges))


@dataclass(frozen=True)
class Reduced:
    """The result of a step's reduction, on the device. The mean gradient is in the buckets."""

    record: Tensor
    """float64 [RECORD_SLOTS + workers * RANK_SLOTS], the step's figures: see `kfuse.comm.tail.Tail.record`."""
    used: Tensor | None
    """fp32 [parameters]: micro-batches (over all workers) that gave the parameter a gradient. None: this worker's gave
    every parameter one."""
    unused: frozenset[int]
    """Parameters that none of this worker's micro-batches gave a gradient: what the host knows without the device."""
    implicit: bool
    """From bare backwards: no sample counts were given."""
    local: bool
    """Gradients, and so |gbar|^2, are this worker's own."""
    planned: bool
    """A training loop had announced the step."""
    idle: bool
    """This worker had no micro-batch in the step."""


class MicroBatch:
    """Context of one micro-batch. Set `loss` (its mean loss, detached) before backward to have it averaged too."""

    def __init__(self, engine: Engine, weight: float, last: bool, several_backwards: bool = False) -> None:
        """weight: in the mean gradient: its samples, if not told otherwise. last: of this worker's in the step.

        several_backwards: gradients add up in `p.grad` until the micro-batch closes.
        """
        self._engine, self.weight, self.last, self.several_backwards = engine, weight, last, several_backwards
        self.loss: Tensor | float | None = None
        self.figures: Sequence[Tensor | float] = ()
        """Scalars that are averaged like the loss: at most as many as the engine has slots for."""

    def __enter__(self) -> MicroBatch:
        self._engine.open_micro_batch(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self._engine.close_micro_batch()
        else:
            self._engine.abort()
