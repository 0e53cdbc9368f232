"""kfuse: adaptive data-parallel training for PyTorch.

The gradient reduction itself yields the gradient noise scale and variance; policies act on them while training runs.

    import kfuse as kf

    opt = kf.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    kf.fit(model, data, opt, kf.Hook(kf.GNSPolicy()))
"""

import importlib
from typing import TYPE_CHECKING, Any

from kfuse import interrupt
from kfuse.version import __version__

interrupt.begin_command()

if TYPE_CHECKING:
    from kfuse import nn
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
    from kfuse.integrations.ddp import ddp_hook
    from kfuse.integrations.fsdp import fsdp_monitor
    from kfuse.integrations.log import log_to
    from kfuse.integrations.plain import monitor
    from kfuse.membership import Session
    from kfuse.optim import ConsistencyError, FusedAdamW, FusedLAMB, FusedSGD, Optimizer
    from kfuse.policies import GNSPolicy, SchedulePolicy
    from kfuse.policies.signals import BasePolicy, Bounds, Decision, NoPolicy, Signals
    from kfuse.session import init
    from kfuse.statistics.step_stats import StepStats
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

_ELSEWHERE = {
    "kfuse.comm.group": "CommError",
    "kfuse.comm.options": "CommOptions",
    "kfuse.integrations.ddp": "ddp_hook",
    "kfuse.integrations.fsdp": "fsdp_monitor",
    "kfuse.integrations.log": "log_to",
    "kfuse.integrations.plain": "monitor",
    "kfuse.membership": "Session",
    "kfuse.optim": "ConsistencyError FusedAdamW FusedLAMB FusedSGD Optimizer",
    "kfuse.policies": "GNSPolicy SchedulePolicy",
    "kfuse.policies.signals": "BasePolicy Bounds Decision NoPolicy Signals",
    "kfuse.session": "init",
    "kfuse.statistics.step_stats": "StepStats",
    "kfuse.tools.cbs.in_script": "critical_batch",
    "kfuse.train.fit": "DataLoader Hook fit",
}
"""The public names by module; the others are functions of kfuse.api."""
_MODULES = {name: module for module, names in _ELSEWHERE.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Imports a public name, and torch with it, when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module 'kfuse' has no attribute {name!r}")
    if name == "nn":
        return importlib.import_module("kfuse.nn")
    value = globals()[name] = getattr(importlib.import_module(_MODULES.get(name, "kfuse.api")), name)
    return value


def __dir__() -> list[str]:
    """Returns the public names."""
    return __all__
