"""What cannot be trained right is refused, with a remedy.

Models that another library wrapped to reduce or shard them itself, since both would do the same work. Loops of one's
own in a job whose workers may change, since a worker that joins would not know their state.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from kfuse.membership import Session
from kfuse.optim.consistency import each_element_once
from kfuse.optim.updates import named_parameters


def refuse_wrapped(model: nn.Module, in_replica: bool = False) -> None:
    """Raises TypeError if the model, or a module in it, is wrapped in DistributedDataParallel or sharded by FSDP.

    in_replica: by `fully_shard` it may be.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # where it is not imported, no model is sharded
    sharded = () if fsdp is None else (fsdp.FullyShardedDataParallel, *[fsdp.FSDPModule] * (not in_replica))
    for path, module in model.named_modules():
        name = ".".join(filter(None, ("model", path)))
        if issubclass(type(module), DistributedDataParallel):
            raise TypeError(_message(name, *_DDP))
        if issubclass(type(module), sharded):
            raise TypeError(_message(name, *_FSDP))


def refuse_sync_batchnorm(model: nn.Module) -> None:
    """Raises TypeError for SyncBatchNorm: workers have different numbers of micro-batches, so it cannot add theirs up.

    Without torch's process group it would silently be BatchNorm.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise TypeError(
                f"module {name or 'model'}: SyncBatchNorm is not supported on several workers: use BatchNorm, whose "
                "running statistics kfuse averages over a step's micro-batches (leave out convert_sync_batchnorm), or "
                "GroupNorm"
            )


def refuse_sharded(named: Iterable[tuple[Parameter, str]]) -> None:
    """Raises TypeError for parameters that FSDP flattened, or that are DTensors (fully_shard, tensor parallelism)."""
    tensor = sys.modules.get("torch.distributed.tensor")
    dtensor = getattr(tensor, "DTensor", ())
    for p, name in named:
        if getattr(p, "_is_flat_param", False) or getattr(p, "_fsdp_flattened", False):
            raise TypeError(f"{name}: {_message('its model', *_FSDP)}")
        if isinstance(p, dtensor) or isinstance(p.data, dtensor):
            raise TypeError(
                f"{name} is a DTensor: kfuse trains whole parameters; give it the model without fully_shard, "
                "distribute_tensor or parallelize_module, or train one of fully_shard by kfuse-run --ranks"
            )


def refuse_parameters_outside(model: nn.Module, opt: torch.optim.Optimizer) -> None:
    """Raises ValueError for a parameter that is not the model's: a worker that joins would not get it."""
    inside = {id(p) for p in model.parameters()}
    for p, name in named_parameters(opt.param_groups):
        if id(p) not in inside:
            raise ValueError(
                f"{name} of {type(opt).__name__}, of shape {tuple(p.shape)}, is not in the model: give a model that "
                "has all that is trained, such as nn.ModuleList([generator, critic])"
            )


def refuse_partial_state(model: nn.Module) -> None:
    """Raises ValueError for a trained parameter that state_dict() leaves out, and for a buffer that cannot be loaded:
    workers that join would not get them, and a checkpoint not keep them.
    """
    state = model.state_dict()
    places = {value.data_ptr() for value in state.values() if isinstance(value, Tensor)}
    for name, p in model.named_parameters():
        if p.requires_grad and p.numel() and name not in state and p.data_ptr() not in places:
            raise ValueError(f"model.state_dict() leaves the trained {name} out: its hooks must keep what is trained")
    for name, buffer in model.named_buffers():
        if name in state and buffer.layout is torch.strided and each_element_once(buffer).numel() != buffer.numel():
            raise ValueError(f"buffer {name} is expanded, so nothing can be loaded into it: register a clone() of it")


def refuse_options(
    lr: float, betas: Sequence[float] = (), eps: float = 0.0, weight_decay: float = 0.0, **_: object
) -> None:
    """Raises ValueError for a negative lr, eps or weight_decay, or a beta outside [0, 1)."""
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if not value >= 0:
            raise ValueError(f"{name}={value!r}: must be 0 or more")
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas={betas!r}: each must be in [0, 1)")


def refuse_own_loop(session: Session, uses_scaler: bool) -> None:
    """Before an update. Raises RuntimeError if an elastic job has its own loop, and for torch's GradScaler where it
    would find another scale on each worker, or no gradients to look at.
    """
    if session.elastic and not session.in_training:
        raise RuntimeError(
            "this job is elastic: kf.fit or kf.DataLoader must drive its training loop, also one without a data set "
            "(docs/train.md, data made in the loop); or use a fixed number of workers (torchrun)"
        )
    if session.comm.sharded and uses_scaler:
        raise RuntimeError(
            "GradScaler with comm.state=sharded: it looks at p.grad, and no worker has a whole mean gradient. Use "
            "autocast with bfloat16, which needs no scaler, or comm.state=replicated"
        )
    if session.elastic and uses_scaler:
        raise RuntimeError(
            "GradScaler in a job whose workers may change: one that joins would scale its loss otherwise than the "
            "rest. Use autocast with bfloat16, which needs no scaler, or a fixed number of workers (torchrun)"
        )


def refuse_unplanned(session: Session, planned: bool) -> None:
    """Raises RuntimeError for a step that no training loop of kfuse has announced, where one is needed.

    An elastic job and all modes of `comm.sync` but ssgd need kf.fit or kf.DataLoader, audits need kf.fit.
    """
    if planned:
        return
    if session.comm.audit_every is not None:
        raise RuntimeError(
            f"comm.audit_every={session.comm.audit_every}: kf.fit must drive the training loop, as kfuse cannot run a "
            "micro-batch of yours again; pass audit_every=None"
        )
    if session.comm.sync != "ssgd":
        raise RuntimeError(
            f"comm.sync={session.comm.sync}: must be ssgd in a loop of your own, and for two passes over a step"
        )
    if session.elastic:
        raise RuntimeError(
            "opt.step() in an elastic job: its gradients must come from one pass over the step's micro-batches, which "
            "kf.DataLoader plans. For two passes (SAM) see docs/train.md; of several optimizers give kf.DataLoader a "
            "list, and a model with the parameters of all. Or use a fixed number of workers (torchrun)"
        )


def _message(what: str, how: str, inner: str) -> str:
    return f"{what} is {how}, which reduces gradients itself: give kfuse the inner model ({inner}) and do not wrap it"


_DDP = ("wrapped in DistributedDataParallel", "model.module")
_FSDP = ("sharded by FSDP", "as it was before; or train one of fully_shard by kfuse-run --ranks")


def uncompiled(model: nn.Module) -> nn.Module:
    """Returns what `torch.compile(model)` wraps, whose parameters' names have no prefix; any other model itself."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model
