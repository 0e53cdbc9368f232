"""A model's buffers (BatchNorm's running statistics), whose changes are averaged over a step's micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class AveragedBuffers:
    """The buffers, and their values at the start of the step.

    Changes are averaged, not values, so that a buffer which nothing changes keeps its bits. Each micro-batch starts
    from the step's first values, so that the result does not depend on which worker ran which.
    """

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self.tensors = list(buffers)
        self._first = [b.clone() for b in self.tensors]
        self._infinite = [i for i, b in enumerate(self.tensors) if not b.isfinite().all()]  # a mask's -inf

    def begin_step(self) -> None:
        """A planned step starts from the values now.

        A bare backward does not call it: its forward has changed the buffers already, since the step before.
        """
        if self.tensors:
            torch._foreach_copy_(self._first, self.tensors)

    def put_back(self) -> None:
        """For the next micro-batch, or as the step is given up: the step's first values again."""
        if self.tensors:
            torch._foreach_copy_(self.tensors, self._first)

    def changes(self) -> list[Tensor]:
        """Of each buffer since the step began, fp32."""
        if not self.tensors:
            return []
        changes = list(torch._foreach_sub(self.tensors, self._first))
        for i in self._infinite:  # inf - inf is not 0
            changes[i] = torch.where(self.tensors[i] == self._first[i], 0, changes[i])
        return [change.to(torch.float32) for change in changes]

    def apply(self, index: int, change: Tensor) -> None:
        """The step's mean change of one buffer, in its shape; a counter is rounded."""
        buffer, first = self.tensors[index], self._first[index]
        change = change if buffer.is_floating_point() else change.round().to(buffer.dtype)
        torch.add(first, change, out=buffer)
        first.copy_(buffer)
