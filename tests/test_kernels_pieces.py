"""On the CPU long buffers are worked on a piece at a time, which changes no bit."""

from __future__ import annotations

import pytest
import torch

from kfuse.kernels import (
    BLOCK,
    CHUNK,
    PackTable,
    block_sumsq,
    num_blocks,
    pack,
    packing,
    pull,
    reduce,
    reduction,
)

NUMELS = [3 * CHUNK + 5, 40, 2 * CHUNK]
OFFSETS = [0, 3 * CHUNK + 64, 3 * CHUNK + 128]


def everything(dtype: torch.dtype) -> list[torch.Tensor]:
    """What the kernels make of one set of inputs, in every way that has intermediate values."""
    torch.manual_seed(0)
    table = PackTable.build(NUMELS, OFFSETS, torch.device("cpu"))
    found = []
    for scale, accumulate, flat_dtype in ((0.3, True, torch.float32), (1.0, False, dtype), (0.3, False, dtype)):
        flat = torch.randn(table.end).to(flat_dtype)
        sumsq = torch.empty(table.num_chunks)
        grads = [torch.randn(numel).to(dtype) for numel in NUMELS]
        pack(grads, flat, table, scale=scale, accumulate=accumulate, sumsq=sumsq)
        found += [flat, sumsq]
    long = torch.randn(5 * BLOCK + 7).to(dtype)
    partials = torch.empty(num_blocks(long.numel()))
    block_sumsq(long, partials)
    rows = (torch.randn(5, 3 * BLOCK + 7) * 2.0 ** torch.randint(-4, 5, (5, 1))).to(dtype)
    out = torch.empty(rows.shape[1], dtype=dtype)
    reduce(rows.clone(), ((0, 1), (2, 3), (0, 2), (0, 4)), out)
    mean, measured = torch.empty(rows.shape[1]), torch.empty(num_blocks(rows.shape[1]))
    reduce(rows, ((0, 1), (2, 3), (0, 2), (0, 4)), mean, sumsq=measured)
    pulled, sumsq = torch.empty_like(mean), torch.empty_like(measured)
    pull([row.float().clone() for row in rows], ((0, 1), (2, 3)), pulled, sumsq)
    return [*found, partials, out, mean, measured, pulled, sumsq]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_change_no_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = everything(dtype)
    assert reduction.PIECE % BLOCK == reduction.PIECE % CHUNK == reduction.REDUCE_PIECE % BLOCK == 0
    of_sums = ((reduction, name) for name in ("PIECE", "REDUCE_PIECE"))
    for module, name in ((packing, "PIECE"), *of_sums):
        monkeypatch.setattr(module, name, CHUNK)
    for a, b in zip(whole, everything(dtype), strict=True):
        assert torch.equal(a, b)
