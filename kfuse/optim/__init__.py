"""Optimizers that reduce gradients over all workers, measure them, and update parameters, in `step()`."""

from kfuse.optim.base import DistributedOptimizer
from kfuse.optim.comparison import ConsistencyError
from kfuse.optim.fused import FusedAdamW, FusedLAMB, FusedSGD
from kfuse.optim.refuse import refuse_wrapped
from kfuse.optim.wrap import Optimizer

__all__ = [
    "ConsistencyError",
    "DistributedOptimizer",
    "FusedAdamW",
    "FusedLAMB",
    "FusedSGD",
    "Optimizer",
    "refuse_wrapped",
]
