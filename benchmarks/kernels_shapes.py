"""What the kernel benchmark's parameters look like: one large tensor, or a real model's many."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kfuse.kernels import PackTable

Shape = tuple[int, ...]
ALIGN = 64
"""Elements: where kfuse's buckets let a tensor start."""


@dataclass(frozen=True)
class Layout:
    """Tensors of given shapes, each at its place in a flat buffer."""

    name: str
    shapes: tuple[Shape, ...]

    @property
    def numels(self) -> list[int]:
        return [math.prod(shape) for shape in self.shapes]

    @property
    def offsets(self) -> list[int]:
        offsets, end = [], 0
        for numel in self.numels:
            offsets.append(end)
            end += math.ceil(numel / ALIGN) * ALIGN
        return offsets

    @property
    def numel(self) -> int:
        """Of the flat buffer, padding included (below 0.1 % in all layouts here)."""
        return self.offsets[-1] + math.ceil(self.numels[-1] / ALIGN) * ALIGN

    def views(self, flat: Tensor) -> list[Tensor]:
        places = zip(self.offsets, self.numels, self.shapes, strict=True)
        return [flat[offset : offset + numel].view(shape) for offset, numel, shape in places]

    def table(self, device: torch.device) -> PackTable:
        return PackTable.build(self.numels, self.offsets, device)


def flat(megabytes: int) -> Layout:
    """One tensor of this many MiB in fp32."""
    return Layout(f"{megabytes} MB", ((megabytes * 2**18,),))


def gpt2() -> Layout:
    """GPT-2 small: 148 tensors, 124,439,808 parameters."""
    width = 768
    layer: list[Shape] = [
        *[(width,), (width,)],
        *[(width, 3 * width), (3 * width,), (width, width), (width,)],
        *[(width,), (width,)],
        *[(width, 4 * width), (4 * width,), (4 * width, width), (width,)],
    ]
    return Layout("gpt2", ((50257, width), (1024, width), *(layer * 12), (width,), (width,)))


MODELS = {"gpt2": gpt2}
