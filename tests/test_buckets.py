"""Bucket layouts partition the parameters in the order of backward, within the capacity, and aligned."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Parameter

from kfuse.comm import devices
from kfuse.comm.buckets import ALIGN, plan_buckets
from kfuse.comm.engine import Engine
from kfuse.comm.group import Group
from kfuse.comm.settings import CommOptions

PARAMETERS = st.lists(st.tuples(st.integers(0, 700), st.sampled_from(["a", "b"])), max_size=40)


@given(PARAMETERS, st.integers(1, 1500))
def test_each_parameter_has_an_aligned_place_last_first(parameters: list[tuple[int, str]], capacity: int) -> None:
    """A bucket over the capacity holds one parameter; two neighbours that would fit into one bucket do not exist."""
    numels, kinds = [numel for numel, _ in parameters], [kind for _, kind in parameters]
    layouts = plan_buckets(numels, kinds, capacity)
    assert [index for layout in layouts for index in layout.params] == list(reversed(range(len(parameters))))
    for layout in layouts:
        assert len({kinds[index] for index in layout.params}) == 1, "empty, or of several kinds"
        assert layout.offsets[0] == 0 and all(offset % ALIGN == 0 for offset in layout.offsets)
        ends = [offset + numels[index] for offset, index in zip(layout.offsets, layout.params, strict=True)]
        assert all(0 <= start - end < ALIGN for end, start in zip(ends, layout.offsets[1:], strict=False))
        assert ends[-1] <= layout.numel < ends[-1] + ALIGN and layout.numel % ALIGN == 0
        assert ends[-1] <= capacity or len(layout.params) == 1
    for layout, after in pairwise(layouts):
        first = after.params[0]
        if kinds[first] == kinds[layout.params[0]]:
            assert layout.numel + numels[first] > capacity


@pytest.mark.parametrize("options", [CommOptions(dtype="bf16"), CommOptions(state="sharded")], ids=["bf16", "sharded"])
def test_a_bucket_of_the_tail_alone_lies_where_the_parameters_do(
    options: CommOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without buffers it has no tensor of its own to tell the device by."""

    class Asynchronous(devices.Device):
        asynchronous = True

    monkeypatch.setattr(devices, "of", Asynchronous)
    engine = Engine([[Parameter(torch.empty(40, device="meta"))]], Group(), options)
    assert len(engine.buckets) == 2
    assert [bucket.sum.device.type for bucket in engine.buckets] == ["meta", "meta"]
