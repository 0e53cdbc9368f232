"""What the synchronous modes compute on the workers' models: the central model of SMA, and the outer step of local SGD.

Both are laid out as one flat fp32 tensor. All workers compute them from the same sum or mean, and so have the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kfuse.comm.group import Group, Pending


def flatten(weights: Sequence[Tensor]) -> Tensor:
    """Returns a copy of all elements: fp32 [elements], on the weights' device."""
    return torch.cat([weight.detach().reshape(-1).to(torch.float32) for weight in weights])


def views(flat: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Returns for each weight its part of `flat`, in its shape."""
    parts = torch.split(flat, [weight.numel() for weight in weights])
    return [part.view(weight.shape) for part, weight in zip(parts, weights, strict=True)]


def write(flat: Tensor, weights: Sequence[Tensor]) -> None:
    """Gives the weights these values, rounded to their dtype."""
    for weight, part in zip(weights, views(flat, weights), strict=True):
        weight.copy_(part)


class CentralModel:
    """CROSSBOW's SMA (Koliousis et al., VLDB 2019, algorithm 1; lsds/Crossbow, clib-multigpu/synch/sma.c).

    In a step, with w_j the model of worker j before its update, z the central model, z' the one a step before:

        correction      c_j = alpha * (w_j - z)
        worker's model  w_j = w_j - (update of the optimizer) - c_j
        central model   z   = z + sum_j c_j + momentum * (z - z')

    The correction is that of the model with which the step began (optimizers/sma.cu copies it before the update). So
    the message of the sum travels during forward and backward.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        """The central model begins with these weights, which are the same on all workers."""
        self.model = flatten(weights)  # fp32 [elements], z
        self.change = torch.zeros_like(self.model)  # fp32 [elements], z - z'
        self.difference: Tensor | None = None  # fp32 [elements], w_j - z as the step began; None between steps
        self._total = torch.empty(0)
        self._message: Pending | None = None

    def begin_step(self, weights: Sequence[Tensor], group: Group) -> None:
        """Before the worker's update: starts the message. A step that a lost worker aborted is begun again.

        weights: those that the central model was made of, in this and every other call.
        """
        self.difference = flatten(weights).sub_(self.model)
        self._message = self._start(self.difference, group)

    def _start(self, difference: Tensor, group: Group) -> Pending:
        self._total = difference.clone()
        return group.all_reduce(self._total, "differences from the central model")

    def end_step(self, weights: Sequence[Tensor], group: Group, alpha: float, momentum: float) -> None:
        """After the worker's update: corrects its model and moves the central one.

        group: that of now; where it is another one than in `begin_step`, the message is sent again. Raises CommError;
        then nothing has changed.
        """
        if self.difference is None:
            return
        message, self._message = self._message, None
        if message is None or message.group is not group:
            message = self._start(self.difference, group)
        message.wait_on_stream()
        group.settle()  # where workers may be lost: nothing is changed by an incomplete sum
        for weight, part in zip(weights, views(self.difference, weights), strict=True):
            weight.sub_(part, alpha=alpha)
        self.change.mul_(momentum).add_(self._total, alpha=alpha)
        self.model.add_(self.change)
        self.difference, self._total = None, torch.empty(0)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the tensors themselves."""
        return {"model": self.model, "change": self.change}

    def load_state_dict(self, state: Mapping[str, Tensor], weights: Sequence[Tensor]) -> None:
        """Takes over another worker's central model, or a checkpoint's; the weights get its values.

        In the middle of a step it counts with a difference of zero.
        """
        self.model.copy_(state["model"])
        self.change.copy_(state["change"])
        write(self.model, weights)
        self.difference, self._message = torch.zeros_like(self.model), None


class OuterMomentum:
    """DiLoCo's outer optimizer (Douillard et al. 2023, arXiv 2311.08105, algorithm 1).

    With theta the common model at the start of a round, theta_i worker i's model after its local steps, of n workers:

        outer gradient   g = theta - 1/n sum_i theta_i
        velocity         v = momentum * v + g
        new model        theta = theta - lr * (g + momentum * v)

    That is torch.optim.SGD(nesterov=True) with g as the gradient.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        """A first round starts from these weights, which are the same on all workers."""
        self.start = flatten(weights)  # fp32 [elements], theta: the common model at the start of the round
        self.velocity = torch.zeros_like(self.start)  # fp32 [elements], v

    def step(self, weights: Sequence[Tensor], lr: float, momentum: float) -> None:
        """Ends a round, and starts the next.

        weights: the mean of the workers' models, of those that the round started with; afterwards the new model.
        """
        gradient = self.start - flatten(weights)
        self.velocity.mul_(momentum).add_(gradient)
        self.start.sub_(gradient.add_(self.velocity, alpha=momentum), alpha=lr)
        write(self.start, weights)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the tensors themselves."""
        return {"start": self.start, "velocity": self.velocity}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.start.copy_(state["start"])
        self.velocity.copy_(state["velocity"])
