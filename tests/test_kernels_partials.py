"""`block_sumsq` and `sum_partials` agree with float64, and their order of additions never changes.

`test_kernels_interpreter.py` runs this file a second time with the Triton code in its interpreter.
"""

from __future__ import annotations

import math

import pytest
import torch
from devices import DEVICES, INTERPRETED
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kfuse.kernels import BLOCK, block_sumsq, num_blocks, sum_partials

EXAMPLES = 8 if INTERPRETED else 50

# A few hundred additions in a row, each rounded to fp32.
RTOL = 5e-6

pytestmark = pytest.mark.parametrize("device", DEVICES)


def squares(flat: Tensor) -> Tensor:
    out = torch.full((num_blocks(flat.numel()),), math.nan, device=flat.device)
    block_sumsq(flat, out)
    return out


def total(partials: Tensor) -> Tensor:
    out = torch.full((), math.nan, dtype=torch.float64, device=partials.device)
    sum_partials(partials, out)
    return out


def test_block_sumsq_matches_oracle(device: str) -> None:
    for numel in (0, 1, 15, 16, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 77):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            flat = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(device, dtype)
            expected = [block.square().sum() for block in flat.double().split(BLOCK) if numel]
            torch.testing.assert_close(
                squares(flat).double(), flat.new_tensor(expected, dtype=torch.float64), rtol=RTOL, atol=0.0
            )


@settings(max_examples=EXAMPLES)
@given(numel=st.integers(1, 5 * BLOCK), data=st.data())
def test_shards_have_the_whole_buffers_partials(device: str, numel: int, data: st.DataObject) -> None:
    flat = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(device)
    whole = squares(flat)
    first = data.draw(st.integers(0, num_blocks(numel) - 1))
    last = data.draw(st.integers(first + 1, num_blocks(numel)))
    assert torch.equal(squares(flat[first * BLOCK : last * BLOCK]), whole[first:last])


def test_non_finite_stays_in_its_block(device: str) -> None:
    flat = torch.ones(3 * BLOCK, device=device)
    flat[BLOCK] = math.inf
    flat[-1] = math.nan
    out = squares(flat)
    assert out[0] == BLOCK and out[1] == math.inf and out[2].isnan()
    assert total(out).isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sum_partials_matches_exact_sum(device: str, dtype: torch.dtype) -> None:
    for numel in (0, 1, 1023, 1025, 40_000):
        generator = torch.Generator().manual_seed(numel)
        partials = (torch.rand(numel, generator=generator, dtype=dtype) * 1e6).to(device)
        assert total(partials).item() == pytest.approx(math.fsum(partials.tolist()), rel=1e-12)


def test_sum_partials_adds_each_row_alike(device: str) -> None:
    partials = torch.rand(5, 3000, generator=torch.Generator().manual_seed(0)).to(device)
    together = torch.empty(5, dtype=torch.float64, device=device)
    sum_partials(partials, together)
    assert all(torch.equal(total(row.contiguous()), value) for row, value in zip(partials, together, strict=True))


def test_bits_do_not_depend_on_threads(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(300 * BLOCK + 5 if not INTERPRETED else 3 * BLOCK, generator=generator).to(device)
    # Magnitudes far apart: another order would give other bits in fp64, too.
    many = torch.randn(100_000, generator=generator, dtype=torch.float64)
    many *= 10.0 ** torch.randint(-8, 9, many.shape, generator=generator)
    many = many.to(device)
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        out = squares(flat)
        results.append((out, total(out), total(many)))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_errors_name_what_is_wrong(device: str) -> None:
    flat = torch.zeros(BLOCK + 1, device=device)
    with pytest.raises(ValueError, match=r"out must be float32 \[2\]"):
        block_sumsq(flat, torch.zeros(1, device=device))
    with pytest.raises(ValueError, match=r"got \[4097\] and torch\.float32 \[\]"):
        sum_partials(flat, torch.zeros((), device=device))
