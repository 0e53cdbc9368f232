"""The order of a stream whose shards have known lengths: all samples once, in the same order in each epoch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np


class Epochs:
    """In round r each shard that is longer than r * block gives the next `block` samples, or what is left of it."""

    def __init__(self, lengths: Sequence[int], block: int) -> None:
        self._lengths, self._block = np.array(lengths, np.int64), block
        self._sorted: list[int] = sorted(self._lengths.tolist())
        self._sums = [*accumulate(self._sorted, initial=0)]
        self.samples = self._sums[-1]  # of an epoch
        self._starts, self._shards, self._position = [0], [0], 0  # of the round that was asked for last

    def place(self, number: int) -> tuple[int, int]:
        """Returns (shard, position) of sample `number` of a run. A new round takes O(shards)."""
        number = int(number) % self.samples
        if not self._starts[0] <= number < self._starts[-1]:
            rounds = range(-(-self._sorted[-1] // self._block))
            round_ = bisect_right(rounds, number, key=self._before) - 1
            self._position = round_ * self._block
            left = np.clip(self._lengths - self._position, 0, self._block)
            self._shards = np.flatnonzero(left).tolist()
            self._starts = [*accumulate(left[self._shards].tolist(), initial=self._before(round_))]
        turn = bisect_right(self._starts, number) - 1
        return self._shards[turn], self._position + number - self._starts[turn]

    def _before(self, round_: int) -> int:
        """Returns how many samples of an epoch come before this round."""
        ended = bisect_right(self._sorted, round_ * self._block)
        return self._sums[ended] + (len(self._sorted) - ended) * round_ * self._block
