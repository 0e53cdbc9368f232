"""What the integrations of training frameworks share: the monitor for the model they train, and what they log of it."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from kfuse.integrations.backward import OneProcess, monitor
from kfuse.integrations.ddp import ddp_hook
from kfuse.integrations.measure import Monitor, Options
from kfuse.optim import DistributedOptimizer
from kfuse.optim.refuse import uncompiled

TOKENS = (
    "{call}: this trainer counts tokens, and kfuse must be told whether the model divides its loss by them: must be "
    "{call}(trainer, tokens=True) for a causal language model such as Llama, tokens=False where a micro-batch's loss "
    "is a mean (classification, BERT, T5, ...)"
)
LOGGED = ("noise_scale", "noise_scale_low", "noise_scale_high")


def monitor_of(who: str, model: nn.Module, scaler: torch.amp.GradScaler | None) -> Monitor:
    """Returns a monitor of the model as the framework trains it. who: for messages.

    Raises TypeError for what no monitor measures.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(model, fsdp.FSDPModule):
        from kfuse.integrations.fsdp import fsdp_monitor

        return fsdp_monitor(model, scaler=scaler)
    model = uncompiled(model)
    if isinstance(model, DistributedDataParallel):
        if dist.get_world_size(model.process_group) == 1:  # Accelerate then has no no_sync: each backward is reduced
            return OneProcess(model, Options(None, 1, scaler, "train")).monitor
        return ddp_hook(model, scaler=scaler)
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    others = (DataParallel,) if fsdp is None else (DataParallel, fsdp.FullyShardedDataParallel)
    if several or isinstance(model, others) or type(model).__module__.startswith("deepspeed"):
        raise TypeError(
            f"{who}: the model is trained as a {type(model).__name__}: must be on one device, in "
            "DistributedDataParallel, or sharded by FSDP2"
        )
    return monitor(model, scaler=scaler)


def figures(of: Monitor | DistributedOptimizer, unit: str = "") -> dict[str, float]:
    """Returns those of LOGGED that are known. Waits for the device. unit: is added to the names; "": samples."""
    stats = of.stats
    values = {name + unit: getattr(stats, name, None) for name in LOGGED}
    return {name: value for name, value in values.items() if value is not None}
