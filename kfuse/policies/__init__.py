"""Policies adapt training while it runs. They see `Signals` only: no communication, no I/O."""

import importlib
from typing import TYPE_CHECKING, Any

from kfuse.policies.signals import BasePolicy as BasePolicy
from kfuse.policies.signals import NoPolicy as NoPolicy

if TYPE_CHECKING:
    from kfuse.policies.autoscale import AutoscalePolicy as AutoscalePolicy
    from kfuse.policies.compose import ComposePolicy as ComposePolicy
    from kfuse.policies.critical_batch import CriticalBatchPolicy as CriticalBatchPolicy
    from kfuse.policies.curvature import CurvaturePolicy as CurvaturePolicy
    from kfuse.policies.gns import GNSPolicy as GNSPolicy
    from kfuse.policies.goodput import GoodputPolicy as GoodputPolicy
    from kfuse.policies.norm_test import NormTestPolicy as NormTestPolicy
    from kfuse.policies.phases import SchedulePolicy as SchedulePolicy
    from kfuse.policies.seesaw import SeesawPolicy as SeesawPolicy
    from kfuse.policies.sync_switch import SyncSwitchPolicy as SyncSwitchPolicy

_MODULES = {
    "AutoscalePolicy": "autoscale",
    "ComposePolicy": "compose",
    "CriticalBatchPolicy": "critical_batch",
    "CurvaturePolicy": "curvature",
    "GNSPolicy": "gns",
    "GoodputPolicy": "goodput",
    "NormTestPolicy": "norm_test",
    "SchedulePolicy": "phases",
    "SeesawPolicy": "seesaw",
    "SyncSwitchPolicy": "sync_switch",
}


def __getattr__(name: str) -> Any:
    """Imports a policy when it is first used: a training has one at most."""
    if name in _MODULES:
        return getattr(importlib.import_module(f"kfuse.policies.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'kfuse.policies' has no attribute {name!r}")
