"""Optimizers that reduce, measure and update in one go."""

from kfuse.optim.adamw import FusedAdamW
from kfuse.optim.base import DistributedOptimizer
from kfuse.optim.consistency import ConsistencyError
from kfuse.optim.lamb import FusedLAMB
from kfuse.optim.refuse import refuse_wrapped
from kfuse.optim.sgd import FusedSGD
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
