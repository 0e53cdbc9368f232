"""The functions kf.rank, kf.resize, kf.set_lr, ... for policies and training scripts; the names are KungFu's.

Functions that change training (`set_batch_size`, `set_lr`, `set_sync`, `set_topology`, `set_tree`): rank 0 announces
the change with the next step, and it applies on every worker from the same step on. `resize` goes to the supervisor.
On other ranks these calls do nothing.
`state_dict` and `load_state_dict` are for checkpoints of one's own.
Collectives (`allreduce`, `broadcast`, `allgather`, `barrier`, `peer_latencies`) must be called by every worker.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kfuse.membership import Session
from kfuse.optim.base import latest_optimizer
from kfuse.policies.signals import Decision
from kfuse.session import current

if TYPE_CHECKING:
    from kfuse.comm.group import Group
    from kfuse.train.trainer import Trainer

Number = int | float

__all__ = ["allgather", "allreduce", "barrier", "broadcast", "local_rank", "peer_latencies", "rank", "size"]
__all__ += ["grad_noise_scale", "grad_norm", "grad_variance", "load_state_dict", "log", "state_dict"]
__all__ += ["resize", "set_batch_size", "set_lr", "set_sync", "set_topology", "set_tree"]


def rank() -> int:
    """This worker's number in the current view, from 0; rank 0 is the leader. -1 on one that has left.

    Under `kfuse-run --ranks` all ranks of a worker have the same; dist.get_rank() is a rank's within it.
    """
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
    group = _group()
    total = _copy(value, group)
    group.all_reduce(total, f"kf.allreduce ({op})", op).wait()
    return _like(value, total / group.size if op == "avg" else total)


def broadcast(value: Tensor | Number, source: int = 0) -> Tensor | float:
    """Rank `source`'s value; tensors must have one shape and dtype on all workers. Raises ValueError, CommError."""
    group = _group()
    if not 0 <= source < group.size:
        raise ValueError(f"kf.broadcast source={source}: must be a rank from 0 to {group.size - 1}")
    out = _copy(value, group)
    group.broadcast(out, "kf.broadcast", source).wait()
    return _like(value, out)


def allgather(value: Tensor | Number) -> list[Tensor] | list[float]:
    """Every worker's value, in rank order; tensors must have one shape and dtype on all workers. Raises CommError."""
    group = _group()
    found: list[Any] = [_like(value, each) for each in group.all_gather(_copy(value, group), "kf.allgather")]
    return found


def barrier() -> None:
    """Returns when every worker has called it. Raises CommError."""
    _group().barrier("kf.barrier")


def grad_noise_scale() -> float:
    """The running noise scale, in samples; NaN while it is unknown.

    `opt.stats.noise_scale_low` is its interval's lower end, which is known more often, alone too.
    """
    return _latest("noise_scale")


def grad_variance() -> float:
    """S, the trace of one sample's gradient covariance, of the newest step that has arrived; NaN while unknown.

    That is the step before the last, or on a GPU a few steps more, unless `opt.stats` has waited for the last one.
    """
    return _latest("grad_variance")


def grad_norm() -> float:
    """Norm of the mean gradient, before clipping, of the newest step that has arrived; NaN while unknown."""
    return _latest("grad_norm")


def _copy(value: Tensor | Number, group: Group) -> Tensor:
    """The value on the group's device, in memory of its own; a number as fp64."""
    if isinstance(value, Tensor):
        return value.detach().to(group.device, copy=True).contiguous()
    return torch.tensor(float(value), dtype=torch.float64, device=group.device)


def _like(value: Tensor | Number, result: Tensor) -> Tensor | float:
    return result.to(value.device) if isinstance(value, Tensor) else float(result)


def _joined() -> Session:
    session = current()
    session.ensure_joined()
    return session


def _group() -> Group:
    """All workers. Raises RuntimeError while each is at a step of its own, and where they have several ranks."""
    session = _joined()
    if session.replica is not None:
        raise RuntimeError("kf's collectives under kfuse-run --ranks: use those of torch.distributed, within a worker")
    if session.apart:
        raise RuntimeError(
            "comm.sync=pair: each worker is at a step of its own, so none can wait for the others' values: call "
            "kf.allreduce, kf.broadcast, kf.allgather, kf.barrier and kf.peer_latencies in before_epoch or after_epoch"
        )
    return session.group


def _latest(name: str) -> float:
    opt = latest_optimizer()
    stats = opt.statistics.latest if opt is not None else None
    value = getattr(stats, name, None)
    return math.nan if value is None else float(value)


def peer_latencies() -> list[float]:
    """Measures all links between the workers: by rank, seconds that a short message from here takes; 0.0 to itself.

    Every worker must call it between the same steps. It takes some milliseconds a worker, more on slow links. Policies
    then see latencies and throughputs in `Signals`. Raises CommError, RuntimeError with comm.sync=pair.
    """
    from kfuse.comm.topology import measure

    group = _group()
    return list(measure(group).latencies[group.rank])


def resize(workers: int) -> None:
    """Requests this many workers. Workers join, when they are ready, or leave, at a later step boundary."""
    session, trainer = current(), _running()
    if not session.elastic:
        warnings.warn("kf.resize: this job's number of workers is fixed: no supervisor started it", stacklevel=2)
    elif trainer is not None:
        trainer.decisions.request(workers=workers)
    else:
        session.ask_supervisor("resize", workers=operator.index(workers))


def set_batch_size(samples: int) -> None:
    """Sets the global batch size. In training only (kf.fit, kf.DataLoader, `kfuse`). Raises ValueError below 1."""
    trainer = _in_training("kf.set_batch_size")
    if samples < 1:
        raise ValueError(f"kf.set_batch_size({samples}): must be at least 1")
    trainer.calls.request_within_bounds(Decision(batch_size=samples))


def set_lr(lr: float) -> None:
    """Sets the learning rate; its schedule goes on from there. In training only (kf.fit, kf.DataLoader, `kfuse`).

    The first step that it applies to has this rate, also where a batch size is set with it, before or after it: what
    lr_scaling makes of that one is not added. Warm-up and decay go on, and a batch size that is set later scales it.

    Raises ValueError unless it is above 0 and in fp32's range, and where the rate now is 0, which no factor changes.
    """
    _in_training("kf.set_lr").decisions.request(lr=lr)


def set_topology(name: str) -> None:
    """Sets how gradients are reduced: "allreduce", "all_to_all" or "tree". In training only, as `set_lr`."""
    _in_training("kf.set_topology").decisions.request(topology=name)


def set_tree(shape: str | Sequence[int]) -> None:
    """Sets the shape of the topology "tree". In training only, as `set_lr`.

    "binary", "star", "host" (workers of a host, then the hosts among themselves), "latency" (the minimum spanning tree
    of the measured links), or a list: each rank's parent, the root's being itself. A list is dropped when the workers
    change. Raises ValueError for another name, and for a list that is no tree of the present workers.
    """
    _in_training("kf.set_tree").decisions.request(tree=shape)


def set_sync(mode: str) -> None:
    """Sets how the workers keep together. In training only, as `set_lr`.

    Raises ValueError for a mode that this job cannot have.

    "ssgd": every step's gradients are reduced. "local:N": local SGD (Stich 2019): each worker updates with its own
    gradients, and models are averaged every N steps. "sma": each worker has a model of its own, which is drawn to a
    central one (Koliousis et al. 2019). "pair": each averages its model with another one's, and waits for nobody (Lian
    et al. 2018); "pair:N,M": so too, every N steps with one of its host, every M steps with one of another host. Beside
    ssgd statistics of the mean gradient are unknown.
    """
    _in_training("kf.set_sync").decisions.request(sync=mode)


def state_dict() -> dict[str, Any]:
    """All that the training under way depends on, as a copy on the host; the same on every worker.

    Tensors and plain values, nested in dictionaries, lists and tuples: torch.save writes it, and
    torch.load(weights_only=True) reads it. Call it between steps: in the loop's body after opt.step(), or in a policy's
    after_step or after_epoch, as the last thing that the hook does. Raises RuntimeError elsewhere, TypeError for a
    policy or scheduler whose state holds other things.
    """
    trainer = _running()
    if trainer is None:
        raise RuntimeError("kf.state_dict: no training is under way; after a loop, loader.state_dict() has its state")
    return trainer.state_dict()


def load_state_dict(state: Mapping[str, Any]) -> None:
    """Has the next kf.fit or kf.DataLoader begin from what `kf.state_dict` returned, here or in another process.

    It must have the same model, optimizer, policy and scheduler. Where it resumes from a checkpoint, that one counts.
    Raises RuntimeError once training has begun, TypeError for what is no state, ValueError for another program's.
    """
    from kfuse.train.trainer import Trainer

    if not isinstance(state, Mapping):
        raise TypeError(f"kf.load_state_dict takes what kf.state_dict returned, not {type(state).__name__}")
    trainer = _running()
    if trainer is None:
        Trainer.next_state = state
    else:
        trainer.recovery.begin_from(state)


def log(**figures: Tensor | float) -> None:
    """Records figures of your own with the step under way, in a loop's body or a policy's hook: `kf.log(ema=0.31)`.

    Call it on every worker with the same numbers: those of rank 0 are written, in `figures` of metrics.jsonl, and go
    to the sinks (observe_sinks). `heldout_loss` and `heldout_accuracy` (a fraction) count as
    an evaluation, where kf.fit gets no heldout=: for the display, the summary and best.pt; with an accuracy that
    reaches train_target_accuracy training ends. Raises RuntimeError outside of training, TypeError or ValueError
    for what is no number.
    """
    _in_training("kf.log").log({name: float(value) for name, value in figures.items()})


def _running() -> Trainer | None:
    from kfuse.train.trainer import newest  # only where there is, or may be, a training loop

    return newest()


def _in_training(function: str) -> Trainer:
    trainer = _running()
    if trainer is None:
        raise RuntimeError(
            f"{function} works in training (kf.fit, kf.DataLoader, `kfuse`): in a loop of your own, set it there"
        )
    return trainer
