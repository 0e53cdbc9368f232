"""Exact per-example gradient norms of a linear layer: for checking, and for small layers."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def linear_sq_norms(x: Tensor, dy: Tensor, bias: bool = True) -> Tensor:
    """Squared norm of what each example adds to the gradients of a linear layer's weight, and bias if it has one.

    An example's weight gradient is `sum_t dy_t x_t^T`. Its squared norm is the sum over token pairs of
    `(dy_t . dy_s) (x_t . x_s)`, so the gradient itself need not be formed where tokens are few (Goodfellow 2015 for one
    token an example; Li et al. 2022, "Large Language Models Can Be Strong Differentially Private Learners", for many).

    Args:
        x: [examples, ..., in], the layer's input.
        dy: [examples, ..., out], the loss's gradient with respect to its output.

    Returns fp32 [examples]. Raises ValueError when the leading dimensions differ.
    """
    if x.dim() < 2 or x.shape[:-1] != dy.shape[:-1]:
        raise ValueError(f"linear_sq_norms: x and dy must agree but for the last dimension, got {x.shape}, {dy.shape}")
    inputs = x.float().reshape(len(x), -1, x.shape[-1])
    grads = dy.float().reshape(len(x), -1, dy.shape[-1])
    tokens = inputs.shape[1]
    if tokens * tokens <= inputs.shape[2] * grads.shape[2]:
        squares = (torch.bmm(inputs, inputs.mT) * torch.bmm(grads, grads.mT)).sum((1, 2))
    else:
        squares = torch.bmm(grads.mT, inputs).square().sum((1, 2))
    return squares + grads.sum(1).square().sum(1) if bias else squares
