"""A multi-layer perceptron."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn


class MLP(nn.Module):
    """Linear layers with ReLU between them, over the flattened input. `hidden=()` is softmax regression.

    Input `[B, *input_shape]`, floating; output logits `[B, num_classes]`.
    Raises ValueError for a width below 1.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        hidden: Sequence[int] = (128,),
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if min(hidden, default=1) < 1:
            raise ValueError(f"hidden={list(hidden)}: must be at least 1")
        widths = [math.prod(input_shape), *hidden]
        layers: list[nn.Module] = [nn.Flatten()]
        for fan_in, fan_out in pairwise(widths):
            layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
            if dropout:
                layers.append(nn.Dropout(dropout))
        layers.append(nn.Linear(widths[-1], num_classes))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """fp32 [B, *input_shape] to a score per class, [B, num_classes]."""
        logits: Tensor = self.layers(x)
        return logits
