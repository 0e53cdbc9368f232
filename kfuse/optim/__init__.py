"""Optimizers that reduce gradients over all workers, measure them, and update parameters, in `step()`."""

from typing import Any

from kfuse.optim.base import DistributedOptimizer as DistributedOptimizer
from kfuse.optim.consistency import ConsistencyError as ConsistencyError
from kfuse.optim.refuse import refuse_wrapped as refuse_wrapped
from kfuse.optim.wrap import Optimizer as Optimizer


def __getattr__(name: str) -> Any:
    """Imports the fused optimizers when one is used: a script has one at most."""
    if name not in ("FusedAdamW", "FusedLAMB", "FusedSGD"):
        raise AttributeError(f"module 'kfuse.optim' has no attribute {name!r}")
    from kfuse.optim import fused

    return getattr(fused, name)
