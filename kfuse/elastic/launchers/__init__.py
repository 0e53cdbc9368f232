"""How workers are started. A launcher starts one process at a time; the supervisor decides when."""

from kfuse.elastic.launchers.base import Launcher, WorkerProcess
from kfuse.elastic.launchers.local import LocalLauncher

__all__ = ["Launcher", "LocalLauncher", "WorkerProcess"]
