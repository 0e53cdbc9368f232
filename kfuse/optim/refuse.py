"""What cannot be trained right is refused, with a remedy.

Models that another library wrapped to reduce or shard them itself, since both would do the same work. Loops of one's
own in a job whose workers may change, since a worker that joins would not know their state.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache

import torch
from torch import nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from kfuse.membership import Session

_OWN_LOOP = "this job is elastic: kf.fit or kf.DataLoader must drive its training loop"
_REMEDY = "give kfuse the inner model ({inner}) and do not wrap it"


def refuse_wrapped(model: nn.Module) -> None:
    """Raises TypeError if the model, or a module in it, is wrapped in DistributedDataParallel or sharded by FSDP."""
    for path, module in model.named_modules():
        name = ".".join(filter(None, ("model", path)))
        if issubclass(type(module), DistributedDataParallel):
            raise TypeError(_ddp_message(name))
        if issubclass(type(module), _fsdp_classes()):
            raise TypeError(_fsdp_message(name))


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
            raise TypeError(f"{name}: {_fsdp_message('its model')}")
        if isinstance(p, dtensor) or isinstance(p.data, dtensor):
            raise TypeError(
                f"{name} is a DTensor: kfuse trains whole parameters; give it the model without fully_shard, "
                "distribute_tensor or parallelize_module"
            )


def refuse_torchs_fused_sgd(optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError for torch's fused SGD over bf16 parameters on the CPU, where this torch does not train them.

    Up to torch 2.13 its kernel changes only the last few elements of a parameter (pytorch issue 191763,
    aten/src/ATen/native/cpu/FusedSGDKernel.cpp: the vectorised loop stores no parameter). So it is tried.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for index, group in enumerate(optimizer.param_groups):
        sixteen_bit = any(p.dtype == torch.bfloat16 and p.device.type == "cpu" for p in group["params"])
        if group.get("fused") and sixteen_bit and not _torchs_fused_sgd_works():
            raise ValueError(
                f"parameter group {index} has fused={group['fused']!r}: must be False, as the fused SGD of torch "
                f"{torch.__version__} leaves bf16 parameters on the CPU untrained; or use kf.FusedSGD"
            )


@cache
def _torchs_fused_sgd_works() -> bool:
    param = torch.nn.Parameter(torch.ones(256, dtype=torch.bfloat16))
    param.grad = torch.ones_like(param)
    torch.optim.SGD([param], lr=0.5, fused=True).step()
    return bool((param == 0.5).all())


def refuse_own_loop(session: Session, uses_scaler: bool) -> None:
    """Before an update. Raises RuntimeError if an elastic job has its own loop, or uses torch's GradScaler."""
    if session.elastic and session.view is None:
        raise RuntimeError(_OWN_LOOP)
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
            f"comm.sync={session.comm.sync}: must be ssgd in a loop of your own, not kf.fit or kf.DataLoader"
        )
    if session.elastic and not session.in_training:
        raise RuntimeError(f"{_OWN_LOOP}; or start a fixed number of workers (torchrun)")
    if session.elastic:
        raise RuntimeError(
            "workers of this job may join and leave, and only the model and optimizer given to kf.fit or "
            "kf.DataLoader go along: use one optimizer, with a parameter group for each model, or a fixed number "
            "of workers (torchrun)"
        )


def refuse_scaled_local_step() -> None:
    """Raises RuntimeError for torch's GradScaler in a step in which each worker updates with its own gradients.

    Each worker's scaler would find a scale of its own; the workers' gradients could not be added up any more.
    """
    raise RuntimeError(
        "GradScaler with comm.sync: must be ssgd, as in the other modes each worker would find another scale; autocast "
        "with bfloat16 needs no scaler"
    )


def _fsdp_classes() -> tuple[type, ...]:
    """None where FSDP was not imported: then no model is sharded."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    names = ("FullyShardedDataParallel", "FSDPModule")
    return tuple(getattr(fsdp, name) for name in names if hasattr(fsdp, name))


def _ddp_message(what: str) -> str:
    remedy = _REMEDY.format(inner="model.module")
    return f"{what} is wrapped in DistributedDataParallel, which reduces gradients itself: {remedy}"


def _fsdp_message(what: str) -> str:
    remedy = _REMEDY.format(inner="as it was before FSDP or fully_shard")
    return f"{what} is sharded by FSDP, which reduces gradients itself: {remedy}"
