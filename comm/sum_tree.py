"""The canonical binary tree over micro-batches: one summation order for any number of workers.

Floating-point addition is not associative, so a sum's bits depend on its order. Here the order belongs to the
micro-batch index alone: leaves 0..M-1, node (level, index) covers leaves [index * 2^level, (index + 1) * 2^level),
and a node is its left child plus its right child. A child with no leaves (beyond M - 1) is skipped, so that its
sibling *is* the parent. A worker that holds a contiguous range of the leaves sums the largest nodes inside it and sends
those; the receiver continues the additions in the same tree.
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


WRITE, ADD = LeafStep(0, False, ()), LeafStep(0, True, ())
"""Without the canonical tree: what a worker does with its first micro-batch, and with each further one."""


@dataclass(frozen=True)
class RangePlan:
    """How one worker sums its leaves. After the last step, slot k holds the sum of node pieces[k]."""

    steps: tuple[LeafStep, ...]
    pieces: tuple[Node, ...]
    """Left to right."""
    slots: int


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

    The slots are a stack of finished subtrees, left to right. A subtree of 2^d leaves needs d slots (at least one),
    beside those of the finished pieces to its left: a leaf on the right is added to its sibling in place.

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
    twice = False
    for row, given in enumerate(nodes):
        node = _promote(given, total)
        while (other := row_of.pop(_sibling(node), None)) is not None:
            row, source = min(row, other), max(row, other)  # so whatever has row 0 stays there
            merges.append((row, source))
            node = _parent(node, total)
        twice = twice or node in row_of
        row_of[node] = row
    if twice or list(row_of) != [((total - 1).bit_length(), 0)]:
        raise ValueError(f"nodes {list(nodes)} do not cover the tree over {total} micro-batches")
    return tuple(merges)
