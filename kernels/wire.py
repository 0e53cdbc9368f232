"""Quantised gradients: int8 values, and one fp32 scale for each group of 64 of them (block-wise quantisation).

For a group v with the largest magnitude m

    scale = m / 127,  q = round(v / scale),  and the receiver has q * scale

so no element is off by more than about m / 254. That is a quarter to a half of e4m3's error for normal, Laplace and
Student-t values, and a CPU reads e4m3 twenty times as slowly.
A value that is not finite is 127 with the scale FP32_MAX, which reads as infinity. The others of its group are 0 then,
and so the padding behind a parameter, which is in its last group, stays 0.

Each BLOCK of a flat buffer is WIRE bytes of its message: the values, then the scales. So shards, which start at blocks,
are contiguous there too. The last block is whole, and holds zeros behind the end.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kfuse.kernels.table import BLOCK, num_blocks

GROUP = 64  # elements that share a scale: parameters' places in a bucket start at multiples of it
WIRE = BLOCK + 4 * (BLOCK // GROUP)  # bytes of a block
TINY = 2.0**-100  # a group whose largest magnitude is below this is sent as zeros: its scale might be rounded to 0
FP32_MAX = torch.finfo(torch.float32).max

_PIECE = 16 * BLOCK  # elements that are rounded at a time: intermediate values stay in the cache


def wire_numel(numel: int) -> int:
    """Bytes of the message of a flat buffer of so many elements."""
    return num_blocks(numel) * WIRE


def in_wire(part: slice) -> slice:
    """Where the elements of a part, which starts at a block or at the end, lie in the message."""
    return slice(wire_numel(part.start), wire_numel(part.stop))


def _parts(wire: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a message, int8 [blocks * WIRE]: values [blocks, groups, GROUP] and scales [blocks, groups, 1]."""
    rows = wire.view(-1, WIRE)
    return rows[:, :BLOCK].view(-1, BLOCK // GROUP, GROUP), rows[:, BLOCK:].view(torch.float32).unsqueeze(2)


def round_by_torch(values: Tensor, wire: Tensor, added: Tensor | None = None) -> None:
    """Writes the message of `values`, fp32 [n] with n a multiple of GROUP, to `wire`, int8 [wire_numel(n)].

    added: fp32; its sum afterwards is what rounding has added to the sum of the squares.
    """
    if added is not None:
        added.zero_()
    pieces = zip(torch.split(values, _PIECE), torch.split(wire, wire_numel(_PIECE)), strict=True)
    for index, (piece, sent) in enumerate(pieces):
        groups = piece.view(-1, GROUP)
        rounded = wire.new_zeros(num_blocks(piece.numel()) * BLOCK, dtype=torch.float32).view(-1, GROUP)
        scales = rounded.new_zeros(len(rounded), 1)
        mine, scale = rounded[: len(groups)], scales[: len(groups)]
        torch.amax(torch.abs(groups, out=mine), 1, keepdim=True, out=scale)
        scale.nan_to_num_(math.inf, math.inf).masked_fill_(scale < TINY, 0.0)
        inverse = torch.div(127.0, scale).masked_fill_(scale == 0, 0.0)
        torch.mul(groups, inverse, out=mine).round_()
        if scale.isinf().any():
            mine.nan_to_num_(127.0)
        scale.mul_(1 / 127).clamp_(max=FP32_MAX)
        to_values, to_scales = _parts(sent)
        to_values.copy_(rounded.view(to_values.shape))
        to_scales.copy_(scales.view(to_scales.shape))
        if added is not None and added.numel():
            change = mine.mul_(scale) - groups
            added[index] = change.mul_(mine.add_(groups)).sum()


def read_by_torch(wire: Tensor, out: Tensor) -> None:
    """Writes the values that a message holds to `out`, fp32 [n]."""
    values, scales = _parts(wire)
    whole = out if out.numel() == values.numel() else out.new_empty(values.numel())
    whole.view(values.shape).copy_(values).mul_(scales)
    if whole is not out:
        out.copy_(whole[: out.numel()])
