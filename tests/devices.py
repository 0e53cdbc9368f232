"""Where the kernels' tests run, and tensors for them.

Without a GPU that is the CPU alone: PyTorch's implementations, or Triton's interpreter in a process of
`test_kernels_interpreter.py`.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = ["cpu"] + ["cuda"] * (torch.cuda.is_available() and not INTERPRETED)


def normal(shape: int | tuple[int, ...], seed: int, device: str) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def scalar(value: float, device: str) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device=device)


def rounded(master: Tensor, dtype: torch.dtype) -> Tensor:
    """As the kernels round it. Triton's interpreter truncates to bf16 instead of rounding."""
    if INTERPRETED and dtype == torch.bfloat16:
        master = (master.view(torch.int32) & ~0xFFFF).view(torch.float32)
    return master.to(dtype)
