"""A policy with a bug, for tests: `policy._target_=failing.Failing`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import kfuse as kf


class Failing(kf.BasePolicy):
    """Raises an error in `where` at steps `first` to `last` and `again`, on rank `rank` alone, or on all (-1).

    Its hooks have collectives before and after that place.
    batch: asked for at every step, if it is not 0.
    how: "raise"; "exit", "interrupt": SystemExit(0), KeyboardInterrupt instead; "leave": a hook returns instead, and
    its further collectives are left out; "hide": the hook catches all errors of its collectives; "hang".
    """

    def __init__(
        self,
        where: str,
        first: int = 5,
        last: int = 5,
        rank: int = -1,
        batch: int = 0,
        how: str = "raise",
        again: int = -1,
    ) -> None:
        self._where, self._steps, self._rank = where, {*range(first, last + 1), again}, rank
        self._batch, self._how = batch, how
        self.step = -1
        self.sums = 0

    def _strikes(self, where: str) -> bool:
        strikes = where == self._where and self.step in self._steps and self._rank in (-1, kf.rank())
        if strikes and self._how == "hang":
            time.sleep(1000)
        if strikes and self._how != "leave":
            self._raise(where)
        return strikes

    def _raise(self, where: str) -> None:
        kinds = {"exit": SystemExit(0), "interrupt": KeyboardInterrupt()}
        raise kinds.get(self._how, KeyError(f"struck in {where}"))

    def _sum(self) -> None:
        try:
            assert kf.allreduce(1.0) == kf.size()
            self.sums += 1
        except Exception:
            if self._how != "hide":
                raise

    def initial(self) -> kf.Decision | None:
        if self._where == "initial":
            self._raise("initial")
        return None

    def before_train(self) -> None:
        if self._where == "before_train":
            self._raise("before_train")

    def before_step(self) -> None:
        self.step += 1
        if not self._strikes("before_step"):
            self._sum()

    def after_step(self) -> None:
        kf.barrier()
        if not self._strikes("after_step"):
            self._sum()
            self._sum()

    def decide(self, signals: kf.Signals) -> kf.Decision | None:
        self._strikes("decide")
        return kf.Decision(batch_size=self._batch) if self._batch else None

    def after_train(self) -> None:
        self._strikes("after_train")

    def state_dict(self) -> dict[str, Any]:
        if self._where == "first state_dict":
            self._raise("state_dict")
        self._strikes("state_dict")
        return super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._where == "load_state_dict":
            self._raise("load_state_dict")
        super().load_state_dict(state)
