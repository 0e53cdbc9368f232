"""kfuse: adaptive data-parallel training for PyTorch.

The gradient reduction itself yields the gradient noise scale and variance; policies act on them while training runs.

    import kfuse as kf

    opt = kf.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    kf.fit(model, data, opt, kf.GNSPolicy())
"""

import importlib
from typing import TYPE_CHECKING, Any

from kfuse.version import __version__ as __version__

if TYPE_CHECKING:
    from kfuse import nn as nn
    from kfuse.api import *  # noqa: F403
    from kfuse.comm.group import CommError as CommError
    from kfuse.comm.settings import CommOptions as CommOptions
    from kfuse.integrations.backward import monitor as monitor
    from kfuse.integrations.ddp import ddp_hook as ddp_hook
    from kfuse.integrations.fsdp import fsdp_monitor as fsdp_monitor
    from kfuse.integrations.growth import growth as growth
    from kfuse.integrations.log import log_to as log_to
    from kfuse.membership import Session as Session
    from kfuse.optim import ConsistencyError as ConsistencyError
    from kfuse.optim import Optimizer as Optimizer
    from kfuse.optim.carried import CarriedState as CarriedState
    from kfuse.optim.fused import FusedAdamW as FusedAdamW
    from kfuse.optim.fused import FusedLAMB as FusedLAMB
    from kfuse.optim.fused import FusedSGD as FusedSGD
    from kfuse.optim.muon import FusedMuon as FusedMuon
    from kfuse.policies import GNSPolicy as GNSPolicy
    from kfuse.policies import SchedulePolicy as SchedulePolicy
    from kfuse.policies.signals import BasePolicy as BasePolicy
    from kfuse.policies.signals import Bounds as Bounds
    from kfuse.policies.signals import Decision as Decision
    from kfuse.policies.signals import NoPolicy as NoPolicy
    from kfuse.policies.signals import Signals as Signals
    from kfuse.session import init as init
    from kfuse.statistics.step_stats import StepStats as StepStats
    from kfuse.tools.cbs.in_script import critical_batch as critical_batch
    from kfuse.train.fit import DataLoader as DataLoader
    from kfuse.train.fit import Hook as Hook
    from kfuse.train.fit import fit as fit

# The public names by module: each is imported, and torch with it, when it is first used.
_PUBLIC = {
    "kfuse.api": (
        "allgather allreduce barrier broadcast grad_noise_scale grad_norm grad_variance load_state_dict local_rank "
        "log peer_latencies rank resize set_batch_size set_lr set_sync set_topology set_tree size state_dict"
    ),
    "kfuse.comm.group": "CommError",
    "kfuse.comm.settings": "CommOptions",
    "kfuse.integrations.ddp": "ddp_hook",
    "kfuse.integrations.fsdp": "fsdp_monitor",
    "kfuse.integrations.growth": "growth",
    "kfuse.integrations.log": "log_to",
    "kfuse.integrations.backward": "monitor",
    "kfuse.membership": "Session",
    "kfuse.optim": "ConsistencyError Optimizer",
    "kfuse.optim.carried": "CarriedState",
    "kfuse.optim.fused": "FusedAdamW FusedLAMB FusedSGD",
    "kfuse.optim.muon": "FusedMuon",
    "kfuse.policies": "GNSPolicy SchedulePolicy",
    "kfuse.policies.signals": "BasePolicy Bounds Decision NoPolicy Signals",
    "kfuse.session": "init",
    "kfuse.statistics.step_stats": "StepStats",
    "kfuse.tools.cbs.in_script": "critical_batch",
    "kfuse.train.fit": "DataLoader Hook fit",
}
_MODULES = {name: module for module, names in _PUBLIC.items() for name in names.split()}

__all__ = sorted(["__version__", "nn", *_MODULES])


def __getattr__(name: str) -> Any:
    if name == "nn":
        return importlib.import_module("kfuse.nn")
    if name not in _MODULES:
        raise AttributeError(f"module 'kfuse' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__
