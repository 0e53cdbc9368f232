"""`pull` adds contributions that lie in the buffers of several workers, with the bits of `reduce` and `block_sumsq`.

Here the workers' buffers are tensors of one process: what a kernel sees of peers' memory is their addresses.
`test_kernels_interpreter.py` runs this file a second time with the Triton code in its interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from devices import DEVICES, INTERPRETED, normal
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kfuse.comm.sum_tree import plan_merges, plan_range
from kfuse.kernels import BLOCK, Merges, balanced, block_sumsq, num_blocks, pull, reduce

EXAMPLES, BLOCKS = (5, 2) if INTERPRETED else (40, 5)

pytestmark = pytest.mark.parametrize("device", DEVICES)


def buffers(count: int, numel: int, device: str) -> list[Tensor]:
    """A bucket's contribution of each worker, in memory of its own. Another order of additions has other bits."""
    exponents = torch.randint(-4, 5, (count, numel), generator=torch.Generator().manual_seed(7)).to(device)
    return [row.clone() for row in (normal((count, numel), seed=9, device=device) * 2.0**exponents).unbind(0)]


def two_passes(rows: Sequence[Tensor], merges: Merges) -> tuple[Tensor, Tensor]:
    """`reduce`, and `block_sumsq` of the sum."""
    out = torch.empty(rows[0].numel(), device=rows[0].device)
    sumsq = torch.empty(num_blocks(out.numel()), device=out.device)
    reduce(torch.stack(list(rows)), merges, out)
    block_sumsq(out, sumsq)
    return out, sumsq


def same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.full
@settings(max_examples=EXAMPLES)
@given(workers=st.integers(1, 6), blocks=st.integers(0, BLOCKS), rest=st.integers(1, BLOCK), data=st.data())
def test_every_worker_pulls_its_shard(device: str, workers: int, blocks: int, rest: int, data: st.DataObject) -> None:
    """Shards end to end are the bucket. They start at blocks, anywhere; some are empty. Contributions stay."""
    numel = blocks * BLOCK + rest
    row = st.integers(0, workers - 1)
    pairs = st.lists(st.tuples(row, row).filter(lambda merge: merge[0] != merge[1]), max_size=9)
    merges: Merges = tuple(data.draw(pairs)) if workers > 1 else ()
    cuts = sorted(data.draw(st.lists(st.integers(0, blocks), min_size=workers - 1, max_size=workers - 1)))
    peers = buffers(workers, numel, device)
    before = [peer.clone() for peer in peers]
    expected, squares = two_passes(peers, merges)
    out, sumsq = torch.full_like(expected, torch.nan), torch.full_like(squares, torch.nan)
    for start, stop in pairwise([0, *(cut * BLOCK for cut in cuts), numel]):
        partials = sumsq[start // BLOCK : start // BLOCK + num_blocks(stop - start)]
        pull([peer[start:stop] for peer in peers], merges, out[start:stop], partials)
    assert same((out, sumsq, *peers), (expected, squares, *before))


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_any_number_of_workers_has_the_bits_of_the_canonical_tree(device: str, workers: int) -> None:
    """Eight micro-batches; a worker's buffers hold the partial sums of its range, several where it needs them."""
    total, numel = 8, BLOCK + 64
    micro_batches = buffers(total, numel, device)
    expected, _ = two_passes(micro_batches, balanced(total))
    bounds = [total * w // workers for w in range(workers + 1)]
    nodes = [node for w in range(workers) for node in plan_range(bounds[w], bounds[w + 1] - bounds[w], total).pieces]
    peers = []
    for level, index in nodes:
        leaves = torch.stack(micro_batches[index << level : (index + 1) << level])
        reduce(leaves, balanced(len(leaves)), out := torch.empty(numel, device=device))
        peers.append(out)
    pull(peers, plan_merges(nodes, total), out := torch.empty(numel, device=device))
    assert torch.equal(out, expected)


@pytest.mark.parametrize("own", [0, 2])
def test_the_sum_may_replace_any_contribution(device: str, own: int) -> None:
    """A worker's sum comes to where its own contribution was."""
    peers = buffers(3, BLOCK + 32, device)
    expected, squares = two_passes(peers, ((1, 2), (0, 1)))
    pull(peers, ((1, 2), (0, 1)), peers[own], sumsq := torch.empty_like(squares))
    assert same((peers[own], sumsq), (expected, squares))


def test_more_rows_and_deeper_trees_than_registers_are_set_aside_for(device: str) -> None:
    """A comb of 20 rows, added from its end: all of them are unfinished at a time."""
    peers, merges = buffers(20, 100, device), tuple((k, k + 1) for k in reversed(range(19)))
    expected, squares = two_passes(peers, merges)
    pull(peers, merges, out := torch.empty(100, device=device), sumsq := torch.empty_like(squares))
    assert same((out, sumsq), (expected, squares))


def test_what_is_not_finite_is_measured(device: str) -> None:
    peers = buffers(2, 64, device)
    peers[1][3] = torch.inf
    pull(peers, ((0, 1),), out := torch.empty(64, device=device), sumsq := torch.zeros(1, device=device))
    assert not out[3].isfinite() and out[:3].isfinite().all() and not sumsq.isfinite().any()


def test_errors_name_what_is_wrong(device: str) -> None:
    row, sumsq = torch.zeros(4, device=device), torch.zeros(1, device=device)
    for rows, merges, partials, said in (
        ([], (), sumsq, "at least one contribution"),
        ([row, row[:3]], (), sumsq, r"contiguous float32 \[4\], got torch.float32 \[3\]"),
        ([row, torch.zeros(8, device=device)[::2]], (), sumsq, r"contiguous float32 \[4\]"),
        ([row, row.half()], (), sumsq, r"contiguous float32 \[4\], got torch.float16"),
        ([row, row.to("meta")], (), sumsq, r"must lie on .* got meta"),
        ([row, torch.zeros(5, device=device)[1:]], (), sumsq, "16-byte aligned"),
        ([row, row], ((0, 2),), sumsq, r"merge \(0, 2\) must name two different rows of 2"),
        ([row, row], (), torch.zeros(2, device=device), r"sumsq must be float32 \[1\], got torch.float32 \[2\]"),
        ([row, row], (), sumsq.double(), r"sumsq must be float32 \[1\], got torch.float64 \[1\]"),
    ):
        with pytest.raises(ValueError, match=said):
            pull(rows, merges, row, partials)
