"""Merges: the order in which rows are added up, as (destination, source) pairs: row[destination] += row[source]."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

Merges = tuple[tuple[int, int], ...]

ADD = -1


def check_merges(name: str, merges: Merges, count: int) -> None:
    """Raises ValueError where a merge does not name two different rows of `count`."""
    for dst, src in merges:
        if not (0 <= dst < count and 0 <= src < count and dst != src):
            raise ValueError(f"{name}: merge ({dst}, {src}) must name two different rows of {count}")


@cache
def postfix(count: int, merges: Merges) -> tuple[int, ...]:
    """What the merges leave in row 0, as a postfix expression: row numbers, and ADD for the two values before it.

    In this order few sums are unfinished at a time.
    """
    rows: list[tuple[int, ...]] = [(row,) for row in range(count)]
    for dst, src in merges:
        rows[dst] = (*rows[dst], *rows[src], ADD)
    return rows[0]


@cache
def together(merges: Merges) -> tuple[tuple[slice, slice], ...]:
    """The same sums in fewer operations: rows[destinations] += rows[sources], the rows of each evenly spaced.

    Merges that neither need nor disturb each other's result go together: a balanced tree takes an operation a level.
    """
    levels: dict[int, list[tuple[int, int]]] = {}
    written: dict[int, int] = {}  # the first level at which the row's latest sum is there
    unread: dict[int, int] = {}  # the first level at which nobody needs the sum before it any more
    for dst, src in merges:
        level = max(written.get(dst, 0), written.get(src, 0), unread.get(dst, 0))
        levels.setdefault(level, []).append((dst, src))
        written[dst] = level + 1
        unread[src] = max(unread.get(src, 0), level + 1)
    return tuple(operation for level in sorted(levels) for operation in _evenly_spaced(sorted(levels[level])))


def _evenly_spaced(merges: list[tuple[int, int]]) -> Iterator[tuple[slice, slice]]:
    while merges:
        first = merges[0]
        step = merges[1][0] - first[0] if len(merges) > 1 else 1
        length = 1
        while length < len(merges) and merges[length] == (first[0] + length * step, first[1] + length * step):
            length += 1
        yield (
            slice(first[0], first[0] + (length - 1) * step + 1, step),
            slice(first[1], first[1] + (length - 1) * step + 1, step),
        )
        merges = merges[length:]


def balanced(count: int) -> Merges:
    """The merges of the binary tree over `count` rows."""
    steps = [1 << level for level in range(count.bit_length()) if 1 << level < count]
    return tuple((dst, dst + step) for step in steps for dst in range(0, count - step, 2 * step))
