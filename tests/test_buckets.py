"""Bucket layouts partition the parameters in the order of backward, within the capacity, and aligned."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfuse.comm.buckets import ALIGN, BucketLayout, plan_buckets

PARAMETERS = st.lists(st.tuples(st.integers(0, 700), st.sampled_from(["a", "b"])), max_size=40)
CAPACITIES = st.integers(1, 1500)


def split(parameters: list[tuple[int, Any]]) -> tuple[list[int], list[Any]]:
    return [numel for numel, _ in parameters], [kind for _, kind in parameters]


def extent(layout: BucketLayout, numels: list[int]) -> int:
    """Where the bucket's last parameter ends, without the padding after it."""
    return layout.offsets[-1] + numels[layout.params[-1]]


@given(PARAMETERS, CAPACITIES)
def test_each_parameter_has_an_aligned_place_last_first(parameters: list[tuple[int, str]], capacity: int) -> None:
    numels, kinds = split(parameters)
    layouts = plan_buckets(numels, kinds, capacity)
    assert [index for layout in layouts for index in layout.params] == list(reversed(range(len(parameters))))
    for layout in layouts:
        assert len({kinds[index] for index in layout.params}) == 1, "empty, or of several kinds"
        assert len(layout.offsets) == len(layout.params)
        assert layout.offsets[0] == 0
        assert all(offset % ALIGN == 0 for offset in layout.offsets)
        ends = [offset + numels[index] for offset, index in zip(layout.offsets, layout.params, strict=True)]
        assert all(end <= start for end, start in zip(ends, layout.offsets[1:], strict=False))
        assert ends[-1] <= layout.numel < ends[-1] + ALIGN and layout.numel % ALIGN == 0


@given(PARAMETERS, CAPACITIES)
def test_capacity_is_kept_and_used(parameters: list[tuple[int, str]], capacity: int) -> None:
    """A bucket over the capacity holds one parameter; two neighbours that would fit into one bucket do not exist."""
    numels, kinds = split(parameters)
    layouts = plan_buckets(numels, kinds, capacity)
    for layout in layouts:
        assert extent(layout, numels) <= capacity or len(layout.params) == 1
    for layout, after in pairwise(layouts):
        first = after.params[0]
        if kinds[first] == kinds[layout.params[0]]:
            assert layout.numel + numels[first] > capacity


@pytest.mark.parametrize(
    ("numels", "capacity", "expected"),
    [
        ([], 100, []),
        ([5, 64, 65], 1000, [BucketLayout((2, 1, 0), (0, 128, 192), 256)]),
        (
            [10, 300, 10],
            128,
            [BucketLayout((2,), (0,), 64), BucketLayout((1,), (0,), 320), BucketLayout((0,), (0,), 64)],
        ),
        ([64, 64, 64], 128, [BucketLayout((2, 1), (0, 64), 128), BucketLayout((0,), (0,), 64)]),
    ],
    ids=["nothing", "padding", "one too large", "full to the brim"],
)
def test_layouts_by_hand(numels: list[int], capacity: int, expected: list[BucketLayout]) -> None:
    assert plan_buckets(numels, [0] * len(numels), capacity) == expected
