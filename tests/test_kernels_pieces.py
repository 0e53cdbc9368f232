"""On the CPU long buffers are worked on a piece at a time, which changes no bit."""

from __future__ import annotations

import pytest
import torch

from kfuse.kernels import BLOCK, CHUNK, PackTable, block_sumsq, num_blocks, pack, reduce, reduction

NUMELS = [3 * CHUNK + 5, 40, 2 * CHUNK]
MERGES = ((0, 1), (2, 3), (0, 2), (0, 4))


def everything(dtype: torch.dtype) -> list[torch.Tensor]:
    """What the kernels make of one set of inputs, in every way that has intermediate values."""
    torch.manual_seed(0)
    table = PackTable.build(NUMELS, [0, 3 * CHUNK + 64, 3 * CHUNK + 128], torch.device("cpu"))
    found = []
    for scale, accumulate, flat_dtype in ((0.3, True, torch.float32), (1.0, False, dtype), (0.3, False, dtype)):
        flat, sumsq = torch.randn(table.end).to(flat_dtype), torch.empty(table.num_chunks)
        grads = [torch.randn(numel).to(dtype) for numel in NUMELS]
        pack(grads, flat, table, scale=scale, accumulate=accumulate, sumsq=sumsq)
        found += [flat, sumsq]
    rows = (torch.randn(5, 3 * BLOCK + 7) * 2.0 ** torch.randint(-4, 5, (5, 1))).to(dtype)
    numel, norms = rows.shape[1], num_blocks(rows.shape[1])
    block_sumsq(rows[0].clone(), partials := torch.empty(norms))
    reduce(rows.clone(), MERGES, out := torch.empty(numel, dtype=dtype))
    reduce(rows, MERGES, mean := torch.empty(numel), sumsq=(measured := torch.empty(norms)))
    reduce([row.float().clone() for row in rows], MERGES, pulled := torch.empty(numel), sumsq := torch.empty(norms))
    return [*found, partials, out, mean, measured, pulled, sumsq]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_change_no_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = everything(dtype)
    assert reduction.PIECE % BLOCK == reduction.PIECE % CHUNK == reduction.REDUCE_PIECE % BLOCK == 0
    for name in ("PIECE", "REDUCE_PIECE"):
        monkeypatch.setattr(reduction, name, CHUNK)
    for a, b in zip(whole, everything(dtype), strict=True):
        assert torch.equal(a, b)
