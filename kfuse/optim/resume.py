"""An update that a lost worker has interrupted, with sharded state: what others need of it, and how they end it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kfuse.optim.base import DistributedOptimizer
from kfuse.optim.updates import Update


def has_begun(opt: DistributedOptimizer, step: int) -> bool:
    """Whether this worker has begun the update of this step, with sharded state, and still has its gradients."""
    last = opt.engine.last
    return last is not None and last.number == step and opt.begun is not None and opt.begun.step is last


def begun_update(opt: DistributedOptimizer) -> dict[str, Any]:
    """Returns what others need to make the update that this worker has begun. Plain values and small tensors."""
    assert opt.begun is not None
    begun, step = opt.begun, opt.begun.step
    groups = [{key: value for key, value in group.items() if key != "params"} for group in opt.param_groups]
    reduced = {"record": step.record, "tail": step.tail, "changes": step.changes}
    scalars = {name: getattr(begun, name) for name in ("factor", "skip", "lr_factor", "batch_factor")}
    return reduced | scalars | {"groups": groups}


@torch.no_grad()
def resume_update(opt: DistributedOptimizer, given: Mapping[str, Any], step: int, owner_is_lost: bool) -> None:
    """Makes the update of this step as far as it is not made here. Every worker of the new group calls it.

    given: `begun_update` of a worker that has begun. owner_is_lost: the worker whose shards this one mirrors is not in
    the new group. Raises CommError; then it may be called again, in yet another group.
    """
    for group, theirs in zip(opt.param_groups, given["groups"], strict=True):
        group.update(theirs)
    opt.lr_factor, opt.batch_factor = factors = given["lr_factor"], given["batch_factor"]
    device = opt.engine.device
    # A transfer leaves tensors on the host.
    record, tail, factor, skip = (
        None if given[name] is None else given[name].to(device) for name in ("record", "tail", "factor", "skip")
    )
    assert record is not None and tail is not None
    resumed = opt.engine.resume(record, tail, [change.to(device) for change in given["changes"]])
    update = Update(resumed, factor, skip, skip is None or not bool(skip), *factors, owner_is_lost)
    if not has_begun(opt, step):
        opt.last_lr, opt.begun = opt.base_lr * opt.lr_factor, update
    opt.updates.update(update)
