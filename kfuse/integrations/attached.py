"""What the integrations of training frameworks share: the monitor for the model they train, and what they log of it."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from kfuse.integrations.backward import monitor
from kfuse.integrations.ddp import ddp_hook
from kfuse.integrations.measure import Monitor

LOGGED = ("noise_scale", "noise_scale_low", "noise_scale_high")


def monitor_of(who: str, model: nn.Module, scaler: torch.amp.GradScaler | None) -> Monitor:
    """Returns a monitor of the model as the framework trains it. who: for messages.

    Raises TypeError for what no monitor measures.
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    if isinstance(model, DistributedDataParallel):
        return ddp_hook(model, scaler=scaler)
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(model, fsdp.FSDPModule):
        from kfuse.integrations.fsdp import fsdp_monitor

        return fsdp_monitor(model, scaler=scaler)
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if several or isinstance(model, DataParallel):
        raise TypeError(
            f"{who}: the model is trained as a {type(model).__name__}: must be in DistributedDataParallel, or sharded "
            "by FSDP2, where there are several processes or devices"
        )
    return monitor(model, scaler=scaler)


def figures(monitor: Monitor) -> dict[str, float]:
    """Returns the known ones of LOGGED, in samples (in tokens where these weight the loss). Waits for the device."""
    stats = monitor.stats
    values = {} if stats is None else {name: getattr(stats, name) for name in LOGGED}
    return {name: value for name, value in values.items() if value is not None}
