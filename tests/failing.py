"""A policy with a bug, for tests: `policy._target_=failing.Failing`."""

from __future__ import annotations

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
