"""What is measured in a step: the gradients' norms, and how long the worker's own part of it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kfuse.comm import devices
from kfuse.comm.buckets import Bucket
from kfuse.comm.devices import Event
from kfuse.comm.plan import StepState
from kfuse.comm.tail import LOSS, SAMPLES, SUM_SQUARES, Tail
from kfuse.kernels import block_sumsq, num_blocks, sum_partials

_LAPS = 8
"""Steps that a host may be ahead of its GPU, before the time of a micro-batch is unknown."""


class Measurement:
    """Measures the gradients in an engine's buckets; writes each micro-batch's tail, and reads the step's record."""

    tail: Tail
    """The tail's layout for the present group. `set_group` replaces it."""
    stopwatch: Stopwatch
    """The engine starts and stops it."""
    sumsq: Tensor
    """fp32: partial sums of squares of one micro-batch's own gradient, which `pack` writes."""
    sumsq_of: Sequence[Tensor]
    """The part of `sumsq` that belongs to each bucket."""

    def __init__(self, gradient_buckets: Sequence[Bucket], params: int, device: torch.device) -> None:
        """params: how many parameters the engine has."""
        self._buckets, self._params = gradient_buckets, params
        chunks = [bucket.table.num_chunks for bucket in gradient_buckets]
        blocks = [num_blocks(bucket.body) for bucket in gradient_buckets]
        self.sumsq = torch.zeros(sum(chunks), device=device)
        self.sumsq_of = self.sumsq.split_with_sizes(chunks) if chunks else ()
        self._norms = torch.zeros(sum(blocks), device=device)
        self._norms_of = self._norms.split_with_sizes(blocks) if blocks else ()
        self._total = torch.zeros((), dtype=torch.float64, device=device)
        self._totals = torch.zeros(2, dtype=torch.float64, device=device)  # of a record: see Tail.record
        self.stopwatch = Stopwatch(device)
        self.figures = 0
        """Slots of the tail for a step function's figures."""

    def set_group(self, rank: int, size: int) -> None:
        """Between steps: goes on with other workers."""
        self.tail, self._leads = Tail(self._params, rank, size, self.figures), rank == 0

    def write(self, bucket: Bucket, now: StepState, digest: Tensor | None) -> None:
        """Writes the tail of the micro-batch that ends to the last bucket.

        digest: of the parameters, in some steps; only with the step's first micro-batch.
        """
        assert now.current is not None
        sum_partials(self.sumsq, self._total)
        if now.parts > 1:
            self._total *= now.parts**2  # the loss was divided
        first: dict[str, Any] = {}
        if now.done == 0:
            first = {"seconds": self.stopwatch.seconds_before, "digest": digest}
            if now.plan is not None and self._leads:
                first["announcement"] = now.plan.announcement
        self.tail.write(
            bucket.slot(now.leaf.slot)[bucket.body :],
            now.leaf.accumulate,
            samples=float(now.current.weight),
            sum_squares=self._total,
            loss=now.current.loss,
            missed=now.missed,
            figures=now.current.figures,
            **first,
        )

    def total_weight(self, tail: Tensor, now: StepState) -> Tensor | None:
        """float64 scalar: what the reduced buckets are to be divided by. None: they hold means already."""
        if now.weights_are_known:
            return None
        if now.is_local:  # the buckets hold this worker's own sums
            return torch.full((), now.weight or 1.0, dtype=torch.float64, device=tail.device)  # no wait
        return self.tail.record(tail, self._totals)[SAMPLES]

    def record(self, tail: Tensor, now: StepState, total_weight: Tensor | None) -> Tensor:
        """The step's record (see `Tail.record`), once all buckets are reduced; they hold the mean gradient afterwards.

        Where micro-batches weigh otherwise than by their samples, the record is put into units of samples, which are
        those of a batch size: with W the sum of the weights w_j and B the step's samples, w_j becomes w_j B / W. S is
        then unbiased where the variance of a micro-batch's gradient goes as 1 / w_j.
        """
        if total_weight is not None:
            share = (1.0 / total_weight).float()
            for bucket in self._buckets:
                bucket.mean.mul_(share)
        for bucket, norms in zip(self._buckets, self._norms_of, strict=True):
            block_sumsq(bucket.mean, norms)
        sum_partials(self._norms, self._totals[0])
        record = self.tail.record(tail, self._totals)
        if now.plan is not None and now.plan.by_weight:
            ratio = now.plan.samples / record[SAMPLES]
            record[SUM_SQUARES] *= ratio
            record[LOSS] *= ratio
            if self.figures:
                record[-self.figures :] *= ratio
            record[SAMPLES] = now.plan.samples
        return record


@dataclass
class _Lap:
    """The worker's own part of a step."""

    began: Event
    ended: Event
    micro_batches: int = 0
    """How many it had; 0 where none was timed."""


class Stopwatch:
    """From a step's first micro-batch's forward to its last one's backward, without waiting for other workers.

    On a CUDA device it times the stream, and never waits for it: the host may be some steps ahead of the device, so the
    last few steps are kept, and the newest one that the device has finished counts.
    """

    seconds_before: float = 0.0
    """Seconds a micro-batch of the newest finished step before this one; 0.0 where none was run, or the device has
    finished none of those that are kept."""

    def __init__(self, device: torch.device) -> None:
        self._device = devices.of(device)
        self._laps = [self._new_lap() for _ in range(_LAPS if self._device.asynchronous else 1)]  # the newest first

    def _new_lap(self) -> _Lap:
        return _Lap(self._device.event(timing=True), self._device.event(timing=True))

    def start(self) -> None:
        """At the first micro-batch's forward."""
        self.seconds_before = self._seconds_each()
        self._laps.insert(0, self._laps.pop())  # the oldest is used again
        self._laps[0].micro_batches = 0
        self._laps[0].began.record()

    def stop(self, micro_batches: int) -> None:
        """At the end of the last one's backward; `micro_batches`: how many there were."""
        self._laps[0].ended.record()
        self._laps[0].micro_batches = micro_batches

    def _seconds_each(self) -> float:
        for lap in self._laps:
            if lap.micro_batches and lap.ended.query():
                return lap.began.elapsed_time(lap.ended) / 1000 / lap.micro_batches
        return 0.0

    def forget(self) -> None:
        """The last step had no micro-batch for this worker."""
        for lap in self._laps:
            lap.micro_batches = 0
