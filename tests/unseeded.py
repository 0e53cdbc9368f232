"""A model as a script that sets no seed makes it: another one in each process."""

from __future__ import annotations

import os
from typing import Any

import torch

from kfuse.models import MLP


class UnseededMLP(MLP):
    def __init__(self, input_shape: Any, num_classes: int) -> None:
        torch.manual_seed(os.getpid())
        super().__init__(input_shape, num_classes, hidden=[16])
