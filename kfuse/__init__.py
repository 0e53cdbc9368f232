"""kfuse: adaptive data-parallel training for PyTorch.

The gradient reduction itself yields the gradient noise scale and variance; policies act on them while training runs.

    import kfuse as kf

    opt = kf.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    kf.fit(model, data, opt, kf.Hook(kf.GNSPolicy()))
"""

from kfuse import interrupt

interrupt.exit_quietly()  # before torch is imported, which takes long
interrupt.pause_collection()

import importlib
from typing import TYPE_CHECKING, Any

from kfuse.api import (
    allgather,
    allreduce,
    barrier,
    broadcast,
    grad_noise_scale,
    grad_norm,
    grad_variance,
    load_state_dict,
    local_rank,
    peer_latencies,
    rank,
    resize,
    set_batch_size,
    set_lr,
    set_sync,
    set_topology,
    set_tree,
    size,
    state_dict,
)
from kfuse.comm.group import CommError
from kfuse.comm.options import CommOptions
from kfuse.membership import Session
from kfuse.optim import ConsistencyError, FusedAdamW, FusedLAMB, FusedSGD, Optimizer
from kfuse.policies.signals import BasePolicy, Bounds, Decision, NoPolicy, Signals
from kfuse.session import init
from kfuse.statistics.step_stats import StepStats
from kfuse.version import __version__

interrupt.resume_collection()

if TYPE_CHECKING:
    from kfuse import nn
    from kfuse.integrations.ddp import ddp_hook
    from kfuse.integrations.fsdp import fsdp_monitor
    from kfuse.integrations.log import log_to
    from kfuse.integrations.plain import monitor
    from kfuse.policies import GNSPolicy, SchedulePolicy
    from kfuse.tools.cbs.in_script import critical_batch
    from kfuse.train.fit import DataLoader, Hook, fit

__all__ = [
    "BasePolicy",
    "Bounds",
    "CommError",
    "CommOptions",
    "ConsistencyError",
    "DataLoader",
    "Decision",
    "FusedAdamW",
    "FusedLAMB",
    "FusedSGD",
    "GNSPolicy",
    "Hook",
    "NoPolicy",
    "Optimizer",
    "SchedulePolicy",
    "Session",
    "Signals",
    "StepStats",
    "__version__",
    "allgather",
    "allreduce",
    "barrier",
    "broadcast",
    "critical_batch",
    "ddp_hook",
    "fit",
    "fsdp_monitor",
    "grad_noise_scale",
    "grad_norm",
    "grad_variance",
    "init",
    "load_state_dict",
    "local_rank",
    "log_to",
    "monitor",
    "nn",
    "peer_latencies",
    "rank",
    "resize",
    "set_batch_size",
    "set_lr",
    "set_sync",
    "set_topology",
    "set_tree",
    "size",
    "state_dict",
]


_LAZY = {
    "DataLoader": "kfuse.train.fit",
    "GNSPolicy": "kfuse.policies.gns",
    "Hook": "kfuse.train.fit",
    "SchedulePolicy": "kfuse.policies.phases",
    "critical_batch": "kfuse.tools.cbs.in_script",
    "ddp_hook": "kfuse.integrations.ddp",
    "fit": "kfuse.train.fit",
    "fsdp_monitor": "kfuse.integrations.fsdp",
    "log_to": "kfuse.integrations.log",
    "monitor": "kfuse.integrations.plain",
}


def __getattr__(name: str) -> Any:
    """The training loop, policies, monitors and `kf.nn` are imported when they are first used."""
    if name == "nn":
        return importlib.import_module("kfuse.nn")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'kfuse' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, those that are imported when used too."""
    return __all__
