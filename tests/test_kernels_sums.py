"""`reduce` has the bits of a plain fold in NumPy; `block_sumsq` and `sum_partials` agree with float64.

Of several workers the buffers are tensors of one process here: what a kernel sees of peers' memory is their addresses.
`test_kernels_interpreter.py` runs this file a second time with the Triton code in its interpreter.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from devices import DEVICES, INTERPRETED, rounded
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kfuse.kernels import BLOCK, Merges, balanced, block_sumsq, num_blocks, reduce, sum_partials

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EXAMPLES = 8 if INTERPRETED else 60
RTOL = 5e-6
"""A few hundred additions in a row, each rounded to fp32."""

pytestmark = pytest.mark.parametrize("device", DEVICES)


def contributions(count: int, numel: int, dtype: torch.dtype, device: str) -> Tensor:
    """Rows of magnitudes far apart: another order of additions would give other bits."""
    generator = torch.Generator().manual_seed(count * numel)
    exponents = torch.randint(-4, 5, (count, numel), generator=generator)
    return (torch.randn(count, numel, generator=generator) * 2.0**exponents).to(device, dtype)


def fold(rows: Tensor, merges: Merges) -> Tensor:
    """The merge program in fp32, a row at a time."""
    values = [row.float().cpu().numpy() for row in rows]
    for dst, src in merges:
        values[dst] = values[dst] + values[src]
    return torch.from_numpy(values[0].copy()).to(rows.device)


def squares(flat: Tensor) -> Tensor:
    block_sumsq(flat, out := torch.full((num_blocks(flat.numel()),), math.nan, device=flat.device))
    return out


def total(partials: Tensor) -> Tensor:
    out = torch.full((), math.nan, dtype=torch.float64, device=partials.device)
    sum_partials(partials, out)
    return out


def same(ours: Any, theirs: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@st.composite
def programs(draw: Any, most: int) -> tuple[int, Merges]:
    """A number of rows, and merges of them: any, or the canonical tree."""
    count = draw(st.integers(1, most))
    row = st.integers(0, count - 1)
    pairs = st.lists(st.tuples(row, row).filter(lambda merge: merge[0] != merge[1]), max_size=10)
    return count, balanced(count) if count == 1 or draw(st.booleans()) else tuple(draw(pairs))


@pytest.mark.parametrize("order", ["tree", "left to right", "comb"])
def test_any_number_of_rows_in_any_order(device: str, order: str) -> None:
    """Of a comb, added from its end, all rows are unfinished at a time: more than registers are set aside for."""
    for count in (1, 2, 3, 7, 16, 17, 64):
        rows = contributions(count, 333, torch.float32, device)
        merges = {
            "tree": balanced(count),
            "left to right": tuple((0, src) for src in range(1, count)),
            "comb": tuple((k, k + 1) for k in reversed(range(min(count, 20) - 1))),
        }
        expected = {name: fold(rows, each) for name, each in merges.items()}
        reduce(rows.clone(), merges[order], out := torch.empty(333, device=device))
        reduce([row.clone() for row in rows], merges[order], pulled := torch.empty(333, device=device))
        assert same((out, pulled), [expected[order]] * 2)
        assert count < 4 or not torch.equal(expected["tree"], expected["left to right"]), "the order matters"
    assert balanced(6) == ((0, 1), (2, 3), (4, 5), (0, 2), (0, 4))


@settings(max_examples=EXAMPLES)
@given(program=programs(9), numel=st.integers(1, 3 * BLOCK), dtype=st.sampled_from(DTYPES), data=st.data())
def test_any_program_and_the_squares_of_any_shards(
    device: str, program: tuple[int, Merges], numel: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    """A shard that starts at a multiple of BLOCK has its part of the buffer's squares; sums have the same bits."""
    count, merges = program
    rows = contributions(count, numel, dtype, device)
    expected = fold(rows, merges)
    reduce(rows.clone(), merges, plain := torch.empty(numel, device=device))
    assert torch.equal(plain, expected)
    first = data.draw(st.integers(0, num_blocks(numel) - 1)) * BLOCK
    for by_address in (False, True):
        out, sumsq = torch.empty(numel, device=device), torch.full((num_blocks(numel),), math.nan, device=device)
        for part in (slice(0, first), slice(first, numel)):
            norms = sumsq[part.start // BLOCK : num_blocks(part.stop)]
            given = [row[part].clone() for row in rows] if by_address else rows[:, part].clone()
            reduce(given, merges, out[part], norms)
        assert torch.equal(out, plain)
        if dtype == torch.float32 or (device == "cpu" and not INTERPRETED):
            assert torch.equal(sumsq, squares(plain))
        torch.testing.assert_close(sumsq, squares(plain), rtol=RTOL, atol=0.0)


@pytest.mark.parametrize("out_dtype", DTYPES)
def test_16_bit_rows_are_added_in_fp32(device: str, out_dtype: torch.dtype) -> None:
    for rows_dtype, count in itertools.product(DTYPES, (1, 2, 5)):
        rows = contributions(count, 100, rows_dtype, device)
        expected = fold(rows, balanced(count)).to(out_dtype)
        reduce(rows.clone(), balanced(count), out := torch.empty(100, dtype=out_dtype, device=device))
        if INTERPRETED and out_dtype == torch.bfloat16:
            torch.testing.assert_close(out, expected, rtol=2**-7, atol=0.0)  # it truncates instead of rounding
        else:
            assert torch.equal(out, expected)


def test_bits_do_not_depend_on_threads_or_place_and_out_may_be_a_row(device: str) -> None:
    """Of [K, n] the first one, else any. What lies beside the rows stays."""
    numel = (33 if not INTERPRETED else 1) * BLOCK + 21
    rows, results = contributions(3, numel, torch.float32, device), []
    for threads, offset in ((1, 0), (2, 1), (3, 5), (1, 16)):
        torch.set_num_threads(threads)
        buffer = torch.full((3, offset + numel + 1), 7.0, device=device)
        buffer[:, offset:-1] = rows
        sumsq = torch.empty(num_blocks(numel), device=device)
        reduce(buffer[:, offset:-1], balanced(3), buffer[0, offset:-1], sumsq=sumsq)
        results.append((buffer[0, offset:-1], sumsq))
        assert (buffer[:, :offset] == 7.0).all() and (buffer[:, -1] == 7.0).all()
    for own in (0, 2):
        peers = [row.clone() for row in rows]
        reduce(peers, balanced(3), peers[own], sumsq := torch.empty(num_blocks(numel), device=device))
        results.append((peers[own], sumsq))
    assert torch.equal(results[0][0], fold(rows, balanced(3)))
    assert all(same(results[0], other) for other in results[1:])


def test_block_sumsq_matches_oracle_and_rounds(device: str) -> None:
    for numel in (0, 1, 15, 16, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 77):
        for dtype, to in itertools.product(DTYPES, DTYPES[1:]):
            flat = contributions(1, numel, dtype, device)[0]
            expected = [block.square().sum() for block in flat.double().split(BLOCK) if numel]
            exact = flat.new_tensor(expected, dtype=torch.float64)
            torch.testing.assert_close(squares(flat).double(), exact, rtol=RTOL, atol=0.0)
            block_sumsq(flat, out := torch.empty_like(squares(flat)), visible := torch.empty_like(flat, dtype=to))
            assert same((out, visible), (squares(flat), rounded(flat.float(), to)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sum_partials_matches_exact_sum(device: str, dtype: torch.dtype) -> None:
    for numel in (0, 1, 1023, 1025, 40_000):
        partials = (torch.rand(numel, generator=torch.Generator().manual_seed(numel), dtype=dtype) * 1e6).to(device)
        assert total(partials).item() == pytest.approx(math.fsum(partials.tolist()), rel=1e-12)


def test_what_is_not_finite_stays_in_its_element_and_its_block(device: str) -> None:
    rows = torch.ones(2, 3 * BLOCK, device=device)
    rows[1, BLOCK], rows[1, -1] = math.inf, math.nan
    out, sumsq = torch.empty(3 * BLOCK, device=device), torch.empty(3, device=device)
    reduce(rows.clone(), ((0, 1),), out, sumsq=sumsq)
    assert sumsq[0] == 4 * BLOCK and sumsq[1] == math.inf and sumsq[2].isnan() and total(sumsq).isnan()
    assert torch.equal((~out.isfinite()).nonzero().flatten().cpu(), torch.tensor([BLOCK, 3 * BLOCK - 1]))
    reduce(list(rows.clone()), ((0, 1),), out, sumsq)
    assert same((sumsq[:2],), (squares(out)[:2],))


def test_sums_do_not_depend_on_threads(device: str) -> None:
    flat = contributions(1, (300 if not INTERPRETED else 3) * BLOCK + 5, torch.float32, device)[0]
    many = contributions(1, 100_000, torch.float64, device)[0]
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        out = squares(flat)
        results.append((out, total(out), total(many)))
    assert all(same(results[0], other) for other in results[1:])


def test_errors_name_what_is_wrong(device: str) -> None:
    row, sumsq, two = torch.zeros(4, device=device), torch.zeros(1, device=device), torch.zeros(2, 4, device=device)
    calls: list[tuple[Any, tuple[Any, ...], str]] = [
        (reduce, (two, (), row[:3]), r"like out \[3\] on .*, got"),
        (reduce, ([], (), row), r"K >= 1"),
        (reduce, ([row, row.half()], (), row), "of one dtype"),
        (reduce, ([row, row.to("meta")], (), row), r"got .* on meta"),
        (block_sumsq, (row, torch.zeros(2, device=device)), r"out must be contiguous float32 \[1\]"),
        (sum_partials, (row, sumsq[0]), r"out must be contiguous float64 \[\], got torch\.float32 \[\]"),
        *((reduce, (two, (merge,), row), "two different rows of 2") for merge in ((0, 2), (-1, 0), (1, 1))),
    ]
    for kernel, arguments, said in calls:
        with pytest.raises(ValueError, match=said):
            kernel(*arguments)
