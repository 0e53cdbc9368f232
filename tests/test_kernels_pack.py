"""`pack` agrees with float64 and keeps its rules on bits, in the implementation that this process dispatches to.

`test_kernels_interpreter.py` runs this file a second time with the Triton code in its interpreter.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from devices import DEVICES, INTERPRETED
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kfuse.kernels import CHUNK, PackTable, pack
from kfuse.kernels.table import KEPT_TABLES

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EXAMPLES = 10 if INTERPRETED else 60
SENTINEL = -77.0
# A few hundred additions in a row, each rounded to fp32.
RTOL = 5e-6

pytestmark = pytest.mark.parametrize("device", DEVICES)


def build(numels: list[int], device: str, gap: int = 0) -> PackTable:
    """Segments at multiples of 16 elements, `gap` more elements apart."""
    offsets, end = [], gap
    for numel in numels:
        offsets.append(end)
        end += math.ceil(numel / 16) * 16 + gap
    return PackTable.build(numels, offsets, torch.device(device))


def gradients(numels: list[int], dtype: torch.dtype, device: str, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator).to(device, dtype) for numel in numels]


def run(
    grads: list[Tensor | None],
    flat: Tensor,
    table: PackTable,
    scale: float = 1.0,
    accumulate: bool = False,
    stored: Tensor | None = None,
) -> Tensor:
    """Pack the gradients, which are left as they are; return the sums of squares."""
    sumsq = torch.full((table.num_chunks,), math.nan, device=flat.device)
    copies = [None if grad is None else grad.clone() for grad in grads]
    pack(grads, flat, table, scale=scale, accumulate=accumulate, sumsq=sumsq, stored=stored)
    torch.testing.assert_close(grads, copies, rtol=0.0, atol=0.0, equal_nan=True)
    return sumsq


def assert_rounded(actual: Tensor, exact: Tensor) -> None:
    """`actual` is the fp64 value `exact` rounded once; the interpreter truncates bf16 instead of rounding."""
    rtol = 2**-7 if INTERPRETED and actual.dtype == torch.bfloat16 else 0.0
    torch.testing.assert_close(actual, exact.float().to(actual.dtype), rtol=rtol, atol=0.0, equal_nan=True)


def chunk_sums(grads: list[Tensor | None], numels: list[int]) -> Tensor:
    sums = []
    for grad, numel in zip(grads, numels, strict=True):
        values = torch.zeros(numel, dtype=torch.float64) if grad is None else grad.double().cpu().reshape(-1)
        sums += [chunk.square().sum() for chunk in values.split(CHUNK) if chunk.numel()]
    return torch.stack(sums)


@pytest.mark.parametrize("flat_dtype", DTYPES)
def test_matches_oracle(device: str, flat_dtype: torch.dtype) -> None:
    numels = [1, 0, CHUNK, 37, 2 * CHUNK + 5, 16]
    table = build(numels, device, gap=16)
    for grad_dtype, scale in itertools.product(DTYPES, (1.0, 0.3)):
        grads = gradients(numels, grad_dtype, device)
        flat = torch.full((table.end + 9,), SENTINEL, dtype=flat_dtype, device=device)
        sumsq = run(grads, flat, table, scale)

        factor = torch.tensor(scale).double()  # the kernel's fp32 argument
        touched = torch.zeros(flat.numel(), dtype=torch.bool, device=device)
        for grad, offset in zip(grads, table.offsets, strict=True):
            segment = slice(offset, offset + grad.numel())
            touched[segment] = True
            assert_rounded(flat[segment], grad.double() * factor.item())
        assert (flat[~touched] == SENTINEL).all()
        torch.testing.assert_close(sumsq.double().cpu(), chunk_sums(grads, numels), rtol=RTOL, atol=0.0)


@settings(max_examples=EXAMPLES)
@given(
    numels=st.lists(st.integers(0, 3 * CHUNK), min_size=1, max_size=4),
    gaps=st.lists(st.integers(0, 20), min_size=4, max_size=4),
    absent=st.sets(st.integers(0, 3)),
    accumulate=st.booleans(),
)
@example(numels=[0, 0], gaps=[0, 0, 0, 0], absent=set(), accumulate=False)
@example(numels=[5, 0], gaps=[0, 1, 0, 0], absent=set(), accumulate=True)
def test_any_layout(device: str, numels: list[int], gaps: list[int], absent: set[int], accumulate: bool) -> None:
    offsets, end = [], 0
    for numel, gap in zip(numels, gaps, strict=False):
        offsets.append(end + gap)
        end += gap + numel
    table = PackTable.build(numels, offsets, torch.device(device))
    assert table.num_chunks == sum(math.ceil(numel / CHUNK) for numel in numels)
    grads: list[Tensor | None] = list(gradients(numels, torch.float32, device))
    for index in absent & set(range(len(grads))):
        grads[index] = None
    before = torch.full((end + 3,), SENTINEL, device=device)
    flat = before.clone()
    stored = torch.full((table.num_chunks,), math.nan, device=device)
    sumsq = run(grads, flat, table, accumulate=accumulate, stored=stored)

    expected = before.clone()
    for grad, offset, numel in zip(grads, offsets, numels, strict=True):
        value = torch.zeros(numel, device=device) if grad is None else grad
        expected[offset : offset + numel] = before[offset : offset + numel] + value if accumulate else value
    assert torch.equal(flat, expected)
    pack(grads, unmeasured := before.clone(), table, scale=1.0, accumulate=accumulate, sumsq=None)
    assert torch.equal(unmeasured, expected)
    if table.num_chunks:
        for sums, of in ((sumsq, grads), (stored, list(table.split(expected)))):
            torch.testing.assert_close(sums.double().cpu(), chunk_sums(of, numels), rtol=RTOL, atol=0.0)


@pytest.mark.parametrize("flat_dtype", DTYPES)
def test_accumulating_equals_packing_then_adding(device: str, flat_dtype: torch.dtype) -> None:
    if INTERPRETED and flat_dtype == torch.bfloat16:
        pytest.skip("the interpreter truncates to bf16 where PyTorch's addition rounds")
    numels = [5, CHUNK + 3, 64]
    table = build(numels, device)
    for grad_dtype, scale in itertools.product(DTYPES, (1.0, 0.3)):
        first, second = (gradients(numels, grad_dtype, device, seed) for seed in (1, 2))
        accumulated, other = (torch.zeros(table.end, dtype=flat_dtype, device=device) for _ in range(2))
        run(first, accumulated, table, scale)
        added = accumulated.clone()
        sumsq_accumulated = run(second, accumulated, table, scale, accumulate=True)
        sumsq_fresh = run(second, other, table, 1.0)
        run(second, other, table, scale)
        added += other
        assert torch.equal(accumulated, added)
        assert torch.equal(sumsq_accumulated, sumsq_fresh)


def test_product_is_rounded_before_the_addition(device: str) -> None:
    # scale * g = 1 + 2**-11 + 2**-24 exactly; fp32 rounds the last term away, a fused multiply-add would keep it.
    factor = 1.0 + 2.0**-12
    table = build([64], device)
    flat = torch.full((64,), -1.0, device=device)
    run([torch.full((64,), factor, device=device)], flat, table, factor, accumulate=True)
    assert torch.equal(flat, torch.full((64,), 2.0**-11, device=device))


def test_non_finite_stays_in_its_chunk(device: str) -> None:
    numels = [2 * CHUNK, 10]
    table = build(numels, device)
    grads = gradients(numels, torch.float32, device)
    grads[0][CHUNK + 7] = math.inf
    grads[1][9] = math.nan
    flat = torch.empty(table.end, device=device)
    sumsq = run(grads, flat, table)
    assert sumsq[0].isfinite() and sumsq[1] == math.inf and sumsq[2].isnan()
    assert_rounded(flat[: 2 * CHUNK], grads[0].double())
    assert_rounded(flat[2 * CHUNK : 2 * CHUNK + 10], grads[1].double())


def test_denormals_are_kept_and_squares_that_overflow_are_infinite(device: str) -> None:
    table = build([40], device)
    grad, flat = torch.full((40,), 1e-40, device=device), torch.empty(table.end, device=device)
    for scale in (1.0, 0.5):
        sumsq = run([grad], flat, table, scale)
        assert torch.equal(flat[:40].double(), (grad.double() * scale).float().double()) and (flat[:40] > 0).all()
        assert sumsq.item() == 0.0  # the squares are below the smallest of all
    assert run([torch.full((40,), 1e30, device=device)], flat, table).item() == math.inf


def test_any_shape_strides_and_mixed_dtypes(device: str) -> None:
    grads = [
        torch.randn((), device=device),
        torch.randn(40, 30, device=device).t(),
        torch.randn(4, 3, 8, 8, device=device).to(memory_format=torch.channels_last),
        torch.randn(101, device=device)[1:],
        torch.randn(50, device=device).half(),
        torch.randn(50, device=device).bfloat16(),
    ]
    numels = [grad.numel() for grad in grads]
    table = build(numels, device)
    flat = torch.empty(table.end, device=device)
    sumsq = run(list(grads), flat, table)
    for grad, offset in zip(grads, table.offsets, strict=True):
        assert_rounded(flat[offset : offset + grad.numel()], grad.double().reshape(-1))
    torch.testing.assert_close(sumsq.double().cpu(), chunk_sums(list(grads), numels), rtol=RTOL, atol=0.0)


def test_bits_do_not_depend_on_alignment_and_new_addresses_are_read(device: str) -> None:
    numels = [2 * CHUNK - 96]
    table = build(numels, device)
    (grad,) = gradients(numels, torch.float32, device)
    flat = torch.empty(table.end, device=device)
    expected = run([grad], flat, table)
    storage = torch.empty(numels[0] + 32, device=device)
    for shift in range(32):
        shifted = storage[shift : shift + numels[0]].copy_(grad * (shift + 1))
        found = run([shifted], flat, table)
        assert torch.equal(flat[: numels[0]], shifted)
        assert shift & (shift + 1) or torch.equal(found, expected * (shift + 1) ** 2), "exact for powers of two"


def test_the_newest_tables_of_addresses_are_kept_each_for_its_stream(device: str) -> None:
    table = PackTable.build([4], [0], torch.device(device))
    made = [table.pointers((address,), 0) for address in range(KEPT_TABLES)]
    assert [int(each) for each in made] == [*range(KEPT_TABLES)]
    assert table.pointers((1,), 0) is made[1]
    assert table.pointers((1,), 7) is not made[1]  # in place of the oldest
    assert table.pointers((1,), 0) is made[1] and table.pointers((0,), 0) is not made[0]


def test_errors_name_what_is_wrong(device: str) -> None:
    where, good, sumsq = torch.device(device), torch.zeros(4, device=device), torch.zeros(1, device=device)
    with pytest.raises(ValueError, match="segment 1"):
        PackTable.build([4, 4], [0, 3], where)
    table = PackTable.build([4], [0], where)
    for grads, flat, out, said in (
        ([good, good], good, sumsq, "1 tensors, got 2"),
        ([good[:3]], good, sumsq, "gradient 0 has 3 elements"),
        ([good.to("meta")], good, sumsq, "gradient 0 .* on meta"),
        ([good], good[:3], sumsq, "flat has 3 elements, the table needs 4"),
        ([good], good, torch.zeros(2, device=device), "sumsq must be contiguous float32"),
    ):
        with pytest.raises(ValueError, match=said):
            pack(grads, flat, table, scale=1.0, accumulate=False, sumsq=out)
