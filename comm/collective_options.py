"""torch's options of collectives, which its process groups take in place of arguments."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


def broadcast_from(source: int) -> Any:
    """torch's options of a broadcast from this rank."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = source, 0
    return options


def reduce_to(rank: int) -> Any:
    """torch's options of a sum that only this rank gets."""
    options = dist.ReduceOptions()
    options.rootRank = rank
    return options


def all_reduce_by(op: str) -> Any:
    """torch's options of an all-reduce by "sum", "avg" (which sums), "min" or "max"."""
    options = dist.AllreduceOptions()
    options.reduceOp = OPS[op]
    return options
