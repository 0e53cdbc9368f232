"""Layer normalisation (Ba et al. 2016) and RMS normalisation (Zhang and Sennrich 2019) that measure their gradients.

The backward pass sums gradients of weight and bias example by example, and so has each example's squared gradient norm
at hand (Gray et al. 2024, "Normalization Layer Per-Example Gradients are Sufficient to Predict Gradient Noise Scale in
Transformers"): no further pass over activations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kfuse.kernels import dispatch, reference_norm

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@torch.no_grad()
def norm_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, centred: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Normalises rows: `(x - mean) / sqrt(var + eps) * weight + bias`, in fp32; without the mean unless `centred`.

    Args:
        x: [rows, width], contiguous, fp32, bf16 or fp16.
        weight, bias: [width], of any of those dtypes.

    Returns y like x, the means (fp32 [rows], None unless centred), and the reciprocal deviations (fp32 [rows]).
    Raises ValueError or TypeError when a shape, a dtype or the memory layout does not fit.
    """
    if x.dim() != 2 or not x.is_contiguous() or x.shape[1] == 0:
        raise ValueError(f"norm: x must be [rows, width >= 1] and contiguous, got {list(x.shape)}")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.shape != x.shape[1:]:
            raise ValueError(f"norm: {name} must be [{x.shape[1]}], got {list(tensor.shape)}")
    if x.dtype not in _DTYPES:
        raise TypeError(f"norm: x is {x.dtype}, must be one of {_DTYPES}")
    if use_triton(x):
        from kfuse.kernels import triton_norm

        return triton_norm.norm_forward(x, weight, bias, eps=eps, centred=centred)
    return reference_norm.norm_forward(x, weight, bias, eps=eps, centred=centred)


@torch.no_grad()
def norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, *, with_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """The gradients of `norm_forward`, and each example's part in those of weight and bias.

    The same input gives the same bits. On a GPU the order of all sums depends on the shapes alone; on a CPU it is
    torch's own, and depends on the number of threads as that of other layers does.

    Args:
        dy, x: [examples, tokens, width], contiguous; `mean` and `rstd` are `norm_forward`'s for its rows.

    Returns dx like x; dweight and dbias (fp32 [width]; dbias None unless `with_bias`); and fp32 [examples], the squared
    norm of what each example adds to dweight and dbias together.
    """
    if x.dim() != 3 or dy.shape != x.shape or not (x.is_contiguous() and dy.is_contiguous()):
        raise ValueError(
            f"norm: x and dy must be [examples, tokens, width] and contiguous, got {list(x.shape)}, {list(dy.shape)}"
        )
    if use_triton(x):
        from kfuse.kernels import triton_norm

        return triton_norm.norm_backward(dy, x, weight, mean, rstd, with_bias=with_bias)
    return reference_norm.norm_backward(dy, x, weight, mean, rstd, with_bias=with_bias)


def use_triton(x: Tensor) -> bool:
    """As for all kernels; rows too long for one program's registers are left to PyTorch."""
    if not dispatch.use_triton(x):
        return False
    from kfuse.kernels import triton_norm

    return x.shape[-1] <= triton_norm.MAX_WIDTH
