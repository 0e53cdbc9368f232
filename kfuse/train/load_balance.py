"""Uneven workers: how fast each one is, who holds the others up, and what share of a step's micro-batches each gets.

Throughput is an exponentially weighted mean of micro-batches a second, kept for each worker by its number. Every worker
computes the same values, from times that travelled in the steps' tails, so all find the same shares. (Micro-batches in
proportion to speed: VirtualFlow, Or et al. 2022; the straggler's threshold: Or et al. 2020.)
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

DECAY = 0.98
SLOW = 0.8  # of the median's throughput: below it a worker is a straggler
_WELL = 0.9
WARM = 10  # steps before a worker's throughput counts
_GRAIN = 16  # shares are multiples of a sixteenth of the median's: small changes of speed move nobody's data
_LEAST = 2  # sixteenths: even the slowest worker gets something to be measured by
_FORGIVENESS = 0.02  # a step: towards the median, for a worker that had nothing to do

Throughput = dict[int, tuple[float, int]]
"""Worker: (mean micro-batches a second, steps it was measured in)."""


def measured(known: Mapping[int, tuple[float, int]], workers: Sequence[int], seconds: Sequence[float]) -> Throughput:
    """The means after another step, in which `workers[r]` took `seconds[r]` for a micro-batch (0: unknown)."""
    out: Throughput = {}
    relative = relative_throughput(known, workers)
    for worker, time, ratio in zip(workers, seconds, relative, strict=True):
        mean, steps = known.get(worker, (0.0, 0))
        if time > 0:
            weight = max(1 - DECAY, 1 / (steps + 1))  # the plain mean at first
            out[worker] = (mean + weight * (1 / time - mean), steps + 1)
        elif ratio is not None and ratio < 1:
            out[worker] = (mean + _FORGIVENESS * (mean / ratio - mean), steps)
        elif steps:
            out[worker] = (mean, steps)
    return out


def relative_throughput(known: Mapping[int, tuple[float, int]], workers: Sequence[int]) -> list[float | None]:
    """Each worker's throughput over the median of all; None while it is not known well enough."""
    means = [known[worker][0] if known.get(worker, (0.0, 0))[1] >= WARM else None for worker in workers]
    if len(workers) < 2 or any(mean is None for mean in means):
        return [None] * len(workers)
    # Of an even number, the faster half's slowest: of two workers the slower one must be able to stand out.
    median = statistics.median_high(mean for mean in means if mean is not None)
    return [None if mean is None else mean / median for mean in means]


def shares(relative: Sequence[float | None]) -> tuple[int, ...] | None:
    """Weights for `worker_range`; None (equal shares) unless a worker is a straggler."""
    known = [ratio for ratio in relative if ratio is not None]
    if len(known) < len(relative) or min(known, default=1.0) >= SLOW:
        return None
    return tuple(max(_LEAST, round(_GRAIN * ratio)) for ratio in known)


def stragglers(workers: Sequence[int], relative: Sequence[float | None], before: Sequence[int]) -> tuple[int, ...]:
    """Who is one; who was one `before` stays one until it is well above the threshold."""
    return tuple(
        worker
        for worker, ratio in zip(workers, relative, strict=True)
        if ratio is not None and ratio < (_WELL if worker in before else SLOW)
    )
