"""An update that a lost worker interrupts, with sharded state: some workers have begun it, and the others have not.

A worker begins once it knows the sums of squares of all shards. It knows them only after every worker has all gradients
that it updates with, those of the shards that it mirrors included. So where one has begun, all others can follow: in
their new group they update their own shards and what they mirror, and the lost worker's shard is where its mirror is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kfuse.optim.base import BegunUpdate, DistributedOptimizer
from kfuse.optim.scaling import Scaling


class InterruptedUpdates(DistributedOptimizer):
    """Mix-in: ends an update in another group than the one in which it was begun."""

    owner_is_lost: bool = False
    """While an update is resumed: the worker whose shards this one mirrors is gone."""

    def has_begun(self, step: int) -> bool:
        """Whether this worker has begun the update of this step, with sharded state, and still has its gradients."""
        kept = self.engine.kept
        return kept is not None and kept.step == step and self.begun is not None and self.begun.step == step

    def begun_update(self) -> dict[str, Any]:
        """Of a worker that `has_begun`: what others need to make the same update. Plain values and small tensors."""
        assert self.begun is not None
        scaled = self.begun.scaled
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        return {
            "record": scaled.record,
            "factor": scaled.factor,
            "skip": scaled.skip,
            "groups": groups,
            "lr_factor": self.lr_factor,
        }

    @torch.no_grad()
    def resume_update(self, given: Mapping[str, Any], step: int, owner_is_lost: bool) -> None:
        """Makes the update of this step as far as it is not made here. Every worker of the new group calls it.

        given: `begun_update` of a worker that has begun. owner_is_lost: the worker whose shards this one mirrors is not
        in the new group. Raises CommError; then it may be called again, in yet another group.
        """
        for group, theirs in zip(self.param_groups, given["groups"], strict=True):
            group.update(theirs)
        self.lr_factor, self.owner_is_lost = given["lr_factor"], owner_is_lost
        self.engine.resume(given["record"])
        reduced = self.engine.reduced
        assert reduced is not None
        if not self.has_begun(step):
            finite = given["skip"] is None or not bool(given["skip"])
            self.last_lr = self.base_lr * self.lr_factor
            self.begun = BegunUpdate(step, reduced, Scaling(given["record"], given["factor"], given["skip"], finite))
        try:
            self.synchronize()  # sets each p.grad, which tells what is updated
            self._update(reduced, given["factor"], given["skip"])
        finally:
            self.engine.reduced, self.owner_is_lost = None, False
            for p in self.engine.params:
                p.grad = None

    def collect_parameters(self, rank: int, has_state: bool) -> None:
        """After `resume_update`: rank `rank` gets all parameters. Every worker of the group calls it.

        Raises CommError, and ShardsLost where nobody has updated a part of them.
        """
