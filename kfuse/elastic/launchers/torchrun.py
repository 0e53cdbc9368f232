"""Workers that torchrun has started, a fixed number of them: this process is one."""

from __future__ import annotations

from kfuse.elastic.rendezvous import Rendezvous


class TorchrunLauncher:
    """Starts nothing: finds the rendezvous in the environment, and the number of workers."""

    def __init__(self) -> None:
        """Raises ValueError where torchrun did not start this process."""
        rendezvous = Rendezvous.of_environment()
        if rendezvous is None:
            raise ValueError(
                "launcher=torchrun: torchrun did not start this process; start it by "
                "torchrun --nproc-per-node N -m kfuse launcher=torchrun ..."
            )
        self.rendezvous = rendezvous
        self.workers = rendezvous.size
