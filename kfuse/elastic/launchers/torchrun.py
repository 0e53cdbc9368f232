"""The workers that torchrun has started, for the command line."""

from __future__ import annotations


class TorchrunLauncher:
    """Starts nothing: torchrun has started the workers, a fixed number of them, and this process is one."""

    def __init__(self) -> None:
        """Raises ValueError where torchrun did not start this process."""
        from kfuse.comm import devices  # these import torch, which a supervisor mostly needs late or never
        from kfuse.elastic.rendezvous import Rendezvous

        if (rendezvous := Rendezvous.of_environment()) is None:
            raise ValueError("torchrun did not start this process: torchrun ... -m kfuse launcher=torchrun ...")
        self.rendezvous = rendezvous
        self.gpus = rendezvous.size if devices.count() else 0  # each worker has one
