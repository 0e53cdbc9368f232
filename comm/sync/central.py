"""Synchronous model averaging (SMA): a central model that all workers hold, and to which their own models are drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kfuse.comm.group import Group, Pending
from kfuse.comm.sync.weights import flatten, views, write


class CentralModel:
    """CROSSBOW's SMA (Koliousis et al., VLDB 2019, algorithm 1; lsds/Crossbow, clib-multigpu/synch/sma.c).

    In a step, with w_j the model of worker j before its update, z the central model, z' the one a step before:

        correction      c_j = alpha * (w_j - z)
        worker's model  w_j = w_j - (update of the optimizer) - c_j
        central model   z   = z + sum_j c_j + momentum * (z - z')

    The correction is that of the model with which the step began (optimizers/sma.cu copies it before the update). So
    the message of the sum travels during forward and backward. All workers compute z from the same sum.
    """

    model: Tensor
    """fp32 [elements], z."""
    change: Tensor
    """fp32 [elements], z - z'."""
    difference: Tensor | None
    """fp32 [elements], w_j - z at the beginning of the step under way; None between steps."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        """The central model begins with these weights, which are the same on all workers."""
        self.model = flatten(weights)
        self.change = torch.zeros_like(self.model)
        self.difference = None
        self._total = torch.empty(0)
        self._message: Pending | None = None

    def begin_step(self, weights: Sequence[Tensor], group: Group) -> None:
        """Before the worker's update: starts the message. A step that a lost worker aborted is begun again.

        weights: those that the central model was made of, in this and every other call.
        """
        self.difference = flatten(weights).sub_(self.model)
        self._start(self.difference, group)

    def _start(self, difference: Tensor, group: Group) -> None:
        self._total = difference.clone()
        self._message = group.all_reduce(self._total, "differences from the central model")

    def end_step(self, weights: Sequence[Tensor], group: Group, alpha: float, momentum: float) -> None:
        """After the worker's update: corrects its model and moves the central one.

        group: that of now; where it is another one than in `begin_step`, the message is sent again. Raises CommError;
        then nothing has changed.
        """
        if self.difference is None:
            return
        if self._message is None or self._message.group is not group:
            self._start(self.difference, group)
        message, self._message = self._message, None
        assert message is not None
        message.wait_on_stream()
        group.settle()  # where workers may be lost: nothing is changed by an incomplete sum
        for weight, part in zip(weights, views(self.difference, weights), strict=True):
            weight.sub_(part, alpha=alpha)
        self.change.mul_(momentum).add_(self._total, alpha=alpha)
        self.model.add_(self.change)
        self.difference, self._total = None, torch.empty(0)

    def state_dict(self) -> dict[str, Tensor]:
        """Not copies."""
        return {"model": self.model, "change": self.change}

    def load_state_dict(self, state: Mapping[str, Tensor], weights: Sequence[Tensor]) -> None:
        """Takes over another worker's central model, or a checkpoint's; the weights get its values.

        In the middle of a step it counts with a difference of zero.
        """
        self.model.copy_(state["model"])
        self.change.copy_(state["change"])
        write(self.model, weights)
        self.difference, self._message = torch.zeros_like(self.model), None
