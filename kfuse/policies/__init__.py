"""Rules that adapt training while it runs. They import signals only: no communication, no I/O."""

from kfuse.policies.gns import GNSPolicy
from kfuse.policies.schedule import SchedulePolicy
from kfuse.policies.signals import BasePolicy, NoPolicy

__all__ = ["BasePolicy", "GNSPolicy", "NoPolicy", "SchedulePolicy"]
