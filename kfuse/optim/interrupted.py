"""An update that a lost worker interrupts, with sharded state: some workers have begun it, and the others have not.

A worker begins once it knows the sums of squares of all shards. It knows them only after every worker has all gradients
that it updates with, those of the shards that it mirrors included. So where one has begun, all others can follow: in
their new group they update their own shards and what they mirror, and the lost worker's shard is where its mirror is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from kfuse.optim.scaling import Scaling
from kfuse.optim.updates import Update

if TYPE_CHECKING:
    from kfuse.optim.base import DistributedOptimizer


def has_begun(opt: DistributedOptimizer, step: int) -> bool:
    """Whether this worker has begun the update of this step, with sharded state, and still has its gradients."""
    kept = opt.engine.kept
    return kept is not None and kept.step == step and opt.begun is not None and opt.begun.step == step


def begun_update(opt: DistributedOptimizer) -> dict[str, Any]:
    """Returns what others need to make the update that this worker has begun. Plain values and small tensors."""
    assert opt.begun is not None
    scaled = opt.begun.scaled
    groups = [{key: value for key, value in group.items() if key != "params"} for group in opt.param_groups]
    settings = {"groups": groups, "lr_factor": opt.lr_factor}
    return {"record": scaled.record, "factor": scaled.factor, "skip": scaled.skip, **settings}


@torch.no_grad()
def resume_update(opt: DistributedOptimizer, given: Mapping[str, Any], step: int, owner_is_lost: bool) -> None:
    """Makes the update of this step as far as it is not made here. Every worker of the new group calls it.

    given: `begun_update` of a worker that has begun. owner_is_lost: the worker whose shards this one mirrors is not in
    the new group. Raises CommError; then it may be called again, in yet another group.
    """
    for group, theirs in zip(opt.param_groups, given["groups"], strict=True):
        group.update(theirs)
    opt.lr_factor = given["lr_factor"]
    opt.engine.resume(given["record"])
    reduced = opt.engine.reduced
    assert reduced is not None
    finite = given["skip"] is None or not bool(given["skip"])
    scaled = Scaling(given["record"], given["factor"], given["skip"], finite)
    if not has_begun(opt, step):
        opt.last_lr = opt.base_lr * opt.lr_factor
        opt.begun = Update(step, reduced, scaled, (), opt.lr_factor)
    try:
        opt.synchronize()  # sets each p.grad, which tells what is updated
        in_doubt = opt.reducer.in_doubt
        opt.updates.update(Update(step, reduced, scaled, in_doubt, opt.lr_factor, owner_is_lost))
    finally:
        opt.engine.reduced = None
        for p in opt.engine.params:
            p.grad = None
