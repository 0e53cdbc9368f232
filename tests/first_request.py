"""A policy that asks for two workers once, before the first step."""

from __future__ import annotations

import time

import kfuse as kf


class TwoWorkers(kf.BasePolicy):
    def initial(self) -> kf.Decision:
        return kf.Decision(workers=2)

    def after_step(self) -> None:
        if kf.size() == 1:
            time.sleep(0.1)  # the second one is started meanwhile
