"""Layer and RMS normalisation in PyTorch, with each example's gradient of weight and bias in the backward pass."""

from __future__ import annotations

import torch
from torch import Tensor

LONG = 2**14
"""Elements of an example from which a call of its own pays off."""


def norm_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, centred: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    if centred:
        y, mean, rstd = torch.native_layer_norm(
            x.float(), x.shape[1:], weight.float(), None if bias is None else bias.float(), eps
        )
        return y.to(x.dtype), mean.view(-1), rstd.view(-1)
    values = x.float()
    rstd = values.square().mean(1).add_(eps).rsqrt_()
    y = (values * rstd[:, None]).mul_(weight)
    return (y if bias is None else y.add_(bias)).to(x.dtype), None, rstd


def norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, *, with_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    shape = (*x.shape[:2], 1)
    if mean is not None and x[0:1].numel() >= LONG:
        return _layer_norm_by_example(dy, x, weight, mean.view(shape), rstd.view(shape), with_bias)
    g, normal = dy.float(), x.float()
    if mean is not None:
        normal = normal - mean.view(shape)
    normal = normal * rstd.view(shape)
    weight_sums = (g * normal).sum(1)
    squares = weight_sums.square().sum(1)
    bias_sums = g.sum(1) if with_bias else None
    if bias_sums is not None:
        squares += bias_sums.square().sum(1)
    wg = g * weight
    dx = wg - normal * (wg * normal).mean(2, keepdim=True)
    if mean is not None:
        dx -= wg.mean(2, keepdim=True)
    dx = dx.mul_(rstd.view(shape)).to(x.dtype)
    return dx, weight_sums.sum(0), None if bias_sums is None else bias_sums.sum(0), squares


def _layer_norm_by_example(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, with_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """torch's fused backward, an example at a time: what it sums over is then the example."""
    scale = weight.float()
    parts = [
        torch.ops.aten.native_layer_norm_backward(g.float(), v.float(), [len(scale)], m, r, scale, scale, [True] * 3)
        for g, v, m, r in zip(dy, x, mean, rstd, strict=True)
    ]
    weight_sums, bias_sums = (torch.stack([part[k] for part in parts]) for k in (1, 2))
    squares = weight_sums.square().sum(1)
    if with_bias:
        squares += bias_sums.square().sum(1)
    dx = torch.stack([part[0] for part in parts]).to(x.dtype)
    return dx, weight_sums.sum(0), bias_sums.sum(0) if with_bias else None, squares
