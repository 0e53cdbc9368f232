"""`reduce` has the bits of a plain fold in NumPy.

`test_kernels_interpreter.py` runs this file a second time with the Triton code in its interpreter.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from devices import DEVICES, INTERPRETED
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kfuse.kernels import BLOCK, balanced, block_sumsq, num_blocks, reduce

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EXAMPLES = 15 if INTERPRETED else 80
Merges = tuple[tuple[int, int], ...]

pytestmark = pytest.mark.parametrize("device", DEVICES)


def fold(rows: Tensor, merges: Merges) -> Tensor:
    """The merge program in fp32, a row at a time."""
    values = [row.float().cpu().numpy() for row in rows]
    for dst, src in merges:
        values[dst] = values[dst] + values[src]
    return torch.from_numpy(values[0].copy())


def tree(count: int) -> Merges:
    """The canonical binary tree over `count` rows."""
    merges, step = [], 1
    while step < count:
        merges += [(dst, dst + step) for dst in range(0, count - step, 2 * step)]
        step *= 2
    return tuple(merges)


def test_the_balanced_tree_is_the_canonical_one(device: str) -> None:
    for count in range(1, 20):
        assert balanced(count) == tree(count)


def contributions(count: int, numel: int, dtype: torch.dtype, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(count * numel)
    # Magnitudes far apart: another order would give other bits.
    exponents = torch.randint(-4, 5, (count, numel), generator=generator)
    return (torch.randn(count, numel, generator=generator) * 2.0**exponents).to(device, dtype)


@pytest.mark.parametrize("order", ["tree", "left to right"])
def test_equals_plain_fold(device: str, order: str) -> None:
    for count in (1, 2, 3, 7, 16, 17, 64):
        chain = tuple((0, src) for src in range(1, count))
        merges, other = (tree(count), chain) if order == "tree" else (chain, tree(count))
        rows = contributions(count, 333, torch.float32, device)
        expected = fold(rows, merges)
        out = torch.empty(333, device=device)
        reduce(rows.clone(), merges, out)
        assert torch.equal(out.cpu(), expected)
        assert count < 4 or not torch.equal(out.cpu(), fold(rows, other)), "the order matters to this data"


@settings(max_examples=EXAMPLES)
@given(count=st.integers(2, 9), numel=st.integers(1, 5000), data=st.data())
def test_any_program_over_any_length(device: str, count: int, numel: int, data: st.DataObject) -> None:
    row = st.integers(0, count - 1)
    pair = st.tuples(row, row).filter(lambda merge: merge[0] != merge[1])
    merges = tuple(data.draw(st.lists(pair, max_size=10)))
    rows = contributions(count, numel, torch.float32, device)
    expected = fold(rows, merges)
    out = torch.empty(numel, device=device)
    reduce(rows.clone(), merges, out)
    assert torch.equal(out.cpu(), expected)


@pytest.mark.parametrize("out_dtype", DTYPES)
def test_16_bit_rows_are_added_in_fp32(device: str, out_dtype: torch.dtype) -> None:
    for rows_dtype, count in itertools.product(DTYPES, (1, 2, 5)):
        rows = contributions(count, 100, rows_dtype, device)
        expected = fold(rows, tree(count)).to(out_dtype)
        out = torch.empty(100, dtype=out_dtype, device=device)
        reduce(rows.clone(), tree(count), out)
        if INTERPRETED and out_dtype == torch.bfloat16:
            torch.testing.assert_close(out.cpu(), expected, rtol=2**-7, atol=0.0)  # it truncates instead of rounding
        else:
            assert torch.equal(out.cpu(), expected)


@settings(max_examples=EXAMPLES)
@given(count=st.integers(1, 20), numel=st.integers(1, 3 * BLOCK), dtype=st.sampled_from(DTYPES), data=st.data())
def test_squares_are_those_of_block_sumsq_in_whatever_shards(
    device: str, count: int, numel: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    """A shard that starts at a multiple of BLOCK has its part of the whole buffer's; the sum has the same bits."""
    rows = contributions(count, numel, dtype, device)
    plain, out = torch.empty(2, numel, device=device)
    sumsq, expected = torch.full((2, num_blocks(numel)), torch.nan, device=device)
    reduce(rows.clone(), tree(count), plain)
    first = data.draw(st.integers(0, num_blocks(numel) - 1)) * BLOCK
    for part in (slice(0, first), slice(first, numel)):
        blocks = slice(part.start // BLOCK, num_blocks(part.stop))
        reduce(rows[:, part].clone(), tree(count), out[part], sumsq=sumsq[blocks])
    block_sumsq(plain, expected)
    assert torch.equal(out, plain)
    if dtype == torch.float32 or (device == "cpu" and not INTERPRETED):
        assert torch.equal(sumsq, expected)
    torch.testing.assert_close(sumsq, expected, rtol=5e-6, atol=0.0)


def test_bits_do_not_depend_on_threads_or_place_and_out_may_be_the_first_row(device: str) -> None:
    numel = (33 if not INTERPRETED else 1) * BLOCK + 21
    rows, results = contributions(3, numel, torch.float32, device), []
    for threads, offset in ((1, 0), (2, 1), (3, 5), (1, 16)):
        torch.set_num_threads(threads)
        buffer = torch.zeros(3, numel + offset, device=device)
        buffer[:, offset:] = rows
        sumsq = torch.empty(num_blocks(numel), device=device)
        reduce(buffer[:, offset:], tree(3), buffer[0, offset:], sumsq=sumsq)
        results.append((buffer[0, offset:], sumsq))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_rows_of_a_larger_buffer_and_out_in_place(device: str) -> None:
    buffer = contributions(3, 500, torch.float32, device)
    before = buffer.clone()
    rows = buffer[:, 100:300]
    expected = fold(rows, tree(3))
    reduce(rows, tree(3), rows[0])
    assert torch.equal(buffer[0, 100:300].cpu(), expected)
    assert torch.equal(buffer[:, :100], before[:, :100]) and torch.equal(buffer[:, 300:], before[:, 300:])


def test_non_finite_passes_through(device: str) -> None:
    rows = torch.tensor([[1.0, torch.inf, torch.inf, torch.nan], [1.0, 1.0, -torch.inf, 1.0]], device=device)
    out = torch.empty(4, device=device)
    reduce(rows, ((0, 1),), out)
    torch.testing.assert_close(out.cpu(), torch.tensor([2.0, torch.inf, torch.nan, torch.nan]), equal_nan=True)


def test_errors_name_what_is_wrong(device: str) -> None:
    rows, out = torch.zeros(2, 4, device=device), torch.zeros(4, device=device)
    with pytest.raises(ValueError, match=r"got \[2, 4\] and \[3\]"):
        reduce(rows, (), out[:3])
    with pytest.raises(ValueError, match="K >= 1"):
        reduce(rows[:0], (), out)
    with pytest.raises(ValueError, match=r"sumsq must be float32 \[1\]"):
        reduce(rows, (), out, sumsq=torch.zeros(2, device=device))
    for merge in ((0, 2), (-1, 0), (1, 1)):
        with pytest.raises(ValueError, match="two different rows of 2"):
            reduce(rows, (merge,), out)
