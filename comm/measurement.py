"""What is measured in a step: the gradients' norms, how long the worker's own part takes, and what the tail carries.

The tail is a few fp32 numbers at the end of the last bucket, which are summed with the gradients in one message. First
one flag per parameter (how many micro-batches gave it a gradient), then the slots named below, then one of each rank:
its seconds a micro-batch (0.0: unknown). Last come the figures of a step function, if there is one, each times the
micro-batch's samples.

Sums over all micro-batches come out of the same reduction as the gradients. Where one rank alone writes, the sum is
what it wrote: integers up to 2^24, and all fp32 values, stay exact when zeros are added.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kfuse.comm import devices
from kfuse.comm.buckets import Bucket
from kfuse.comm.devices import Event, Place, quick
from kfuse.comm.step import MicroBatch, Step
from kfuse.kernels import BLOCK, BlockSumsqArguments, SumPartialsArguments, block_sumsq, num_blocks, sum_partials

SUM_SQUARES = 0  # sum over micro-batches of b_j |g_j|^2
SAMPLES = 1  # sum of b_j
LOSS = 2  # sum of b_j times the micro-batch's mean loss; NaN where a loss was not given
MICRO_BATCHES = 3
STEP_TIME = 4  # seconds that the step before took on the leader; 0.0: unknown
DATA_WAIT = 5  # the part of it that the leader waited for data
DECISION = 6  # number of the leader's decision that this step announces; 0.0: none
ADDED = 7  # what rounding int8 messages has added to their sums of squares, in units of the reduced sum; else 0.0
TAIL_SLOTS = 8

GRAD_SQ = TAIL_SLOTS  # in a step's record, after the slots: |gbar|^2
SKIPPED = TAIL_SLOTS + 1  # 1 if the update was left out
RECORD_SLOTS = TAIL_SLOTS + 2  # then the seconds of each rank, and the sums of a step function's figures

_LAPS = 8  # steps that a host may be ahead of its GPU, before the time of a micro-batch is unknown


class Measurement:
    """Measures the gradients in an engine's buckets; writes each micro-batch's tail, and reads the step's record."""

    norms: Tensor  # fp32: sums of squares of the mean gradient, of each block of the buckets, or `pack`'s of each chunk
    norms_of: Sequence[Tensor]  # of each bucket, its part of them

    def __init__(self, gradient_buckets: Sequence[Bucket], params: int, device: torch.device) -> None:
        """params: how many parameters the engine has."""
        self._buckets, self._params = gradient_buckets, params
        chunks = [bucket.table.num_chunks for bucket in gradient_buckets]
        every = torch.zeros(sum(chunks), dtype=torch.float32, device=device)
        for bucket, sumsq in zip(gradient_buckets, every.split_with_sizes(chunks) if chunks else (), strict=True):
            bucket.sumsq = sumsq
        self._total = SumPartialsArguments(every, torch.zeros((), dtype=torch.float64, device=device))
        self._squares = quick(every)
        # Of a record: |gbar|^2, and 0 for an update that is not left out.
        self._totals = torch.zeros(2, dtype=torch.float64, device=device)
        self._quick_totals = quick(self._totals)
        self.stopwatch = Stopwatch(device)

    def set_group(self, rank: int, size: int, figures: int, in_pack: bool, rounds: bool) -> None:
        """Goes on with other workers. Between steps. figures: slots of the tail for a step function's figures.

        in_pack: `pack` measures the mean too. rounds: it makes int8 messages, and measures what rounding adds.
        """
        self._in_pack, self._rounds = in_pack, rounds
        self.renew()
        self._rank, self._figures, self.tail = rank, figures, self._params + TAIL_SLOTS + size + figures  # elements
        self._usual = np.zeros(self.tail, np.float32)  # what every micro-batch's tail begins from
        self._usual[: self._params] = self._usual[self._params + MICRO_BATCHES] = 1.0
        self._usual[self._params + LOSS] = math.nan
        first = self.tail - figures
        self._weighted = [self._params + SUM_SQUARES, self._params + LOSS, *range(first, self.tail)]  # by the samples

    def write(self, place: Place, now: Step, current: MicroBatch) -> None:
        """Writes the tail of the micro-batch that ends to `place` (fp32 [tail]), or adds it to what is there, as the
        micro-batch's `leaf` says. Never waits for a GPU.
        """
        slots, samples, values = self._params, float(current.weight), self._usual.copy()
        for index in current.missed:
            values[index] = 0.0
        squares: Tensor | float = 0.0  # of one that is `alone`: `record` has it
        if not now.alone:
            if isinstance(self._squares, Tensor):
                sum_partials.run(self._total)
                squares = self._total.out
            else:
                squares = self._squares.sum(dtype=np.float64)
        if now.parts > 1:
            squares *= now.parts**2  # the loss was divided
        weighted = zip(self._weighted, (squares, current.loss, *current.figures), strict=False)
        added: Tensor | float = 0.0
        if self._rounds and current.last and not now.is_local:
            added = sum((each.added.sum() for each in self._buckets if each.added is not None), added)
        with np.errstate(all="ignore"):
            values[slots + SAMPLES] = samples
            if not now.done:  # what this rank alone writes, once a step
                values[slots + TAIL_SLOTS + self._rank] = self.stopwatch.seconds_before
                if (plan := now.plan) is not None and self._rank == 0:
                    values[slots + STEP_TIME], values[slots + DATA_WAIT] = plan.times
                    values[slots + DECISION] = plan.decision
            if not isinstance(place, Tensor):
                for index, scalar in weighted:
                    if scalar is not None:
                        values[index] = (scalar.item() if isinstance(scalar, Tensor) else scalar) * samples
                values[slots + ADDED] = float(added)
                place[:] = place + values if current.leaf.accumulate else values
                return
        host_values = devices.of(place.device).pinned((self.tail,), torch.float32)
        host_values.copy_(torch.from_numpy(values))
        tail = host_values.to(place.device, non_blocking=True)
        for index, scalar in weighted:
            if scalar is not None:
                tail[index] = (scalar.detach().double() if isinstance(scalar, Tensor) else scalar) * samples
        tail[slots + ADDED] = added
        place.add_(tail) if current.leaf.accumulate else place.copy_(tail)

    def total_weight(self, now: Step) -> Tensor | None:
        """float64 scalar: what the reduced buckets are to be divided by; None if they hold means."""
        if now.weights_are_known:
            return None
        if now.is_local:  # the buckets hold this worker's own sums
            return torch.full((), now.weight or 1.0, dtype=torch.float64, device=self._totals.device)  # no wait
        return now.tail[self._params + SAMPLES].double()

    def renew(self) -> None:
        """Takes other memory for `norms`: messages under way may still write to this."""
        blocks = [b.table.num_chunks if self._in_pack else num_blocks(b.body) for b in self._buckets]
        self.norms = torch.zeros(sum(blocks), dtype=torch.float32, device=self._totals.device)
        self.norms_of = self.norms.split_with_sizes(blocks) if blocks else ()
        for bucket, norms in zip(self._buckets, self.norms_of, strict=True):
            bucket.stored = norms if self._in_pack else None
        self._norm = SumPartialsArguments(self.norms, self._totals[0])
        self._blocks_of: dict[int, BlockSumsqArguments] = {}  # by bucket

    def measure(self, total_weight: Tensor | None, measured: Collection[int]) -> None:
        """Has the reduced buckets hold the mean gradient, `visible` what p.grad is to show of it, and `norms` its sums
        of squares; 0 of other workers' shards.

        measured: buckets of which it has those of this worker's part of the sum, by index. That is the mean where the
        total weight was known before.
        """
        share = None
        if total_weight is not None:
            exact = total_weight.reciprocal()
            share = exact.float()
            for bucket in self._buckets:
                bucket.own.mul_(exact if bucket.kind is torch.float64 else share)
                if bucket.mirrored.stop:
                    bucket.mean[bucket.mirrored].mul_(share)
        scaled: list[Tensor] = []
        for bucket, norms in zip(self._buckets, self.norms_of, strict=True):
            is_measured = bucket.index in measured
            shard = bucket.part if is_measured else bucket.shard
            if shard.stop - shard.start < bucket.body:
                first = shard.start // BLOCK
                last = first + num_blocks(shard.stop - shard.start)
                for others in (norms[:first], norms[last:]):  # the other workers' sums of the last step lie there
                    others.zero_()
                norms = norms[first:last]
            if self._in_pack or (is_measured and (share is None or not bucket.sharded)):  # else `own` may be rounded
                scaled.append(norms)
                if bucket.rounded is not None:
                    bucket.rounded.copy_(bucket.mean)
            elif norms.numel():
                kept = self._blocks_of.get(bucket.index)
                if kept is None or kept.flat is not bucket.own:
                    kept = self._blocks_of[bucket.index] = BlockSumsqArguments(bucket.own, norms, bucket.rounded)
                block_sumsq.run(kept)
        if scaled and share is not None:
            torch._foreach_mul_(scaled, share * share)

    def record(self, tail: Place, now: Step) -> Tensor:
        """The step's record from the reduced tail, once `norms` has the sums of squares of all shards.

        float64 [RECORD_SLOTS + workers + figures] on the device: the slots named above, |gbar|^2 and whether the update
        was left out, the seconds of each rank, the sums of a step function's figures.

        Weights that are no numbers of samples are put into units of samples: with W the sum of the weights w_j and B
        the step's samples, w_j becomes w_j B / W. S is then unbiased where a micro-batch's variance goes as 1 / w_j.
        """
        sum_partials.run(self._norm)
        slots, of_ranks = self._params, self._params + TAIL_SLOTS
        parts: Any = (tail[slots:of_ranks], self._quick_totals, tail[of_ranks:])
        if isinstance(tail, Tensor):
            record = torch.cat(parts)
        else:
            values = np.concatenate(parts)
            if now.alone:
                values[SUM_SQUARES] = values[SAMPLES] * values[GRAD_SQ]
            record = torch.from_numpy(values)
        if self._rounds and not now.weights_are_known:
            record[ADDED] /= record[SAMPLES] ** 2  # of the mean
        if now.plan is not None and now.plan.by_weight:
            ratio = now.plan.samples / record[SAMPLES]
            record[SUM_SQUARES] *= ratio
            record[LOSS] *= ratio
            if self._figures:
                record[-self._figures :] *= ratio
            record[SAMPLES] = now.plan.samples
        return record


@dataclass
class _Lap:
    began: Event
    ended: Event
    micro_batches: int = 0  # how many it had; 0 where none was timed


class Stopwatch:
    """Times a part of each step. On a GPU it times the stream without a wait: the newest finished step counts."""

    seconds_before: float = 0.0  # a micro-batch, of the newest finished step before this one; 0.0: none

    def __init__(self, device: torch.device) -> None:
        self._device = devices.of(device)
        count = _LAPS if self._device.asynchronous else 1  # the newest first
        self._laps = [_Lap(self._device.event(timing=True), self._device.event(timing=True)) for _ in range(count)]

    def start(self) -> None:
        self.seconds_before = 0.0
        for lap in self._laps:
            if lap.micro_batches and lap.ended.query():
                self.seconds_before = lap.began.elapsed_time(lap.ended) / 1000 / lap.micro_batches
                break
        self._laps.insert(0, self._laps.pop())  # the oldest is used again
        self._laps[0].micro_batches = 0
        self._laps[0].began.record()

    def stop(self, micro_batches: int) -> None:
        self._laps[0].ended.record()
        self._laps[0].micro_batches = micro_batches

    def forget(self) -> None:
        for lap in self._laps:
            lap.micro_batches = 0
