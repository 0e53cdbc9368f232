"""The canonical binary tree over micro-batches: one summation order for any number of workers.

Floating-point addition is not associative, so a sum's bits depend on its order. Here the order belongs to the
micro-batch index alone: leaves 0..M-1, node (level, index) covers leaves [index * 2^level, (index + 1) * 2^level),
and a node is its left child plus its right child. A child with no leaves (beyond M - 1) is skipped, so that its
sibling *is* the parent. A worker that holds a contiguous range of the leaves sums the largest nodes inside it and sends
those (its pieces); the receiver continues the additions in the same tree. With n workers that takes, in bytes a
parameter of AdamW,

    12 (parameter and two moments) + 4 x slots (a worker's partial sums) + 4 x pieces / n (rows that a worker receives)

A range that begins and ends where a large subtree does has few of both: `aligned_ranges` cuts a step so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

Node = tuple[int, int]  # (level, index)
Merge = tuple[int, int]  # (destination, source): x[destination] += x[source]


@dataclass(frozen=True)
class LeafStep:
    """What to do with one leaf: write it to `slot` (or add it there), then merge slots in order."""

    slot: int
    accumulate: bool
    merges: tuple[Merge, ...]


WRITE, ADD = LeafStep(0, False, ()), LeafStep(0, True, ())  # without the tree: the first micro-batch, and the others


@dataclass(frozen=True)
class RangePlan:
    """How one worker sums its leaves. After the last step, slot k holds the sum of node pieces[k]."""

    steps: tuple[LeafStep, ...]
    pieces: tuple[Node, ...]  # left to right
    slots: int


def bound(total: int, workers: int) -> int:
    """Bytes a parameter that `aligned_ranges` of `total` micro-batches on `workers` workers need at most."""
    return 28 if total <= 4 * workers else 28 + 4 * (-(-total // workers) - 1).bit_length()


def bytes_a_parameter(ranges: Sequence[range]) -> float:
    """What the worker with the most slots holds, by the formula above. ranges: of all workers, in rank order."""
    sizes = [_piece_sizes(r.start, r.stop, ranges[-1].stop) for r in ranges]
    slots = max(left + max(1, size.bit_length() - 1) for each in sizes for left, size in enumerate(each))
    return 12 + 4 * slots + (4 * sum(map(len, sizes)) / len(ranges) if len(ranges) > 1 else 0.0)


def _piece_sizes(first: int, stop: int, total: int) -> list[int]:
    """Leaves of each of the largest subtrees in first..stop-1. One that ends with the tree may be incomplete."""
    sizes = []
    while first < stop:
        size = first & -first or 1 << total.bit_length()
        while size > stop - first and (stop < total or size // 2 >= stop - first):
            size //= 2
        sizes.append(min(size, stop - first))
        first += size
    return sizes


@lru_cache(maxsize=256)
def aligned_ranges(total: int, workers: int) -> tuple[range, ...]:
    """The ranges of all workers, in rank order, for `total` micro-batches: at least one for each worker.

    The largest is at most ceil(M / n), or 1.25 M / n where M > 4 n. Among cuts at multiples of a power of two those
    with the most even shares are taken that save about 20 % of the bytes; where none do, those with the fewest bytes.
    Raises ValueError for fewer micro-batches than workers.
    """
    if not 1 <= workers <= total:
        raise ValueError(f"{total} micro-batches for {workers} workers: at least one each is needed")
    equal = -(-total // workers)
    largest = equal if total <= 4 * workers else max(equal, 5 * total // (4 * workers))
    enough = bound(total, workers) - (0 if total <= 4 * workers else 6)
    best, chosen = (float("inf"), 0, 0.0), tuple[range, ...]()
    for unit in (1 << level for level in range(largest.bit_length())):
        for quarter in range(4):  # rounded down, up, or between
            inner = [(4 * total * r // (workers * unit) + quarter) // 4 * unit for r in range(1, workers)]
            ranges = tuple(map(range, (0, *inner), (*inner, total)))
            shares = [len(r) for r in ranges]
            if min(shares) and max(shares) <= largest:
                needed = bytes_a_parameter(ranges)
                key = (max(needed, enough), max(shares), needed)
                best, chosen = min((best, chosen), (key, ranges), key=lambda pair: pair[0])
    return chosen


def _promote(node: Node, total: int) -> Node:
    """The highest node that covers the same leaves as `node` in a tree of `total` leaves."""
    level, index = node
    depth = (total - 1).bit_length()
    while level < depth and index % 2 == 0 and (index + 1) << level >= total:
        level, index = level + 1, index // 2
    return level, index


def _sibling(node: Node) -> Node:
    return node[0], node[1] ^ 1


def _parent(node: Node, total: int) -> Node:
    return _promote((node[0] + 1, node[1] // 2), total)


@lru_cache(maxsize=256)
def plan_range(first: int, count: int, total: int) -> RangePlan:
    """The order in which a worker sums leaves first..first+count-1 of `total`, as a binary counter does.

    The slots are a stack of finished subtrees, left to right; a leaf on the right is added to its sibling in place.
    Raises ValueError if the range does not lie inside the tree.
    """
    if not (first >= 0 and count >= 0 and first + count <= total):
        raise ValueError(f"micro-batches {first}..{first + count - 1} do not lie in 0..{total - 1}")
    stack: list[Node] = []
    steps: list[LeafStep] = []
    for leaf in range(first, first + count):
        node = _promote((0, leaf), total)
        adds = stack[-1:] == [_sibling(node)]  # the last leaf's sibling may be a whole subtree
        if adds:
            stack.pop()
            node = _parent(node, total)
        slot = len(stack)
        merges: list[Merge] = []
        while stack[-1:] == [_sibling(node)]:
            stack.pop()
            merges.append((len(stack), len(stack) + 1))
            node = _parent(node, total)
        stack.append(node)
        steps.append(LeafStep(slot, adds, tuple(merges)))
    return RangePlan(tuple(steps), tuple(stack), max((1, *(step.slot + 1 for step in steps))))


def plan_merges(nodes: Sequence[Node], total: int) -> tuple[Merge, ...]:
    """The additions that turn nodes covering all `total` leaves, in any order, into the root, which ends in row 0.

    Raises ValueError if the nodes do not cover the tree exactly.
    """
    row_of: dict[Node, int] = {}
    merges: list[Merge] = []
    for row, given in enumerate(nodes):
        node = _promote(given, total)
        while (other := row_of.pop(_sibling(node), None)) is not None:
            row, source = min(row, other), max(row, other)  # so whatever has row 0 stays there
            merges.append((row, source))
            node = _parent(node, total)
        row_of[node] = row
    if len(merges) != len(nodes) - 1 or list(row_of) != [((total - 1).bit_length(), 0)]:  # one that came twice is lost
        raise ValueError(f"nodes {list(nodes)} do not cover the tree over {total} micro-batches")
    return tuple(merges)
