"""Optimizers that reduce gradients over all workers, measure them, and update parameters, in `step()`."""

from typing import TYPE_CHECKING, Any

from kfuse.optim.base import DistributedOptimizer
from kfuse.optim.consistency import ConsistencyError
from kfuse.optim.refuse import refuse_wrapped
from kfuse.optim.wrap import Optimizer

if TYPE_CHECKING:
    from kfuse.optim.fused import FusedAdamW, FusedLAMB, FusedSGD

__all__ = [
    "ConsistencyError",
    "DistributedOptimizer",
    "FusedAdamW",
    "FusedLAMB",
    "FusedSGD",
    "Optimizer",
    "refuse_wrapped",
]


def __getattr__(name: str) -> Any:
    """Imports the fused optimizers when one is used: a script has one at most."""
    if name not in __all__:
        raise AttributeError(f"module 'kfuse.optim' has no attribute {name!r}")
    from kfuse.optim import fused

    return getattr(fused, name)
