# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton layer and RMS normalisation, whose backward also yields each example's gradient of weight and bias.

No atomics: a program sums some of one example's tokens, and a second kernel adds those partial sums in their order. How
tokens are shared out depends on the shape alone, so the same input gives the same bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kfuse.kernels import launch

ROWS = 64
"""Tokens a program of the backward pass sums up."""
MAX_WIDTH = 16384
"""A program holds whole rows in registers."""
COLUMNS = 128
PARTS = 16
FINISH_THREADS = 128


@triton.jit
def norm_forward_kernel(x, weight, bias, y, mean, rstd, width, eps, CENTRED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    mask = index < width
    value = tl.load(x + row * width + index, mask=mask, other=0.0).to(tl.float32)
    if CENTRED:
        centre = tl.sum(value, axis=0) / width
        tl.store(mean + row, centre)
        value = tl.where(mask, value - centre, 0.0)
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(value * value, axis=0) / width + eps))
    tl.store(rstd + row, scale)
    out = value * scale * tl.load(weight + index, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        out += tl.load(bias + index, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row * width + index, out.to(y.dtype.element_ty), mask=mask)


@triton.jit
def norm_backward_kernel(
    dy,
    x,
    weight,
    mean,
    rstd,
    dx,
    weight_parts,
    bias_parts,
    tokens,
    width,
    ROWS: tl.constexpr,
    CENTRED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    example, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = tl.arange(0, BLOCK)
    mask = index < width
    w = tl.load(weight + index, mask=mask, other=0.0).to(tl.float32)
    weight_sum = tl.zeros((BLOCK,), tl.float32)
    bias_sum = tl.zeros((BLOCK,), tl.float32)
    token = part * ROWS
    end = tl.minimum(token + ROWS, tokens)
    while token < end:
        row = example * tokens + token
        at = row * width + index
        g = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(rstd + row)
        if CENTRED:
            value = value - tl.load(mean + row)
        normal = tl.where(mask, value * scale, 0.0)
        wg = w * g
        inner = wg - normal * (tl.sum(wg * normal, axis=0) / width)
        if CENTRED:
            inner = inner - tl.sum(wg, axis=0) / width
        tl.store(dx + at, (inner * scale).to(dx.dtype.element_ty), mask=mask)
        weight_sum += g * normal
        bias_sum += g
        token += 1
    place = (example * tl.num_programs(1) + part) * width + index
    tl.store(weight_parts + place, weight_sum, mask=mask)
    if bias_parts is not None:
        tl.store(bias_parts + place, bias_sum, mask=mask)


@triton.jit
def norm_finish_kernel(parts, sums, squares, count, width, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """One example's partial sums [count, width] to its gradient, some columns of it, and their sum of squares."""
    example, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    start = tl.zeros((), tl.int32)
    while start < count:
        part = start + tl.arange(0, PARTS)
        mask = (part < count)[:, None] & (column < width)[None, :]
        tile = tl.load(parts + (example * count + part)[:, None] * width + column[None, :], mask=mask, other=0.0)
        total += tl.sum(tile, axis=0)
        start += PARTS
    tl.store(sums + example * width + column, total, mask=column < width)
    tl.store(squares + example * tl.num_programs(1) + block, tl.sum(total * total, axis=0))


def norm_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, centred: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    rows, width = x.shape
    y = torch.empty_like(x)
    mean = torch.empty(rows, device=x.device) if centred else None
    rstd = torch.empty(rows, device=x.device)
    block = triton.next_power_of_2(width)
    if rows:
        norm_forward_kernel[(rows,)](
            x, weight, bias, y, mean, rstd, width, float(eps), CENTRED=centred, BLOCK=block, **options(block)
        )
    return y, mean, rstd


def norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, *, with_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    examples, tokens, width = x.shape
    count, blocks, kinds = triton.cdiv(tokens, ROWS), triton.cdiv(width, COLUMNS), 1 + with_bias
    dx = torch.empty_like(x)
    parts = torch.empty(kinds, examples, count, width, device=x.device)
    sums = torch.empty(kinds, examples, width, device=x.device)
    squares = torch.empty(kinds, examples, blocks, device=x.device)
    block = triton.next_power_of_2(width)
    if x.numel():
        norm_backward_kernel[(examples, count)](
            dy,
            x,
            weight,
            mean,
            rstd,
            dx,
            parts[0],
            parts[1] if with_bias else None,
            tokens,
            width,
            ROWS=ROWS,
            CENTRED=mean is not None,
            BLOCK=block,
            **options(block),
        )
        norm_finish_kernel[(kinds * examples, blocks)](
            parts, sums, squares, count, width, PARTS=PARTS, COLUMNS=COLUMNS, **launch.options(FINISH_THREADS)
        )
    else:
        sums.zero_(), squares.zero_()
    totals = sums.sum(1)
    return dx, totals[0], totals[1] if with_bias else None, squares.sum((0, 2))


def options(block: int) -> dict[str, int | bool]:
    """A thread holds at most 16 elements of a row."""
    return launch.options(min(1024, max(128, block // 16)))
