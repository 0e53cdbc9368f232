"""Workers that torchrun has started, a fixed number of them: this process is one."""

from __future__ import annotations

import os

from kfuse.comm import devices
from kfuse.elastic.rendezvous import Rendezvous


class TorchrunLauncher:
    """Starts nothing: finds the rendezvous in the environment, and the number of workers."""

    def __init__(self) -> None:
        """Raises ValueError where torchrun did not start this process, or more workers here than there are GPUs."""
        rendezvous = Rendezvous.of_environment()
        if rendezvous is None:
            raise ValueError(
                "launcher=torchrun: torchrun did not start this process; start it by "
                "torchrun --nproc-per-node N -m kfuse launcher=torchrun ..."
            )
        here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), devices.count()
        if 0 < gpus < here:
            raise ValueError(
                f"launcher=torchrun: --nproc-per-node is {here}: must be at most {gpus}, the number of GPUs that this "
                "process sees, as each worker needs one of its own"
            )
        self.rendezvous = rendezvous
        self.workers = rendezvous.size
