"""Policies of jobs that something happens to: `policy._target_=failing.Failing`."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import kfuse as kf


class Failing(kf.BasePolicy):
    """Raises an error in `where` at steps 5 to `last`, on rank `rank` alone, or on all (-1).

    Its hooks have collectives before and after that place.
    """

    def __init__(self, where: str, last: int = 5, rank: int = -1) -> None:
        self._where, self._last, self._rank = where, last, rank
        self.step = -1

    def _strikes(self, where: str, now: bool) -> None:
        if where == self._where and now and self._rank in (-1, kf.rank()):
            raise KeyError(f"struck in {where}")

    @property
    def _now(self) -> bool:
        return 5 <= self.step <= self._last

    def before_step(self) -> None:
        self.step += 1
        assert kf.allreduce(1.0) == kf.size()

    def after_step(self) -> None:
        kf.barrier()
        self._strikes("after_step", self._now)
        assert kf.allreduce(1.0) == kf.size()

    def decide(self, signals: kf.Signals) -> kf.Decision | None:
        self._strikes("decide", self._now)
        return None

    def state_dict(self) -> dict[str, Any]:
        self._strikes("first state_dict", True)
        self._strikes("state_dict", self._now)
        return super().state_dict()


class EpochCollective(kf.BasePolicy):
    """Exchanges a value after each epoch; rank 1 is lost in it, after the second epoch."""

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


class TwoWorkers(kf.BasePolicy):
    """Asks for two workers once, before the first step."""

    def initial(self) -> kf.Decision:
        return kf.Decision(workers=2)

    def after_step(self) -> None:
        if kf.size() == 1:
            time.sleep(0.1)  # the second one is started meanwhile
