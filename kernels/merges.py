"""Merges: the order in which rows are added up, as (destination, source) pairs: row[destination] += row[source]."""

from __future__ import annotations

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


def balanced(count: int) -> Merges:
    """The merges of the binary tree over `count` rows."""
    steps = [1 << level for level in range(count.bit_length()) if 1 << level < count]
    return tuple((dst, dst + step) for step in steps for dst in range(0, count - step, 2 * step))
