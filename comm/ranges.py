"""With reproducible sums: which contiguous range of a step's micro-batches each worker sums. Few bytes, even loads.

With the canonical tree (`sum_tree`) the transport all_to_all needs, in bytes a parameter on n workers,

    12 (parameter and two moments) + 4 x slots (a worker's partial sums) + 4 x pieces / n (rows that a worker receives).

A worker sends each of its pieces, so few pieces are fewer bytes on the wire, too. A range that begins and ends where a
subtree of the canonical tree does has few of both. An equal share may begin anywhere: so some shares must be larger.
With M micro-batches:

1) The largest share is ceil(M / n) if that meets the bound. If not it is the smallest that does, at most 1.25 M / n.
2) Of all ranges without a larger share those that need the fewest bytes are taken.
3) Of these, those with the most even shares.

The bound: 28 bytes for M <= 4 n, else 22 + 4 ceil(log2(ceil(M / n))). tests/test_ranges.py shows that it is met for all
n = 2..64 and M <= 256. A step of more than 512 micro-batches is solved in parts, and in units of a power of two where
shares are larger than 64, so that the first call for a step of 10,000 takes milliseconds. There 1) and 2) hold
only approximately.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from kfuse.comm.sum_tree import plan_range

LARGEST_LOAD = (5, 4)
"""Largest share over mean share, a fraction: no share is larger, unless ceil(M / n) is."""

_EXACT = 512  # micro-batches, or units of several: as many are solved in one part
_LARGEST_SHARE = 64  # units, in a larger step
_PIECE = 2**32  # the cost of a piece, and of a slot on every worker; what is below it is the unevenness of the shares
_NEVER = 2**53  # more than any ranges cost; 2**62 fits an int64
_BITS = np.array([n.bit_count() for n in range(2 * _EXACT)])
_LOG = np.array([max(n.bit_length() - 1, 0) for n in range(2 * _EXACT)])


def bound(total: int, workers: int) -> int:
    """Bytes a parameter that reproducible sums of `total` micro-batches on `workers` workers need at most."""
    largest = -(-total // workers)
    return 28 if total <= 4 * workers else 22 + 4 * (largest - 1).bit_length()


def bytes_a_parameter(ranges: Sequence[range]) -> float:
    """What the worker with the most slots holds, by the formula above. ranges: of all workers, in rank order."""
    plans = [plan_range(r.start, len(r), ranges[-1].stop) for r in ranges]
    received = sum(len(plan.pieces) for plan in plans) / len(plans) if len(plans) > 1 else 0.0
    return 12 + 4 * max(plan.slots for plan in plans) + 4 * received


@lru_cache(maxsize=256)
def aligned_ranges(total: int, workers: int) -> tuple[range, ...]:
    """The ranges of all workers, in rank order, for `total` micro-batches: at least one for each worker.

    A pure function of integers, so every worker finds the same. Raises ValueError for fewer micro-batches than workers.
    """
    if not 1 <= workers <= total:
        raise ValueError(f"{total} micro-batches for {workers} workers: at least one each is needed")
    unit = 1
    while total > _EXACT * unit and total > _LARGEST_SHARE * workers * unit:
        unit *= 2
    count = -(-total // unit)
    least, most = -(-count // workers), LARGEST_LOAD[0] * total // (LARGEST_LOAD[1] * workers * unit)
    allowed = workers * (bound(count, workers) - 12) // 4 * _PIECE + _PIECE - 1
    cost, cuts = _cheapest(count, workers, least)
    if cost > allowed and most > least:
        cost, cuts = _cheapest(count, workers, most)
        while most - least > 1:  # the larger a share may be, the fewer bytes are needed: `least` needs too many
            middle = (least + most) // 2
            cost, tried = _cheapest(count, workers, middle)
            if cost <= allowed:
                most, cuts = middle, tried
            else:
                least = middle
    cuts = [min(cut * unit, total) for cut in cuts]
    return tuple(map(range, cuts, cuts[1:]))


def _cheapest(total: int, workers: int, largest: int) -> tuple[int, list[int]]:
    """Cost and cuts of the ranges that need the fewest bytes, where no share is larger than `largest`."""
    best, cuts = _NEVER, list[int]()
    slots = max(1, (largest - 1).bit_length() - 1)  # fewer are never worth their pieces
    while not cuts or workers * slots * _PIECE < best:
        cost, found = _split(0, total, workers, total, largest, slots)
        if cost < _NEVER and (cost := cost + workers * slots * _PIECE) < best:
            best, cuts = cost, found
        slots += 1
    return best, cuts


def _split(first: int, stop: int, workers: int, total: int, largest: int, slots: int) -> tuple[int, list[int]]:
    """Cost and cuts (`first` and `stop` among them) of workers that sum first..stop-1 with at most so many slots."""
    if stop - first > _EXACT:
        half = workers // 2
        low = max(first + half, stop - (workers - half) * largest)
        high = min(first + half * largest, stop - (workers - half))
        middle = first + (stop - first) * half // workers
        steps = [1 << level for level in reversed(range(largest.bit_length() + 1))]
        near = ((middle + step // 2) // step * step for step in steps)
        cut = next(place for place in near if low <= place <= high)
        left, left_cuts = _split(first, cut, half, total, largest, slots)
        right, right_cuts = _split(cut, stop, workers - half, total, largest, slots)
        return left + right, left_cuts + right_cuts[1:]
    # The pieces of a range depend only on its place in the smallest subtree that no share can fill.
    place = first >> largest.bit_length() << largest.bit_length()
    cost, cuts = _solve(first - place, stop - place, workers, largest, slots, stop == total)
    return cost, [cut + place for cut in cuts]


@lru_cache(maxsize=256)
def _solve(first: int, stop: int, workers: int, largest: int, slots: int, ends: bool) -> tuple[int, list[int]]:
    """Returns what `_split` does, by dynamic programming over the workers. ends: no micro-batch comes after `stop`."""
    count = stop - first
    costs, needed = _table(first, stop, largest, ends)
    cost = np.where(needed <= slots, costs, _NEVER)
    # best[r, largest + i]: the least cost of r workers that sum the first i. The places before are never reached.
    best = np.full((workers + 1, largest + count + 1), _NEVER)
    best[0, largest] = 0
    before = sliding_window_view(best, largest, axis=1)  # [r, i, k]: r workers that sum the first i - largest + k
    for r in range(1, workers + 1):
        low, high = max(r, count - (workers - r) * largest), min(r * largest, count - (workers - r))
        best[r, largest + low : largest + high + 1] = (before[r - 1, low : high + 1] + cost[low : high + 1]).min(axis=1)
    cuts = [count]
    for r in reversed(range(workers)):
        cuts.append(cuts[-1] - largest + int((before[r, cuts[-1]] + cost[cuts[-1]]).argmin()))
    return int(best[workers, -1]), [first + cut for cut in reversed(cuts)]


@lru_cache(maxsize=8)
def _table(first: int, stop: int, largest: int, ends: bool) -> tuple[np.ndarray, np.ndarray]:
    """Costs and slots of ranges, int64 [stop - first + 1, largest]: row i, column k has first+i-largest+k..first+i-1.

    For whole tables of ranges what `plan_range` finds for one. A range is cut at its place that is a multiple of the
    largest power of two, the middle: up to there are ever larger subtrees, from there ever smaller ones.
    """
    stops = np.arange(first, stop + 1)[:, None]
    starts = stops - largest + np.arange(largest)
    valid = starts >= first
    starts = np.where(valid, starts, stops)
    last = (stops == stop) & ends  # the tree ends with it: what is right of the middle is one subtree
    level = _LOG[starts ^ (stops - last)]
    middle = (stops - last) >> level << level
    left, right = middle - starts, stops - middle
    of_left, of_right = _BITS[left], np.where(last, right > 0, _BITS[right])
    slots_left = np.where(left > 0, of_left - 1 + np.maximum(1, _LOG[left]), 0)
    slots_right = np.where(right > 0, of_left + np.maximum(np.maximum(1, _LOG[right]), of_right), 0)
    whole = last & (left == 1 << level)  # the two sides are siblings
    pieces = np.where(whole, 1, of_left + of_right)
    slots = np.where(whole, np.maximum(1, _LOG[left + right]), np.maximum(slots_left, slots_right))
    lengths = left + right
    return np.where(valid, pieces * _PIECE + lengths**2, _NEVER), slots
