"""A state that streams of data carry from one step to the next, as in truncated back-propagation through time."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class CarriedState(nn.Module):
    """A part of a model: one state for each stream of data, which its samples of one step leave to those of the next.

        state = self.carried.read(streams)           # [B, *shape], detached
        output, state = self.rnn(x, state)           # one that takes and returns states so
        self.carried.write(streams, state)

    It is a buffer of the model: checkpoints have it, and workers that join or go on after a loss get it. Which worker
    runs which stream in a step does not matter. Each step must have one sample of each stream, so `batch_size` is the
    number of streams, and stays it; docs/train.md has the rest.
    """

    state: Tensor  # [streams, *shape], in the model's dtype

    def __init__(self, streams: int, *shape: int) -> None:
        """Begins with zeros. Raises ValueError without streams."""
        super().__init__()
        if streams < 1:
            raise ValueError(f"CarriedState({streams}): must have at least 1 stream")
        self.register_buffer("state", torch.zeros(streams, *shape))

    def read(self, streams: Tensor) -> Tensor:
        """streams: int64 [B], of each sample. Returns a copy of their states: [B, *shape]."""
        return self.state[streams]

    def write(self, streams: Tensor, value: Tensor) -> None:
        """Sets these streams' states, from the next step on, without gradient. Does nothing in eval mode."""
        if self.training:
            self.state[streams] = value.detach().to(self.state.dtype)
