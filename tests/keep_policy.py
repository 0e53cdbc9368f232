"""Workers that are lost, as `chaos.Chaos` has it, in one attempt at a step; and a count of the micro-batches begun.

An event may have `attempt`: at the step that it strikes in; 0 is the first one. And `others`: it strikes only after
the other workers have ended so many micro-batches of the step; or `together`: once so many workers are about to. So
the order does not depend on the machine's load.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chaos import Chaos


class Counting(Chaos):
    """Appends each micro-batch that a worker begins or ends, and each step of rank 0, to files in its directory."""

    _attempt = 0
    _last = -1

    def _armed(self, event: Mapping[str, Any]) -> bool:
        return super()._armed(event) and event.get("attempt", self._attempt) == self._attempt

    def _strike(self, index: int, event: Mapping[str, Any], rank: int | None) -> None:
        if not self._mark(index).exists():
            self._append("striking", {"step": self._last})
            self._await_lines("ended", event.get("others", 0))
            self._await_lines("striking", event.get("together", 1) - 1)
        super()._strike(index, event, rank)

    def _await_lines(self, name: str, count: int) -> None:
        """Waits until the other workers have written so many lines about the step under way."""
        deadline = time.monotonic() + 60
        while (found := self._lines_of_others(name)) < count:
            assert time.monotonic() < deadline, (
                f"{name}, step {self._last}: {found} lines of other workers, not {count}"
            )
            time.sleep(0.002)

    def _lines_of_others(self, name: str) -> int:
        file = self._directory / name
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return sum(line["step"] == self._last and line["pid"] != os.getpid() for line in lines)

    def after_step(self) -> None:
        from kfuse import rank

        if rank() == 0:
            self._append("ends", {"step": self._step, "time": time.time()})
        super().after_step()

    def _append(self, name: str, line: dict[str, Any]) -> None:
        with (self._directory / name).open("a") as file:
            file.write(json.dumps({"pid": os.getpid(), **line}) + "\n")

    def _patch(self) -> None:
        super()._patch()
        from kfuse.comm.engine import Engine
        from kfuse.comm.plan import MicroBatch

        begin, enter, leave = Engine.begin, MicroBatch.__enter__, MicroBatch.__exit__

        def patched_begin(engine: Any, plan: Any) -> None:
            self._attempt = self._attempt + 1 if engine.step == self._last else 0
            self._last = engine.step
            begin(engine, plan)

        def patched_enter(micro_batch: Any) -> Any:
            self._append("begun", {"step": self._last})
            return enter(micro_batch)

        def patched_exit(micro_batch: Any, *raised: Any) -> None:
            if raised[0] is None:  # its gradients are in the sums; the last one then waits for the others
                self._append("ended", {"step": self._last})
            leave(micro_batch, *raised)

        Engine.begin, MicroBatch.__enter__ = patched_begin, patched_enter  # type: ignore[method-assign]
        MicroBatch.__exit__ = patched_exit  # type: ignore[method-assign]


def begun(directory: Path) -> Counter[int]:
    """By step, how many micro-batches were begun, over all workers."""
    return Counter(json.loads(line)["step"] for line in (directory / "begun").read_text().splitlines())
