"""Which samples a step uses: pure functions of (seed, epoch, cursor), so that nothing depends on the workers.

The position in an epoch is one number, the cursor: how many of its samples have been used. A step takes the
next `count` of them, cuts them into micro-batches, and gives each worker a contiguous range of those. The
number of workers may change at any step: every sample of an epoch is still used exactly once, and none is
padded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

import numpy as np


def permutation(length: int, seed: int, epoch: int = 0) -> np.ndarray:
    """Returns the order of `length` samples in `epoch`, int64 `[length]`, the same on every machine.

    Sorts raw 64-bit outputs of PCG64: NumPy keeps a bit generator's stream stable between versions, which it
    does not promise for `Generator.permutation` (NEP 19). Workers may then run different versions of NumPy.
    """
    seeds = np.random.SeedSequence(seed, spawn_key=(epoch,))
    keys = np.random.PCG64(seeds).random_raw(length)
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)


class EpochSampler:
    """Visits each of `length` samples exactly once an epoch, in an order drawn from (seed, epoch).

    Holds no position: `indices` gives the same answer whenever and wherever it is asked. The order of the last epoch
    asked for is cached (8 bytes a sample). Raises ValueError for an empty data set.
    """

    def __init__(self, length: int, seed: int) -> None:
        if length < 1:
            raise ValueError(f"length={length}: the data must have at least 1 sample")
        self.length, self.seed = length, seed
        self._cached = (-1, np.empty(0, dtype=np.int64))

    def indices(self, epoch: int, cursor: int, count: int) -> np.ndarray:
        """Returns the samples at positions `cursor..cursor+count-1` of `epoch`, int64; fewer at its end."""
        if self._cached[0] != epoch:
            self._cached = (epoch, permutation(self.length, self.seed, epoch))
        return self._cached[1][cursor : cursor + count].copy()


class StreamSampler:
    """Takes the numbers 0, 1, 2, ... in order: the samples of a stream, which is one epoch without an end."""

    length = None

    def __init__(self, seed: int) -> None:
        """seed: of the random numbers of fetching; the order has none."""
        self.seed = seed

    def indices(self, epoch: int, cursor: int, count: int) -> np.ndarray:
        """Returns the numbers `cursor..cursor+count-1`, int64."""
        return np.arange(cursor, cursor + count, dtype=np.int64)


def micro_batch_sizes(count: int, micro: int) -> list[int]:
    """Cuts `count` samples into micro-batches of `micro` samples, the last one smaller where it must be."""
    full, rest = divmod(count, micro)
    return [micro] * full + [rest] * (rest > 0)


def worker_range(
    micro_batches: int, workers: int, rank: int, weights: Sequence[float] | None = None, aligned: bool = False
) -> range:
    """Returns the contiguous range of micro-batches of worker `rank`; together they cover each exactly once.

    Without `weights` (or with equal ones) the shares differ by at most one. With them, shares are in
    proportion and less than one micro-batch off. Rank 0, the leader, always has one; other shares may be empty.
    aligned: for reproducible sums. The ranges are those of `kfuse.comm.sum_tree`, which need little memory: the largest
    share is ceil(micro_batches / workers) where that is enough, and at most 1.25 of the mean share. Weighted shares
    keep their proportion instead, and may need more memory.
    Exact arithmetic: all workers find the same boundaries.
    """
    if weights is None and aligned and micro_batches >= workers:
        from kfuse.comm.sum_tree import aligned_ranges  # imported when used: `import kfuse` is quick

        return aligned_ranges(micro_batches, workers)[rank]
    if weights is None:
        return range(-(-micro_batches * rank // workers), -(-micro_batches * (rank + 1) // workers))
    bounds = list(accumulate((Fraction(w) for w in weights), initial=Fraction(0)))
    start, stop = (math.ceil(micro_batches * b / bounds[-1]) for b in bounds[rank : rank + 2])
    return range(start, stop)
