"""Builds the records of a run (metrics, events, ledger, summary) and sends them to the process that keeps them."""

from __future__ import annotations

from collections import deque
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from kfuse.elastic.protocol import View
from kfuse.session import Session
from kfuse.statistics.figures import METRICS, StepContext
from kfuse.statistics.step_stats import StepStats
from kfuse.train.settings import Settings
from kfuse.train.step import StepSamples

if TYPE_CHECKING:
    from kfuse.train.output import Output

_OF_CONTEXT = {each.name for each in fields(StepContext)}
_RECENT_STEPS = 128


class Reporter:
    """Every worker calls it in the same way; only rank 0's records are sent."""

    def __init__(
        self, session: Session, settings: Settings, samples_an_epoch: int | None, output: Output | None = None
    ) -> None:
        """samples_an_epoch: None for a stream, which has no epochs.

        output: of a script, whose own files and display get the records too.
        """
        self._session, self._settings, self._samples_an_epoch = session, settings, samples_an_epoch
        self._keeper = output or session
        self.recent: deque[list[tuple[str, dict[str, Any]]]] = deque(maxlen=_RECENT_STEPS)
        """The newest records, which a lost leader or supervisor may not have written: see `resend`."""

    def state_dict(self) -> dict[str, Any]:
        """The newest records, for the next leader."""
        return {"recent": list(self.recent)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over another worker's records."""
        self.recent.clear()
        self.recent.extend(state["recent"])

    def _send(self, kind: str, data: dict[str, Any]) -> None:
        if self._session.group.rank == 0:
            self._keeper.report(kind, data)

    def event(self, step: int, kind: str, **fields: Any) -> None:
        """A line of events.jsonl: something that happened at this step."""
        data = {"step": step, "kind": kind, **fields}
        self.recent.append([("event", data)])
        self._send("event", data)

    def loader_lost(self, step: int, pid: int, how: str) -> None:
        """A loader process of this worker ended unexpectedly; any worker's is reported, not rank 0's alone."""
        worker = self._session.workers[self._session.group.rank]
        data = {"step": step, "kind": "loader_lost", "worker": worker, "pid": pid, "how": how}
        self._keeper.report("event", data)

    def start(self, step: int, restarts: bool) -> None:
        """Training begins at `step` (above 0: from a checkpoint); sends its planned length in samples and steps.

        restarts: started anew, it would go on from its own checkpoints.
        """
        epochs = self._settings.epochs
        total = None if epochs is None or self._samples_an_epoch is None else epochs * self._samples_an_epoch
        length = {"samples": total, "steps": self._settings.steps}
        self._send("start", {**length, "step": step, "training": self._session.training, "restarts": restarts})

    def view(self, step: int, view: View, regroup_s: float, transfer_s: float) -> None:
        """A new view is active. regroup_s, transfer_s: seconds for forming the group, for sending the state."""
        data = {
            "step": step,
            "kind": "view",
            "generation": view.generation,
            "workers": [{"rank": r, "pid": m.pid, "host": m.host} for r, m in enumerate(view.members)],
            "reason": view.reason,
            "pause_s": regroup_s + transfer_s,
            "regroup_s": regroup_s,
            "transfer_s": transfer_s,
        }
        self._send("event", data)

    def step(self, stats: StepStats, context: StepContext, samples: StepSamples | None) -> None:
        """A finished step's figures. samples: those it used, if a ledger was asked for."""
        if not self._keeper.is_recorded:
            return
        figures = {name: getattr(context if name in _OF_CONTEXT else stats, name) for name in METRICS}
        if stats.figures:
            figures["figures"] = stats.figures
        records = [("metrics", figures)]
        if stats.skipped:
            self.event(stats.step, "skipped", why="a gradient was not finite")
        if samples is not None:
            for j in range(len(samples.sizes)):
                entry = {"step": stats.step, "micro_batch": j, "indices": samples.of(j).tolist()}
                records.append(("ledger", entry))
        self.recent.append(records)
        for kind, data in records:
            self._send(kind, data)

    def resend(self, events: bool) -> None:
        """Sends the newest records again: the last leader may have been lost before it sent them.

        events: whether events are sent too. The supervisor drops records that it has already.
        """
        for records in self.recent:
            for kind, data in records:
                if events or kind != "event":
                    self._send(kind, data)

    def summary(self, summary: dict[str, Any]) -> None:
        """The run is over: sends its summary."""
        self._send("summary", summary)
