"""How workers are started. A launcher starts one process at a time; the supervisor decides when."""

from kfuse.elastic.launchers.base import Launcher, WorkerProcess
from kfuse.elastic.launchers.hosts import HostsLauncher
from kfuse.elastic.launchers.local import LocalLauncher
from kfuse.elastic.launchers.ray import RayLauncher
from kfuse.elastic.rendezvous import TorchrunLauncher

__all__ = ["HostsLauncher", "Launcher", "LocalLauncher", "RayLauncher", "TorchrunLauncher", "WorkerProcess"]
