"""Optimizers that reduce gradients over all workers, measure them, and update parameters, in `step()`."""

from kfuse.optim.base import DistributedOptimizer as DistributedOptimizer
from kfuse.optim.consistency import ConsistencyError as ConsistencyError
from kfuse.optim.consistency import carried_states as carried_states
from kfuse.optim.refuse import refuse_parameters_outside as refuse_parameters_outside
from kfuse.optim.refuse import refuse_partial_state as refuse_partial_state
from kfuse.optim.refuse import refuse_wrapped as refuse_wrapped
from kfuse.optim.wrap import Optimizer as Optimizer
