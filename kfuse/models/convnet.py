"""A small residual convolutional network."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """relu(BN(conv(relu(BN(conv(x))))) + shortcut(x)), 3x3 convolutions (He et al. 2016, figure 2)."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False),
                nn.BatchNorm2d(channels_out),
            )

    def forward(self, x: Tensor) -> Tensor:
        """fp32 [B, channels_in, H, W] to [B, channels_out, H', W'], H' = ceil(H / stride)."""
        out = F.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        return F.relu(out + self.shortcut(x))


class ConvNet(nn.Module):
    """Three stages of residual blocks, the last two halving the image, and a mean over what is left.

    Input `[B, channels, height, width]`, floating, height and width at least 5; output logits
    `[B, num_classes]`. Batch normalisation sees one micro-batch at a time. Raises ValueError for a smaller
    image.
    """

    def __init__(
        self, input_shape: Sequence[int], num_classes: int, width: int = 32, blocks_per_stage: int = 1
    ) -> None:
        super().__init__()
        if min(width, blocks_per_stage) < 1:
            raise ValueError(f"width={width}, blocks_per_stage={blocks_per_stage}: must be at least 1")
        # A 5x5 image ends as 2x2, so that batch normalisation has a variance even with one sample.
        if len(input_shape) != 3 or min(input_shape[1:]) < 5:
            raise ValueError(
                f"input_shape={tuple(input_shape)}: a convnet needs (channels, height, width), at least 5x5"
            )
        self.stem = nn.Sequential(
            nn.Conv2d(input_shape[0], width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        stages: list[nn.Module] = []
        channels = width
        for stage in range(3):
            for block in range(blocks_per_stage):
                stride = 2 if stage > 0 and block == 0 else 1
                stages.append(ResidualBlock(channels, width << stage, stride))
                channels = width << stage
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images, fp32 [B, channels, H, W], to a score per class, [B, num_classes]."""
        features: Tensor = self.stages(self.stem(x))
        logits: Tensor = self.head(features.mean(dim=(2, 3)))
        return logits
