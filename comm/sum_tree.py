"""The canonical binary tree over micro-batches: one summation order for any number of workers.

Floating-point addition is not associative, so a sum's bits depend on its order. Here the order belongs to the
micro-batch index alone: leaves 0..M-1, node (level, index) covers leaves [index * 2^level, (index + 1) * 2^level),
and a node is its left child plus its right child. A child with no leaves (beyond M - 1) is skipped, so that its
sibling *is* the parent. A worker that holds some of the leaves, as a rule a contiguous range, sums the largest nodes
inside it and sends those; the receiver continues the additions in the same tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, count

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
    """How one worker sums its leaves. After the last step, slot places[k] holds the sum of node pieces[k]."""

    steps: tuple[LeafStep, ...]
    pieces: tuple[Node, ...]
    """Left to right: a function of the set of leaves alone, whatever slots they were summed in."""
    places: tuple[int, ...]
    slots: int

    @property
    def held(self) -> tuple[tuple[Node, int], ...]:
        """Each piece and its slot."""
        return tuple(zip(self.pieces, self.places, strict=True))


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
def plan_range(first: int, count: int, total: int, on_host: bool = False) -> RangePlan:
    """The order in which a worker sums leaves first..first+count-1 of `total`, as a binary counter does.

    A subtree of 2^d leaves needs d slots (at least one), beside those of the finished pieces to its left: a leaf on the
    right is added to its sibling in place.

    on_host: beside the finished pieces two slots are enough, since older sums are copied to the host, and back when it
    is their turn. Raises ValueError if the range does not lie inside the tree.
    """
    if not (first >= 0 and count >= 0 and first + count <= total):
        raise ValueError(f"micro-batches {first}..{first + count - 1} do not lie in 0..{total - 1}")
    plan = plan_leaves(range(first, first + count), total)
    return _with_places(plan) if on_host else plan


def plan_leaves(leaves: Sequence[int], total: int, held: Sequence[tuple[Node, int]] = ()) -> RangePlan:
    """The order in which a worker sums `leaves` of `total`, in ascending order, to what it has already.

    held: sums of other leaves, each a node and its slot: a worker that goes on after another one was lost has them. A
    node is added to its sibling as soon as both are there, in the lower one of their slots. Which of the two operands
    comes first does not change a sum's bits.
    """
    slot_of = dict(held)
    steps: list[LeafStep] = []
    slots = max((1, *(slot + 1 for slot in slot_of.values())))
    for leaf in leaves:
        node = _promote((0, leaf), total)
        adds = _sibling(node) in slot_of  # the last leaf's sibling may be a whole subtree
        if adds:
            slot = slot_of.pop(_sibling(node))
            node = _parent(node, total)
        else:
            used = set(slot_of.values())
            slot = next(k for k in count() if k not in used)
        slots = max(slots, slot + 1)
        merges: list[Merge] = []
        place = slot
        while (other := slot_of.pop(_sibling(node), None)) is not None:
            place, source = min(place, other), max(place, other)
            merges.append((place, source))
            node = _parent(node, total)
        slot_of[node] = place
        steps.append(LeafStep(slot, adds, tuple(merges)))
    pieces = sorted(slot_of, key=_first_leaf)
    return RangePlan(tuple(steps), tuple(pieces), tuple(slot_of[node] for node in pieces), slots)


@lru_cache(maxsize=256)
def pieces_of(leaves: tuple[int, ...], total: int) -> tuple[Node, ...]:
    """The fewest nodes that cover these leaves (ascending) of `total` and no others, left to right."""
    return plan_leaves(leaves, total).pieces


def _first_leaf(node: Node) -> int:
    return node[1] << node[0]


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
    slots = max((step.slot + 1 for step in steps), default=1)
    return RangePlan(tuple(steps), plan.pieces, plan.places, slots)


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
