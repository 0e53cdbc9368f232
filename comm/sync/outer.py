"""The outer step of local SGD: Nesterov momentum on what the workers' models have gained since the last one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kfuse.comm.sync.weights import flatten, write


class OuterMomentum:
    """DiLoCo's outer optimizer (Douillard et al. 2023, arXiv 2311.08105, algorithm 1).

    With theta the common model at the start of a round, theta_i worker i's model after its local steps, of n workers:

        outer gradient   g = theta - 1/n sum_i theta_i
        velocity         v = momentum * v + g
        new model        theta = theta - lr * (g + momentum * v)

    That is torch.optim.SGD(nesterov=True) with g as the gradient. All workers compute it from the same mean, and so
    have the same state.
    """

    start: Tensor
    """fp32 [elements], theta: the common model at the start of the round."""
    velocity: Tensor
    """fp32 [elements], v."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        """A first round starts from these weights, which are the same on all workers."""
        self.start = flatten(weights)
        self.velocity = torch.zeros_like(self.start)

    def step(self, weights: Sequence[Tensor], lr: float, momentum: float) -> None:
        """Ends a round, and starts the next. weights: the mean of the workers' models; afterwards the new model. They
        are those that the round started with.
        """
        gradient = self.start - flatten(weights)
        self.velocity.mul_(momentum).add_(gradient)
        self.start.sub_(gradient.add_(self.velocity, alpha=momentum), alpha=lr)
        write(self.start, weights)

    def state_dict(self) -> dict[str, Tensor]:
        """Both tensors, not copies."""
        return {"start": self.start, "velocity": self.velocity}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes over what another worker, or a checkpoint, has."""
        self.start.copy_(state["start"])
        self.velocity.copy_(state["velocity"])
