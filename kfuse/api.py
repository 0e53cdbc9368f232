"""The functions kf.rank, kf.resize, kf.set_lr, ... for policies and training scripts; the names are KungFu's.

Functions that change training (`set_batch_size`, `set_lr`, `set_sync`, `set_topology`, `set_tree`): rank 0 announces
the change with the next step, and it applies on every worker from the same step on. `resize` goes to the supervisor.
On other ranks these calls do nothing.
`state_dict` and `load_state_dict` are for checkpoints of one's own.
Collectives (`allreduce`, `broadcast`, `allgather`, `barrier`) must be called by every worker.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kfuse.optim.base import latest_optimizer
from kfuse.policies.signals import SYNC_MAX
from kfuse.session import Session, current

if TYPE_CHECKING:
    from kfuse.train.decisions import Decisions

Number = int | float


def rank() -> int:
    """This worker's number in the current view, from 0; rank 0 is the leader. -1 on one that has left."""
    session = _joined()
    return -1 if session.left else session.group.rank


def size() -> int:
    """How many workers the current view has."""
    return _joined().group.size


def local_rank() -> int:
    """This worker's number on its machine."""
    return _joined().local_rank


def allreduce(value: Tensor | Number, op: str = "sum") -> Tensor | float:
    """The sum, average, minimum or maximum over all workers; a new tensor for a tensor, a float for a number.

    op: "sum" | "avg" | "min" | "max". Raises ValueError for another, CommError if a worker does not answer.
    """
    if op not in ("sum", "avg", "min", "max"):
        raise ValueError(f"kf.allreduce op={op!r}: must be one of sum, avg, min, max")
    group = _joined().group
    if isinstance(value, Tensor):
        total = value.detach().to(group.device, copy=True).contiguous()
    else:
        total = torch.tensor(float(value), dtype=torch.float64, device=group.device)
    group.all_reduce(total, f"kf.allreduce ({op})", op).wait()
    if op == "avg":
        total = total / group.size
    return total.to(value.device) if isinstance(value, Tensor) else float(total)


def broadcast(value: Tensor | Number, source: int = 0) -> Tensor | float:
    """Rank `source`'s value; tensors must have one shape and dtype on all workers. Raises ValueError, CommError."""
    group = _joined().group
    if not 0 <= source < group.size:
        raise ValueError(f"kf.broadcast source={source}: must be a rank from 0 to {group.size - 1}")
    if isinstance(value, Tensor):
        out = value.detach().to(group.device, copy=True).contiguous()
    else:
        out = torch.tensor(float(value), dtype=torch.float64, device=group.device)
    group.broadcast(out, "kf.broadcast", source).wait()
    return out.to(value.device) if isinstance(value, Tensor) else float(out)


def allgather(value: Tensor | Number) -> list[Tensor] | list[float]:
    """Every worker's value, in rank order; tensors must have one shape and dtype on all workers. Raises CommError."""
    group = _joined().group
    if isinstance(value, Tensor):
        return [t.to(value.device) for t in group.all_gather(value.detach().to(group.device), "kf.allgather")]
    number = torch.tensor([float(value)], dtype=torch.float64, device=group.device)
    return [float(t) for t in group.all_gather(number, "kf.allgather")]


def barrier() -> None:
    """Returns when every worker has called it. Raises CommError."""
    _joined().group.barrier("kf.barrier")


def grad_noise_scale() -> float:
    """The running noise scale, in samples; NaN while it is unknown."""
    return _latest("noise_scale")


def grad_variance() -> float:
    """S, the trace of one sample's gradient covariance, of the newest step that has arrived; NaN while unknown.

    That is the step before the last, or on a GPU a few steps more, unless `opt.stats` has waited for the last one.
    """
    return _latest("grad_variance")


def grad_norm() -> float:
    """Norm of the mean gradient, before clipping, of the newest step that has arrived; NaN while unknown."""
    return _latest("grad_norm")


def _joined() -> Session:
    session = current()
    session.ensure_joined()
    return session


def _latest(name: str) -> float:
    opt = latest_optimizer()
    stats = opt.statistics.latest if opt is not None else None
    value = getattr(stats, name, None)
    return math.nan if value is None else float(value)


def resize(workers: int) -> None:
    """Requests this many workers. Workers join, when they are ready, or leave, at a later step boundary."""
    session, decisions = current(), _running()
    if not session.elastic:
        warnings.warn("kf.resize: this job's number of workers is fixed: no supervisor started it", stacklevel=2)
    elif decisions is not None:
        decisions.request(workers=workers)
    else:
        session.ask_supervisor("resize", workers=operator.index(workers))


def set_batch_size(samples: int) -> None:
    """Sets the global batch size. Inside kf.fit only. Raises ValueError below 1."""
    decisions = _in_training("kf.set_batch_size")
    if samples < 1:
        raise ValueError(f"kf.set_batch_size({samples}): must be at least 1")
    decisions.request(batch_size=samples)


def set_lr(lr: float) -> None:
    """Sets the learning rate; its schedule goes on from there. Inside kf.fit only.

    Raises ValueError unless it is finite and above 0, and where the rate now is 0, which no factor changes.
    """
    _in_training("kf.set_lr").request_lr(lr)


def set_topology(name: str) -> None:
    """Sets how gradients are reduced: "allreduce", "all_to_all" or "tree". Inside kf.fit only."""
    _in_training("kf.set_topology").request(topology=name)


def set_tree(shape: str) -> None:
    """Sets the shape of the topology "tree": "binary", "star" or "host" (one message a host). Inside kf.fit only."""
    _in_training("kf.set_tree").request(tree=shape)


def set_sync(steps: int) -> None:
    """Sets how many steps lie between synchronisations of the workers. Inside kf.fit only.

    1: every step's gradients are reduced. More: local SGD (Stich 2019): each worker updates with its own gradients, and
    parameters and optimizer state are averaged every so many steps; statistics of the mean gradient are unknown.
    """
    decisions = _in_training("kf.set_sync")
    if not 1 <= steps <= SYNC_MAX:
        raise ValueError(f"kf.set_sync({steps}): must be 1 to {SYNC_MAX}")
    decisions.request(sync=steps)


def state_dict() -> dict[str, Any]:
    """All that the training under way depends on, as a copy on the host; the same on every worker.

    Tensors and plain values, nested in dictionaries, lists and tuples: torch.save writes it, and
    torch.load(weights_only=True) reads it. Call it between steps: in the loop's body after opt.step(), or in a policy's
    after_step or after_epoch, as the last thing that the hook does. Raises RuntimeError elsewhere, TypeError for a
    policy or scheduler whose state holds other things.
    """
    from kfuse.train import running

    return running.state_dict()


def load_state_dict(state: Mapping[str, Any]) -> None:
    """Has the next kf.fit or kf.DataLoader begin from what `kf.state_dict` returned, here or in another process.

    It must have the same model, optimizer, policy and scheduler. Where it resumes from a checkpoint, that one counts.
    Raises RuntimeError once training has begun, TypeError for what is no state, ValueError for another program's.
    """
    from kfuse.train import running

    running.load_state_dict(state)


def _running() -> Decisions | None:
    from kfuse.train.decisions import running  # only where there is, or may be, a training loop

    return running()


def _in_training(function: str) -> Decisions:
    decisions = _running()
    if decisions is None:
        raise RuntimeError(f"{function} works inside kf.fit: in a loop of your own, set it there")
    return decisions
