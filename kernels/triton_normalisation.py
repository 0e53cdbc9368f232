# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton layer and RMS normalisation, whose backward also yields each example's gradient of weight and bias.

No atomics: a program sums some of one example's tokens, and a second kernel adds those partial sums in their order. How
tokens are shared out depends on the shape alone, so the same input gives the same bits.
"""

from collections.abc import Generator

import torch
import triton
import triton.language as tl

from kfuse.kernels import normalisation
from kfuse.kernels.dispatch import Launch
from kfuse.kernels.normalisation import Backward, Forward, NormBackwardArguments, NormForwardArguments

ROWS = 64  # tokens a program of the backward pass sums up
MAX_WIDTH = 16384  # a program holds whole rows in registers; longer rows are left to PyTorch
COLUMNS = 128
PARTS = 16  # partial sums that `norm_finish_kernel` adds at a time, of COLUMNS columns


@triton.jit
def norm_forward_kernel(x, weight, bias, y, mean, rstd, width, eps, CENTRED: tl.constexpr, BLOCK: tl.constexpr):
    """Normalise one row; store its mean and its reciprocal deviation for the backward pass."""
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
    dy, x, weight, mean, rstd, dx, weight_parts, bias_parts,
    tokens, width,
    ROWS: tl.constexpr, CENTRED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The input's gradient for up to ROWS tokens of one example, and their sums for weight and bias."""
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


def norm_forward(given: NormForwardArguments) -> Generator[Launch, None, Forward]:
    x, (rows, width) = given.x, given.x.shape
    if width > MAX_WIDTH:
        return normalisation.norm_forward_by_torch(given)
    y = torch.empty_like(x)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    mean = torch.empty_like(rstd) if given.centred else None
    block = triton.next_power_of_2(width)
    values = vars(given) | {"y": y, "mean": mean, "rstd": rstd, "width": width, "eps": float(given.eps)}
    yield Launch(norm_forward_kernel, (rows,), values, {"CENTRED": given.centred, "BLOCK": block}, _threads(block))
    return y, mean, rstd


def norm_backward(given: NormBackwardArguments) -> Generator[Launch, None, Backward]:
    """As `kfuse.kernels.norm_backward`: partial sums over tokens, then their sums and sums of squares."""
    x, (examples, tokens, width) = given.x, given.x.shape
    if width > MAX_WIDTH:
        return normalisation.norm_backward_by_torch(given)
    count, columns, kinds = triton.cdiv(tokens, ROWS), triton.cdiv(width, COLUMNS), 1 + given.with_bias
    dx = torch.empty_like(x)
    parts = torch.empty(kinds, examples, count, width, dtype=torch.float32, device=x.device)
    new = parts.new_empty if x.numel() else parts.new_zeros  # without tokens nothing is launched
    sums, squares = new((kinds, examples, width)), new((kinds, examples, columns))
    if x.numel():
        block = triton.next_power_of_2(width)
        values = vars(given) | {"dx": dx, "weight_parts": parts[0], "tokens": tokens, "width": width}
        values["bias_parts"] = parts[1] if given.with_bias else None
        constants = {"ROWS": ROWS, "CENTRED": given.mean is not None, "BLOCK": block}
        yield Launch(norm_backward_kernel, (examples, count), values, constants, _threads(block))
        values = {"parts": parts, "sums": sums, "squares": squares, "count": count, "width": width}
        constants = {"PARTS": PARTS, "COLUMNS": COLUMNS}
        yield Launch(norm_finish_kernel, (kinds * examples, columns), values, constants, threads=128)
    totals = sums.sum(1)
    return dx, totals[0], totals[1] if given.with_bias else None, squares.sum((0, 2))


def _threads(block: int) -> int:
    """A thread holds at most 16 elements of a row."""
    return min(1024, max(128, block // 16))
