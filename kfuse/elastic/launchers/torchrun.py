"""Workers that torchrun has started, a fixed number of them: this process is one."""

from __future__ import annotations

from kfuse.elastic.rendezvous import Rendezvous


class TorchrunLauncher:
    """Starts nothing: says where the workers meet, and how many they are."""

    def __init__(self) -> None:
        """Raises ValueError where torchrun did not start this process."""
        meeting = Rendezvous.of_environment()
        if meeting is None:
            raise ValueError(
                "launcher=torchrun: torchrun did not start this process; start it by "
                "torchrun --nproc-per-node N -m kfuse launcher=torchrun ..."
            )
        self.meeting = meeting
        self.workers = meeting.size
