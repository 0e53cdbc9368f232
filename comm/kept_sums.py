"""A worker's own sums of a step, kept when another worker is lost (`elastic.keep_sums`).

The step is made again, with the same micro-batches. A worker that had summed all of its own when the reduction failed
keeps these sums, and runs only its part of the micro-batches that nobody has kept. What it contributes is then the sum
of several ranges, in the same canonical tree.

No message of the old group writes to the sums: the reduction's result has a buffer of its own (`Bucket.sum`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kfuse.comm.buckets import Bucket
from kfuse.comm.measurement import Measurement
from kfuse.comm.plan import StepPlan, StepState
from kfuse.comm.sum_tree import Node
from kfuse.comm.tail import Tail


@dataclass(frozen=True)
class KeptSums:
    """The sums of a step's micro-batches that this worker has run, of all buckets."""

    step: int
    """Its number."""
    samples: int
    """Of the step, over all workers."""
    micro_batches: tuple[int, ...]
    """Those that are summed, ascending."""
    total: int
    """M, over all workers."""
    held: tuple[tuple[Node, int], ...]
    """With the canonical tree: the nodes, and the slot of each. Without: empty, and slot 0 has the sum."""
    unused: frozenset[int]
    """Parameters that none of these micro-batches gave a gradient."""
    slots: tuple[list[Tensor], ...]
    """Of each bucket. Nothing else writes to them."""
    tail: Tail
    """The layout of the tails in the last bucket's slots."""

    def go_on(self, now: StepState, buckets: Sequence[Bucket], measurement: Measurement, digest: Tensor | None) -> None:
        """A step begins with these sums. digest: as for `Measurement.write`."""
        now.goes_on, now.unused = True, set(self.unused)
        first_slot = min((slot for _, slot in self.held), default=0)
        for bucket, slots in zip(buckets[:-1], self.slots, strict=False):
            bucket.slots = slots
        measurement.go_on(buckets[-1], self.slots[-1], self.tail, now, first_slot, digest)


def keep(step: int, now: StepState, rank: int, buckets: Sequence[Bucket], measurement: Measurement) -> KeptSums | None:
    """The step is aborted. If this worker has summed all of its micro-batches: these sums. The buckets get new slots.

    None for a step of local SGD; also for an audited one, whose digest would have to be taken again.
    """
    plan = now.plan
    if plan is None or not now.closed or now.is_local or plan.audited is not None:
        return None
    mine = plan.summed(rank)
    if not mine:
        return None
    slots = tuple(bucket.slots for bucket in buckets)
    for bucket in buckets:
        bucket.renew()
    unused = frozenset(now.unused)
    return KeptSums(step, plan.samples, mine, plan.micro_batches, now.held, unused, slots, measurement.tail)


def planned(kept: KeptSums | None, step: int, plan: StepPlan, rank: int) -> KeptSums | None:
    """The sums that this worker goes on from in step `step`, as the plan says; None: from none.

    kept: those that it has. Raises RuntimeError where the plan counts on others.
    """
    mine = plan.kept[rank] if plan.kept else ()
    if not mine:
        return None
    if kept is None:
        raise RuntimeError(f"the plan counts on sums of micro-batches {mine}, and none are kept here")
    has, needs = (
        (kept.step, kept.samples, kept.total, kept.micro_batches),
        (step, plan.samples, plan.micro_batches, mine),
    )
    if has != needs:
        raise RuntimeError(f"kept sums of (step, samples, micro-batches, mine) {has}: the plan has {needs}")
    return kept
