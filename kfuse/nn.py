"""LayerNorm and RMSNorm whose backward pass also measures each example's gradient (Gray et al. 2024, nanoGNS).

With one micro-batch on one device the engine sees one gradient, and no noise scale follows from one. These layers see
every example's gradient of their own weight and bias, at no extra pass over memory. What follows is the noise scale *of
the normalisation layers*: it moves with the whole model's, but it is another number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from kfuse.kernels.normalisation import norm_backward, norm_forward
from kfuse.statistics.noise_scale import moments


class _Measured:
    """What both layers share. Inputs are [examples, ..., *normalized_shape].

    Without weight, or where no gradient is wanted, the layers are torch's own.

    per_example_sq_norm: fp32 [examples], after a backward: the squared norm of what each example added to the gradients
        of weight and bias together. Under a loss that is the MEAN over B examples, an example's own gradient is B times
        what it added: multiply by B^2.
    sq_norm: 0-dim fp32, after a backward: the squared norm of what all examples added together.
    backwards: how many there were since the last `norm_layers_noise`.
    """

    weight: nn.Parameter
    normalized_shape: tuple[int, ...]
    elementwise_affine: bool
    eps: Any  # a float; None in RMSNorm alone
    per_example_sq_norm: Tensor | None = None
    sq_norm: Tensor | None = None
    backwards = 0

    def forward(self, input: Tensor) -> Tensor:
        """[examples, ..., *normalized_shape] to the same shape. Raises ValueError for an input without examples."""
        if not (torch.is_grad_enabled() and self.elementwise_affine and self.weight.requires_grad):
            return super().forward(input)  # type: ignore[misc, no-any-return]
        shape = self.normalized_shape
        if input.dim() <= len(shape) or input.shape[input.dim() - len(shape) :] != shape:
            raise ValueError(
                f"kf.nn.{type(self).__name__}: the input must be [examples, ..., {', '.join(map(str, shape))}], "
                f"got {list(input.shape)}"
            )
        # In autocast as torch's own normalisation.
        x = input.float() if torch.is_autocast_enabled(input.device.type) else input
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        bias, centred = getattr(self, "bias", None), isinstance(self, nn.LayerNorm)  # RMSNorm has no bias
        return _Normalise.apply(x, self.weight, bias, eps, centred, self)  # type: ignore[no-any-return, no-untyped-call]


class LayerNorm(_Measured, nn.LayerNorm):
    """torch.nn.LayerNorm; after a backward `per_example_sq_norm` is there."""


class RMSNorm(_Measured, nn.RMSNorm):
    """torch.nn.RMSNorm, likewise."""


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool, layer: _Measured
    ) -> Tensor:
        rows = x.contiguous().view(-1, weight.numel())
        y, mean, rstd = norm_forward(
            rows, weight.view(-1), None if bias is None else bias.view(-1), eps=eps, centred=centred
        )
        ctx.save_for_backward(rows, weight, bias, mean, rstd)
        ctx.layer = layer
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, bias, mean, rstd = ctx.saved_tensors
        shape = (len(dy), rows.numel() // (len(dy) * weight.numel()) if len(dy) else 0, weight.numel())
        dx, dweight, dbias, squares = norm_backward(
            dy.contiguous().view(shape), rows.view(shape), weight.view(-1), mean, rstd, with_bias=bias is not None
        )
        layer: _Measured = ctx.layer
        layer.per_example_sq_norm = squares
        layer.sq_norm = dweight.square().sum() + (0.0 if dbias is None else dbias.square().sum())
        layer.backwards += 1
        dweight = dweight.view(weight.shape).to(weight.dtype)
        dbias = None if dbias is None else dbias.view(weight.shape).to(weight.dtype)
        return dx.view(dy.shape), dweight, dbias, None, None, None


@dataclass(frozen=True)
class NormLayersNoise:
    """Unbiased estimates from one micro-batch, of the normalisation layers' parameters alone.

    grad_variance: S, the trace of a single sample's gradient covariance.
    grad_sq: G2, the squared norm of the true gradient. It may come out negative.
    """

    samples: int
    grad_variance: float
    grad_sq: float


def norm_layers_noise(model: nn.Module, *, loss_scale: float = 1.0) -> NormLayersNoise | None:
    """S and G2 of all `kf.nn` layers in `model` together, from their last backward; None for fewer than two samples.

    A step's statistics with every sample a micro-batch of its own, for a loss that is the MEAN over the micro-batch's
    samples. To have a noise scale, average S and G2 over steps apart (`kfuse.statistics.noise_scale.NoiseScale`) and
    divide. Waits for the device.

    loss_scale: what the loss was multiplied with before backward (AMP).
    Raises ValueError when there is no such layer, or one has had no backward or several since the last call: the norms
    of two contributions do not tell the norm of their sum.
    """
    layers = [m for m in model.modules() if isinstance(m, _Measured)]
    wrong = [layer.backwards for layer in layers if layer.backwards != 1]
    for layer in layers:
        layer.backwards = 0
    if not layers or wrong:
        raise ValueError(
            f"norm_layers_noise: needs kf.nn.LayerNorm or kf.nn.RMSNorm ({len(layers)} in the model), and one backward "
            f"of each since the last call; some had {wrong}"
        )
    each = torch.stack([layer.per_example_sq_norm for layer in layers if layer.per_example_sq_norm is not None])
    total = torch.stack([layer.sq_norm for layer in layers if layer.sq_norm is not None])
    samples = each.shape[1]
    sum_squares, squared = torch.stack([each.double().sum(), total.double().sum()]).tolist()
    scale = loss_scale**2
    variance, grad_sq = moments(samples**2 * sum_squares / scale, squared / scale, float(samples), samples)
    if variance is None or grad_sq is None:
        return None
    return NormLayersNoise(samples, variance, grad_sq)
