"""The canonical binary tree over micro-batches: one summation order for any number of workers.

Floating-point addition is not associative, so a sum's bits depend on its order. Here the order belongs to the
micro-batch index alone: leaves 0..M-1, node (level, index) covers leaves [index * 2^level, (index + 1) * 2^level),
and a node is its left child plus its right child. A child with no leaves (beyond M - 1) is skipped, so that its
sibling *is* the parent. A worker that holds a contiguous range of leaves sums the largest nodes inside it and sends
those; the receiver continues the additions in the same tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

Node = tuple[int, int]  # (level, index)
Merge = tuple[int, int]  # (destination, source): x[destination] += x[source]


@dataclass(frozen=True)
class LeafStep:
    """What to do with one leaf: write it to `slot` (or add it there), then merge slots in order."""

    slot: int
    accumulate: bool
    merges: tuple[Merge, ...]
    saves: tuple[tuple[int, int], ...] = ()
    """Before all else: (slot, place) pairs, the slot is copied to this place on the host."""
    loads: tuple[int | None, ...] = ()
    """For each merge: the place on the host from which its destination is copied first; None: it is in its slot.

    Empty: each is in its slot."""


@dataclass(frozen=True)
class RangePlan:
    """How one worker sums its leaves. After the last step, slot k holds the sum of node `pieces[k]`."""

    steps: tuple[LeafStep, ...]
    pieces: tuple[Node, ...]
    slots: int


def _promote(node: Node, total: int) -> Node:
    """The highest node that covers the same leaves as `node` in a tree of `total` leaves."""
    level, index = node
    depth = (total - 1).bit_length()
    while level < depth and index % 2 == 0 and (index + 1) << level >= total:
        level, index = level + 1, index // 2
    return level, index


def _siblings(left: Node, right: Node) -> bool:
    return left[0] == right[0] and left[1] % 2 == 0 and right[1] == left[1] + 1


@lru_cache(maxsize=256)
def plan_range(first: int, count: int, total: int, on_host: bool = False) -> RangePlan:
    """The order in which a worker sums leaves first..first+count-1 of `total`, as a binary counter does.

    A slot is a position of the counter's stack. A subtree of 2^d leaves needs d slots (at least one), beside those of
    the finished pieces to its left: a leaf on the right is added to its sibling in place.

    on_host: beside the finished pieces two slots are enough, since older sums are copied to the host, and back when it
    is their turn. Raises ValueError if the range does not lie inside the tree.
    """
    if not (first >= 0 and count >= 0 and first + count <= total):
        raise ValueError(f"micro-batches {first}..{first + count - 1} do not lie in 0..{total - 1}")
    stack: list[Node] = []
    steps: list[LeafStep] = []
    slots = 1
    for leaf in range(first, first + count):
        node = _promote((0, leaf), total)
        adds = bool(stack) and _siblings(stack[-1], node)  # the last leaf's sibling may be a whole subtree
        if adds:
            stack[-1] = _promote((node[0] + 1, node[1] // 2), total)
        else:
            stack.append(node)
        slot = len(stack) - 1
        slots = max(slots, len(stack))
        merges: list[Merge] = []
        while len(stack) >= 2 and _siblings(stack[-2], stack[-1]):
            level, index = stack.pop()
            stack[-1] = _promote((level + 1, index // 2), total)
            merges.append((len(stack) - 1, len(stack)))
        steps.append(LeafStep(slot, adds, tuple(merges)))
    plan = RangePlan(tuple(steps), tuple(stack), slots)
    return _with_places(plan) if on_host else plan


def _with_places(plan: RangePlan) -> RangePlan:
    """The same additions, with two slots for unfinished sums: position p of the stack is in slot base + (p - base) % 2.

    base: the first position that is not a finished piece. So a leaf at position p takes the slot of position p - 2,
    whose sum is copied to the host before, unless it is there.
    """
    # The pieces below the lowest position that is used from a step on are finished, and stay where they are.
    lowest = [step.slot - len(step.merges) for step in plan.steps]
    finished = list(accumulate(reversed(lowest), min))[::-1]
    saved: set[int] = set()
    steps: list[LeafStep] = []
    for step, base in zip(plan.steps, finished, strict=True):
        slot_of = {p: base + (p - base) % 2 for p in range(base, step.slot + 1)}
        saves, loads = [], []
        old = step.slot - 2  # in whose slot the leaf is written
        if not step.accumulate and old >= base and old not in saved:
            saves.append((slot_of[old], old - base))
            saved.add(old)
        for destination, _ in step.merges:
            loads.append(destination - base if destination in saved else None)
            saved.discard(destination)
        merges = tuple((slot_of[destination], slot_of[source]) for destination, source in step.merges)
        steps.append(LeafStep(slot_of[step.slot], step.accumulate, merges, tuple(saves), tuple(loads)))
    return RangePlan(tuple(steps), plan.pieces, max((step.slot + 1 for step in steps), default=1))


def plan_merges(nodes: Sequence[Node], total: int) -> tuple[Merge, ...]:
    """The additions that turn nodes covering all `total` leaves, left to right, into the root, which ends in row 0.

    Raises ValueError if the nodes do not cover the tree exactly.
    """
    stack: list[tuple[Node, int]] = []
    merges: list[Merge] = []
    for row, node in enumerate(nodes):
        stack.append((_promote(node, total), row))
        while len(stack) >= 2 and _siblings(stack[-2][0], stack[-1][0]):
            (level, index), source = stack.pop()
            destination = stack[-1][1]
            stack[-1] = (_promote((level + 1, index // 2), total), destination)
            merges.append((destination, source))
    root = ((total - 1).bit_length(), 0)
    if [node for node, _ in stack] != [root]:
        raise ValueError(f"nodes {list(nodes)} do not cover the tree over {total} micro-batches")
    return tuple(merges)
