"""Policies adapt training while it runs. They see `Signals` only: no communication, no I/O."""

import importlib
from typing import TYPE_CHECKING, Any

from kfuse.policies.signals import BasePolicy as BasePolicy
from kfuse.policies.signals import NoPolicy as NoPolicy

if TYPE_CHECKING:
    from kfuse.policies.autoscale import AutoscalePolicy as AutoscalePolicy
    from kfuse.policies.compose import ComposePolicy as ComposePolicy
    from kfuse.policies.goodput import GoodputPolicy as GoodputPolicy
    from kfuse.policies.noise import CriticalBatchPolicy as CriticalBatchPolicy
    from kfuse.policies.noise import GNSPolicy as GNSPolicy
    from kfuse.policies.noise import NormTestPolicy as NormTestPolicy
    from kfuse.policies.noise_interval import NoisePolicy as NoisePolicy
    from kfuse.policies.phases import SchedulePolicy as SchedulePolicy
    from kfuse.policies.phases import SyncSwitchPolicy as SyncSwitchPolicy
    from kfuse.policies.rates import SeesawPolicy as SeesawPolicy

_OF_MODULES = {
    "autoscale": "AutoscalePolicy",
    "compose": "ComposePolicy",
    "goodput": "GoodputPolicy",
    "noise": "CriticalBatchPolicy GNSPolicy NormTestPolicy",
    "noise_interval": "NoisePolicy",
    "phases": "SchedulePolicy SyncSwitchPolicy",
    "rates": "SeesawPolicy",
}
_MODULES = {name: module for module, names in _OF_MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Imports a policy when it is first used: a training has one at most."""
    if name in _MODULES:
        return getattr(importlib.import_module(f"kfuse.policies.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'kfuse.policies' has no attribute {name!r}")
