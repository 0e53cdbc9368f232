"""Builds the records of a run (metrics, events, ledger, summary) and sends them to the process that keeps them."""

from __future__ import annotations

from collections import deque
from dataclasses import fields
from typing import Any

from kfuse.elastic.protocol import View
from kfuse.session import Session
from kfuse.statistics.figures import METRICS, StepContext
from kfuse.statistics.step_stats import StepStats
from kfuse.train.settings import Settings
from kfuse.train.step import StepSamples

_OF_CONTEXT = {each.name for each in fields(StepContext)}
_RECENT_STEPS = 128


class Reporter:
    """Every worker calls it in the same way; only rank 0's records are sent."""

    def __init__(self, session: Session, settings: Settings, samples_an_epoch: int | None) -> None:
        """samples_an_epoch: None for a stream, which has no epochs."""
        self._session, self._settings, self._samples_an_epoch = session, settings, samples_an_epoch
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
            self._session.report(kind, data)

    def event(self, step: int, kind: str, **fields: Any) -> None:
        """A line of events.jsonl: something that happened at this step."""
        data = {"step": step, "kind": kind, **fields}
        self.recent.append([("event", data)])
        self._send("event", data)

    def start(self, step: int) -> None:
        """Training begins at `step` (above 0: from a checkpoint); sends its planned length in samples and steps."""
        epochs = self._settings.epochs
        total = None if epochs is None or self._samples_an_epoch is None else epochs * self._samples_an_epoch
        training = self._session.training
        self._send("start", {"samples": total, "steps": self._settings.steps, "step": step, "training": training})

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
        if not self._session.is_recorded:
            return
        figures = {name: getattr(context if name in _OF_CONTEXT else stats, name) for name in METRICS}
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
