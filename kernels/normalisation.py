"""Layer normalisation (Ba et al. 2016) and RMS normalisation (Zhang and Sennrich 2019) that measure their gradients.

The backward pass sums gradients of weight and bias example by example, and so has each example's squared gradient norm
at hand (Gray et al. 2024, "Normalization Layer Per-Example Gradients are Sufficient to Predict Gradient Noise Scale in
Transformers"): no further pass over activations. Arguments and PyTorch implementations.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from kfuse.kernels.dispatch import DTYPES, Kernel, require

LONG_EXAMPLE = 2**14  # elements of an example from which a call of torch's backward for it alone pays off

Forward = tuple[Tensor, Tensor | None, Tensor]
Backward = tuple[Tensor, Tensor, Tensor | None, Tensor]


@dataclass(frozen=True)
class NormForwardArguments:
    """Normalises rows: `(x - mean) / sqrt(var + eps) * weight + bias`, in fp32; without the mean unless `centred`.

    Args:
        x: [rows, width], contiguous, fp32, bf16 or fp16.
        weight, bias: [width], of any of those dtypes.

    Returns y like x, the means (fp32 [rows], None unless centred), and the reciprocal deviations (fp32 [rows]).
    Raises ValueError where a shape, a dtype or the memory layout does not fit.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    _: KW_ONLY
    eps: float
    centred: bool

    def __post_init__(self) -> None:
        rows, width = self.x.shape
        require("norm: x", self.x, (rows, width), *DTYPES)
        for name, tensor in (("weight", self.weight), ("bias", self.bias)):
            require(f"norm: {name}", tensor, (width,), *DTYPES)


@dataclass(frozen=True)
class NormBackwardArguments:
    """The gradients of `norm_forward`, and each example's part in those of weight and bias.

    The same input gives the same bits. On a GPU the order of all sums depends on the shapes alone; on a CPU it is
    torch's own, and depends on the number of threads as that of other layers does.

    Args:
        dy, x: [examples, tokens, width], contiguous; `mean` and `rstd` are `norm_forward`'s for its rows.

    Returns dx like x; dweight and dbias (fp32 [width]; dbias None unless `with_bias`); and fp32 [examples], the squared
    norm of what each example adds to dweight and dbias together. Raises ValueError when a shape does not fit.
    """

    dy: Tensor
    x: Tensor
    weight: Tensor
    mean: Tensor | None
    rstd: Tensor
    _: KW_ONLY
    with_bias: bool

    def __post_init__(self) -> None:
        examples, tokens, width = self.x.shape
        for name, tensor in (("x", self.x), ("dy", self.dy)):
            require(f"norm: {name}", tensor, (examples, tokens, width), *DTYPES)


def norm_forward_by_torch(given: NormForwardArguments) -> Forward:
    x, weight, bias, eps = given.x, given.weight, given.bias, given.eps
    if given.centred:
        y, mean, rstd = torch.native_layer_norm(
            x.float(), x.shape[1:], weight.float(), None if bias is None else bias.float(), eps
        )
        return y.to(x.dtype), mean.view(-1), rstd.view(-1)
    values = x.float()
    rstd = values.square().mean(1).add_(eps).rsqrt_()
    y = (values * rstd[:, None]).mul_(weight)
    return (y if bias is None else y.add_(bias)).to(x.dtype), None, rstd


def norm_backward_by_torch(given: NormBackwardArguments) -> Backward:
    dy, x = given.dy, given.x
    shape = (*x.shape[:2], 1)
    mean, rstd = None if given.mean is None else given.mean.view(shape), given.rstd.view(shape)
    if mean is not None and x[0:1].numel() >= LONG_EXAMPLE:
        return _layer_norm_by_example(given, mean, rstd)
    g, normal = dy.float(), x.float()
    if mean is not None:
        normal = normal - mean
    normal = normal * rstd
    weight_sums = (g * normal).sum(1)
    squares = weight_sums.square().sum(1)
    bias_sums = g.sum(1) if given.with_bias else None
    if bias_sums is not None:
        squares += bias_sums.square().sum(1)
    wg = g * given.weight
    dx = wg - normal * (wg * normal).mean(2, keepdim=True)
    if mean is not None:
        dx -= wg.mean(2, keepdim=True)
    dx = dx.mul_(rstd).to(x.dtype)
    return dx, weight_sums.sum(0), None if bias_sums is None else bias_sums.sum(0), squares


def _layer_norm_by_example(given: NormBackwardArguments, mean: Tensor, rstd: Tensor) -> Backward:
    """torch's fused backward, an example at a time: what it sums over is then the example."""
    x, scale = given.x, given.weight.float()
    parts = [
        torch.ops.aten.native_layer_norm_backward(g.float(), v.float(), [len(scale)], m, r, scale, scale, [True] * 3)
        for g, v, m, r in zip(given.dy, x, mean, rstd, strict=True)
    ]
    weight_sums, bias_sums = (torch.stack([part[k] for part in parts]) for k in (1, 2))
    squares = weight_sums.square().sum(1)
    if given.with_bias:
        squares += bias_sums.square().sum(1)
    dx = torch.stack([part[0] for part in parts]).to(x.dtype)
    return dx, weight_sums.sum(0), bias_sums.sum(0) if given.with_bias else None, squares


norm_forward = Kernel("norm_forward", NormForwardArguments, "x", norm_forward_by_torch)
norm_backward = Kernel("norm_backward", NormBackwardArguments, "x", norm_backward_by_torch)
