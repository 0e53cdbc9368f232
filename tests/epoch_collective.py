"""A policy whose `after_epoch` exchanges a value; rank 1 is lost in it, after the second epoch."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import kfuse as kf


class EpochCollective(kf.BasePolicy):
    def __init__(self, directory: str) -> None:
        self._file = Path(directory, "completed.jsonl")
        self.epoch = 0

    def after_epoch(self) -> None:
        if self.epoch == 1 and kf.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        kf.allreduce(1.0)
        if kf.rank() == 0:
            with self._file.open("a") as file:
                file.write(json.dumps({"epoch": self.epoch}) + "\n")
        self.epoch += 1
