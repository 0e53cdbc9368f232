"""For tests of `kfuse replay`: `policy._target_=witness.Witness` keeps the signals that workers had."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kfuse.elastic import protocol
from kfuse.policies import GNSPolicy, SchedulePolicy
from kfuse.policies.signals import BasePolicy, Decision, Signals


class Witness(BasePolicy):
    """Batch size and workers by the noise scale, or by `phases`. Each worker writes its signals to `directory`.

    pace_s: a step takes at least this long, so that a test can act while training runs; alone_s: with one worker.
    """

    def __init__(
        self,
        directory: str,
        phases: Sequence[Mapping[str, Any]] | None = None,
        every: int = 5,
        pace_s: float = 0.0,
        alone_s: float = 0.0,
    ) -> None:
        self._file = Path(directory, f"{os.getpid()}.signals") if protocol.ENV_WORKER in os.environ else None
        self._rule: BasePolicy = GNSPolicy(every=every, allow_shrink=True) if phases is None else SchedulePolicy(phases)
        self._pace_s, self._alone_s = pace_s, max(pace_s, alone_s)

    def initial(self) -> Decision | None:
        return self._rule.initial()

    def decide(self, signals: Signals) -> Decision | None:
        if self._file is not None:  # a worker, and no replay
            time.sleep(self._alone_s if signals.workers == 1 else self._pace_s)
            with self._file.open("ab") as file:
                pickle.dump(signals, file)
        return self._rule.decide(signals)

    def state_dict(self) -> dict[str, Any]:
        return self._rule.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rule.load_state_dict(state)


def seen(directory: Path) -> list[Signals]:
    """All signals that all workers had."""
    found = []
    for path in directory.glob("*.signals"):
        with path.open("rb") as file:
            while file.peek(1):
                found.append(pickle.load(file))
    return found
