"""What `reduce` measures agrees with float64, and its bits depend on the block alone.

`test_kernels_interpreter.py` runs this file a second time with the Triton code in its interpreter.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from devices import DEVICES, INTERPRETED
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kfuse.kernels import BLOCK, Measures, block_sumsq, num_blocks, reduce, sum_partials

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EXAMPLES = 6 if INTERPRETED else 40
# A few hundred additions in a row, each rounded to fp32.
RTOL = 5e-6
OF_BLOCKS = ("sumsq", "variance", "noise")
OF_ROWS = ("row_sumsq", "row_dot")

pytestmark = pytest.mark.parametrize("device", DEVICES)


def chain(count: int) -> tuple[tuple[int, int], ...]:
    return tuple((0, src) for src in range(1, count))


def contributions(count: int, numel: int, device: str, mean: float = 1.0, spread: float = 1.0) -> tuple[Tensor, Tensor]:
    """Shares that add up to one, and rows[k] = shares[k] * g_k with g_k around `mean`."""
    generator = torch.Generator().manual_seed(count * numel + 1)
    shares = torch.rand(count, generator=generator) + 0.1
    shares /= shares.sum()
    gradients = mean + spread * torch.randn(count, numel, generator=generator)
    return (shares[:, None] * gradients).to(device), shares.to(device)


def nan(*shape: int, device: str) -> Tensor:
    return torch.full(shape, math.nan, device=device)


def everything(rows: Tensor, shares: Tensor) -> Measures:
    count, numel = rows.shape
    blocks, device = num_blocks(numel), str(rows.device)
    exp_avg_sq = torch.rand(numel, generator=torch.Generator().manual_seed(numel)).to(device)
    own = {name: nan(count, blocks, device=device) for name in OF_ROWS}
    return Measures(
        **{name: nan(blocks, device=device) for name in OF_BLOCKS}, **own, shares=shares, exp_avg_sq=exp_avg_sq, eps=0.1
    )


def measured(measures: Measures) -> dict[str, Tensor]:
    return {name: getattr(measures, name) for name in (*OF_BLOCKS, *OF_ROWS) if getattr(measures, name) is not None}


def blocks_of(values: Tensor) -> Tensor:
    """Sum over each BLOCK of the last dimension."""
    return torch.stack([block.sum(-1) for block in values.split(BLOCK, dim=-1)], dim=-1)


def oracle(rows: Tensor, out: Tensor, measures: Measures) -> dict[str, Tensor]:
    """All of it in float64, around the mean that was stored."""
    exact, mean = rows.double(), out.double()
    assert measures.shares is not None and measures.exp_avg_sq is not None
    shares = measures.shares.double()[:, None]
    gradients = torch.where(shares == 0, 0, exact / shares)
    spread = (shares * (gradients - mean).square()).sum(0)
    return {
        "sumsq": blocks_of(mean.square()),
        "variance": blocks_of(spread),
        "noise": blocks_of(spread / (measures.exp_avg_sq.double().sqrt() + measures.eps).square()),
        "row_sumsq": blocks_of(exact.square()),
        "row_dot": blocks_of(exact * mean),
    }


def assert_near(found: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    norm = exact["sumsq"].max().sqrt().item()
    # Rounding is relative to what is added or subtracted: for a dot product, and for a difference from the mean.
    atol = dict.fromkeys(found, 0.0)
    atol["row_dot"] = RTOL * norm * exact["row_sumsq"].max().sqrt().item()
    for name in ("variance", "noise"):
        unit = (
            2**-22 * norm * (exact[name].max() / exact["variance"].max().clamp(min=1e-30)).clamp(1, 100).sqrt().item()
        )
        atol[name] = unit * exact[name].max().sqrt().item() + unit**2
    for name, values in found.items():
        torch.testing.assert_close(
            values.double(), exact[name], rtol=RTOL, atol=atol[name], msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(("count", "dtype"), [(1, torch.float32), (8, torch.bfloat16), (16, torch.float16)])
def test_matches_oracle(device: str, count: int, dtype: torch.dtype) -> None:
    rows, shares = contributions(count, BLOCK + 77, device)
    rows = rows.to(dtype)
    measures = everything(rows, shares)
    out = torch.empty(rows.shape[1], device=device)
    reduce(rows.clone(), chain(count), out, measures=measures)
    assert_near(measured(measures), oracle(rows, out, measures))


@settings(max_examples=EXAMPLES)
@given(
    count=st.integers(1, 8),
    numel=st.integers(1, 3 * BLOCK),
    dtype=st.sampled_from(DTYPES),
    out_dtype=st.sampled_from(DTYPES),
    offset=st.integers(0, 40),
    wanted=st.sets(st.sampled_from((*OF_BLOCKS, *OF_ROWS)), min_size=1),
)
def test_any_shape_place_and_choice(
    device: str,
    count: int,
    numel: int,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    offset: int,
    wanted: set[str],
) -> None:
    whole, shares = contributions(count, numel + offset, device)
    rows = whole.to(dtype)[:, offset:]
    every = everything(rows, shares)
    measures = Measures(
        **{name: getattr(every, name) for name in wanted}, shares=shares, exp_avg_sq=every.exp_avg_sq, eps=every.eps
    )
    out, plain = (torch.empty(numel, dtype=out_dtype, device=device) for _ in range(2))
    reduce(rows.clone(), chain(count), plain)
    reduce(rows.clone(), chain(count), out, measures=measures)
    assert torch.equal(out, plain)
    assert_near(measured(measures), oracle(rows, out, measures))


def test_variance_does_not_cancel(device: str) -> None:
    # The uncentred form would lose all its digits: |gbar|^2 is 10^10 times the variance.
    rows, shares = contributions(4, BLOCK, device, mean=1000.0, spread=0.01)
    measures = everything(rows, shares)
    out = torch.empty(BLOCK, device=device)
    reduce(rows.clone(), chain(4), out, measures=measures)
    exact = oracle(rows, out, measures)["variance"]
    naive = (rows.square() / shares[:, None]).sum() - out.square().sum()
    assert abs(naive.double() / exact.sum() - 1) > 1
    # What is left is the rounding of rows[k] / shares[k] to fp32, half a unit of 1000 in its last place.
    assert measures.variance is not None
    torch.testing.assert_close(measures.variance.double(), exact, rtol=2e-2, atol=0.0)


def test_a_worker_without_samples_adds_nothing(device: str) -> None:
    rows, shares = contributions(2, 500, device)
    more = torch.cat([rows, torch.zeros(1, 500, device=device)])
    found = []
    for some, parts in ((rows, shares), (more, torch.cat([shares, torch.zeros(1, device=device)]))):
        measures = everything(some, parts)
        reduce(some.clone(), chain(len(some)), torch.empty(500, device=device), measures=measures)
        found.append(measures)
    assert torch.equal(found[0].variance, found[1].variance) and torch.equal(found[0].noise, found[1].noise)
    assert found[1].row_sumsq[2].item() == 0.0


@settings(max_examples=EXAMPLES)
@given(numel=st.integers(1, 5 * BLOCK), count=st.integers(1, 4), data=st.data())
def test_shards_have_the_whole_buffers_partials(device: str, numel: int, count: int, data: st.DataObject) -> None:
    rows, shares = contributions(count, numel, device)
    whole, exp_avg_sq = everything(rows, shares), everything(rows, shares).exp_avg_sq
    out = torch.empty(numel, device=device)
    reduce(rows.clone(), chain(count), out, measures=whole)
    first = data.draw(st.integers(0, num_blocks(numel) - 1))
    last = data.draw(st.integers(first + 1, num_blocks(numel)))
    elements = slice(first * BLOCK, min(last * BLOCK, numel))
    part = rows[:, elements]
    shard = everything(part, shares)
    assert exp_avg_sq is not None and shard.exp_avg_sq is not None
    shard.exp_avg_sq.copy_(exp_avg_sq[elements])
    reduce(part.clone(), chain(count), out[elements], measures=shard)
    for name, values in measured(whole).items():
        assert torch.equal(measured(shard)[name], values[..., first:last]), name


def test_norm_has_the_bits_of_block_sumsq_for_any_number_of_rows(device: str) -> None:
    for numel, count in itertools.product((64, BLOCK + 48, 2 * BLOCK + 5), (1, 2, 8, 11)):
        rows, _ = contributions(count, numel, device)
        out, sumsq, expected = torch.empty(numel, device=device), *nan(2, num_blocks(numel), device=device)
        reduce(rows, chain(count), out, measures=Measures(sumsq=sumsq))
        block_sumsq(out, expected)
        assert torch.equal(sumsq, expected)


def test_bits_do_not_depend_on_threads_repetition_or_place(device: str) -> None:
    numel = (33 if not INTERPRETED else 1) * BLOCK + 21
    rows, shares = contributions(3, numel, device)
    results = []
    for count, offset in ((1, 0), (2, 1), (3, 5), (1, 16), (2, 0)):
        torch.set_num_threads(count)
        buffer = torch.zeros(3, numel + offset, device=device)
        buffer[:, offset:] = rows
        measures = everything(rows, shares)
        out = torch.empty(numel, device=device)
        reduce(buffer[:, offset:], chain(3), out, measures=measures)
        results.append({"out": out} | measured(measures))
    for other in results[1:]:
        assert all(torch.equal(value, results[0][name]) for name, value in other.items())


def test_out_in_place_of_the_first_row(device: str) -> None:
    for count in (3, 9):
        rows, shares = contributions(count, 700, device)
        apart, in_place = everything(rows, shares), everything(rows, shares)
        out = torch.empty(700, device=device)
        reduce(rows.clone(), chain(count), out, measures=apart)
        reduce(rows, chain(count), rows[0], measures=in_place)
        assert torch.equal(rows[0], out)
        assert all(torch.equal(value, measured(in_place)[name]) for name, value in measured(apart).items())


def test_non_finite_stays_in_its_block_and_row(device: str) -> None:
    rows, shares = contributions(2, 3 * BLOCK, device)
    rows[0, 3], rows[1, BLOCK] = math.nan, math.inf
    measures = everything(rows, shares)
    out = torch.empty(3 * BLOCK, device=device)
    reduce(rows, chain(2), out, measures=measures)
    for name, values in measured(measures).items():
        assert values[..., 2].isfinite().all() and not values[..., :2].isfinite().all(), name
    assert measures.row_sumsq is not None
    assert measures.row_sumsq.isfinite().tolist() == [[False, True, True], [True, False, True]]


def test_denormals_are_kept(device: str) -> None:
    rows = torch.full((3, 100), 1e-40, device=device)
    rows[1], rows[2] = 0.0, 2.0
    out = torch.empty(100, device=device)
    reduce(rows[:2].clone(), chain(2), out)
    assert torch.equal(out, rows[0]) and (out > 0).all()
    row_dot = nan(3, 1, device=device)
    reduce(rows.clone(), chain(3), out, measures=Measures(row_dot=row_dot))
    assert row_dot[0] > 0
    torch.testing.assert_close(
        row_dot.double(), (rows.double() * out.double()).sum(1, keepdim=True), rtol=1e-3, atol=0.0
    )


def test_sum_partials_adds_each_row_alike(device: str) -> None:
    partials = torch.rand(5, 3000, generator=torch.Generator().manual_seed(0)).to(device)
    together = torch.empty(5, dtype=torch.float64, device=device)
    sum_partials(partials, together)
    for row, value in zip(partials, together, strict=True):
        alone = torch.empty((), dtype=torch.float64, device=device)
        sum_partials(row.contiguous(), alone)
        assert torch.equal(alone, value)


def test_errors_name_what_is_wrong(device: str) -> None:
    rows, shares = contributions(2, 10, device)
    out, one = torch.empty(10, device=device), torch.empty(1, device=device)
    for measures, said in (
        (Measures(sumsq=torch.empty(2, device=device)), r"sumsq must be contiguous float32 \[1\]"),
        (Measures(variance=one), "need shares"),
        (Measures(noise=one, shares=shares), "needs exp_avg_sq"),
        (Measures(variance=one, shares=shares.to("meta")), "shares is on meta"),
    ):
        with pytest.raises(ValueError, match=said):
            reduce(rows, chain(2), out, measures=measures)
    many = torch.zeros(17, 10, device=device)
    with pytest.raises(ValueError, match="at most 16 rows, got 17"):
        reduce(many, chain(17), out, measures=Measures(row_dot=torch.empty(17, 1, device=device)))
