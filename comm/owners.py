"""Which worker owns which matrix, where a parameter's update needs all of it: Muon's.

Each bucket is cut between parameters, one part for each rank in rank order, so that a part is contiguous and travels as
any other shard. The cuts follow from the layout and the number of workers alone, so every worker finds the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from kfuse.comm.buckets import BucketLayout


def owned_parts(layouts: Sequence[BucketLayout], size: int) -> dict[int, list[slice]]:
    """Returns each rank's part of each bucket whose parameters have costs, by the bucket's number; some may be empty.

    The largest sum of a rank's costs, over this bucket and those before, is the least that contiguous parts allow.
    """
    loads = [0] * size
    found: dict[int, list[slice]] = {}
    for number, layout in enumerate(layouts):
        if layout.costs:
            counts = _least_largest(layout.costs, loads)
            ends, parts, first = [*layout.offsets, layout.numel], list[slice](), 0
            for rank, count in enumerate(counts):
                loads[rank] += sum(layout.costs[first : first + count])
                parts.append(slice(ends[first], ends[first + count]))
                first += count
            found[number] = parts
    return found


def _least_largest(costs: Sequence[int], loads: Sequence[int]) -> list[int]:
    """Returns how many of the costs, in their order, each rank takes, so that the largest load becomes the least."""
    least = max(loads)
    limits = range(least, least + sum(costs))  # at the one after them the first rank takes all
    enough = bisect_left(limits, len(costs), key=lambda limit: sum(_filled(costs, loads, limit)))
    return _filled(costs, loads, least + enough)


def _filled(costs: Sequence[int], loads: Sequence[int], limit: int) -> list[int]:
    """Returns how many costs each rank takes, if each in turn takes as many as its limit allows."""
    counts, at = [], 0
    for load in loads:
        first = at
        while at < len(costs) and load + costs[at] <= limit:
            load += costs[at]
            at += 1
        counts.append(at - first)
    return counts
