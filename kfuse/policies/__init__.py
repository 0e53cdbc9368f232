"""Policies adapt training while it runs. They see `Signals` only: no communication, no I/O."""

import importlib
from typing import TYPE_CHECKING, Any

from kfuse.policies.signals import BasePolicy, NoPolicy

if TYPE_CHECKING:
    from kfuse.policies.autoscale import AutoscalePolicy
    from kfuse.policies.compose import ComposePolicy
    from kfuse.policies.critical_batch import CriticalBatchPolicy
    from kfuse.policies.curvature import CurvaturePolicy
    from kfuse.policies.gns import GNSPolicy
    from kfuse.policies.goodput import GoodputPolicy
    from kfuse.policies.norm_test import NormTestPolicy
    from kfuse.policies.phases import SchedulePolicy
    from kfuse.policies.seesaw import SeesawPolicy
    from kfuse.policies.sync_switch import SyncSwitchPolicy

__all__ = [
    "AutoscalePolicy",
    "BasePolicy",
    "ComposePolicy",
    "CriticalBatchPolicy",
    "CurvaturePolicy",
    "GNSPolicy",
    "GoodputPolicy",
    "NoPolicy",
    "NormTestPolicy",
    "SchedulePolicy",
    "SeesawPolicy",
    "SyncSwitchPolicy",
]

_LAZY = {
    "AutoscalePolicy": "kfuse.policies.autoscale",
    "ComposePolicy": "kfuse.policies.compose",
    "CriticalBatchPolicy": "kfuse.policies.critical_batch",
    "CurvaturePolicy": "kfuse.policies.curvature",
    "GNSPolicy": "kfuse.policies.gns",
    "GoodputPolicy": "kfuse.policies.goodput",
    "NormTestPolicy": "kfuse.policies.norm_test",
    "SchedulePolicy": "kfuse.policies.phases",
    "SeesawPolicy": "kfuse.policies.seesaw",
    "SyncSwitchPolicy": "kfuse.policies.sync_switch",
}


def __getattr__(name: str) -> Any:
    """A policy is imported when it is first used: a training has one at most."""
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'kfuse.policies' has no attribute {name!r}")
