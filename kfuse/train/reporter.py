"""What one training reports: a line a step, events, its start and its summary."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from kfuse.elastic.link import Report, ignore
from kfuse.elastic.protocol import View
from kfuse.membership import Session
from kfuse.policies.signals import Signals
from kfuse.settings.tree import TrainSettings, by_key
from kfuse.statistics.figures import METRICS, StepContext
from kfuse.statistics.step_stats import StepStats

if TYPE_CHECKING:
    from kfuse.train.step import StepSamples

_OF_CONTEXT = {each.name for each in fields(StepContext)}
_RECENT_STEPS = 128


class Reporter:
    """Every worker calls it in the same way; only rank 0's records are sent."""

    def __init__(
        self, session: Session, settings: TrainSettings, samples_an_epoch: int | None, report: Report = ignore
    ) -> None:
        """samples_an_epoch: None for a stream."""
        self._session, self._settings, self._samples_an_epoch = session, settings, samples_an_epoch
        self.records = report is not ignore
        self.report = report  # also of a worker that is not rank 0
        # The newest records, which a lost leader or supervisor may not have written: see `resend`.
        self.recent: deque[list[tuple[str, dict[str, Any]]]] = deque(maxlen=_RECENT_STEPS)

    def state_dict(self) -> dict[str, Any]:
        # One text: in a new view all workers wait while a safe unpickler, in Python, reads what is in it one by one.
        return {"recent": json.dumps(list(self.recent))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.recent.clear()
        self.recent.extend(json.loads(state["recent"]))

    def _send(self, kind: str, data: dict[str, Any]) -> None:
        if self._session.leads:
            self.report(kind, data)

    def event(self, step: int, kind: str, **fields: Any) -> None:
        """A line of events.jsonl: something that happened at this step."""
        data = {"step": step, "kind": kind, **fields}
        self.recent.append([("event", data)])
        self._send("event", data)

    def start(self, step: int, restarts: bool) -> None:
        """Training begins; sends its planned length in samples and steps.

        step: the first one that will be reported: from a checkpoint the one before the coming step, whose figures the
        policy sees with the present workers and bounds. restarts: started anew, it would go on from its own
        checkpoints.
        """
        epochs, steps = self._settings["epochs"], self._settings["steps"]
        total = None if epochs is None or self._samples_an_epoch is None else epochs * self._samples_an_epoch
        about: dict[str, Any] = {"samples": total, "steps": steps, "step": step}
        about |= {"ledger": self._settings["observe_ledger"], "settings": by_key(self._settings)}
        self._send("start", {**about, "restarts": restarts})

    def view(self, step: int, view: View, regroup_s: float, transfer_s: float) -> None:
        """A new view is active. regroup_s, transfer_s: seconds for forming the group, for sending the state."""
        workers = [{"rank": r, "pid": m.pid, "host": m.host} for r, m in enumerate(view.members)]
        data = {"step": step, "kind": "view", "generation": view.generation, "workers": workers, "reason": view.reason}
        data |= {"pause_s": regroup_s + transfer_s, "regroup_s": regroup_s, "transfer_s": transfer_s}
        self._send("event", data)

    def step(
        self,
        stats: StepStats,
        context: StepContext,
        signals: Signals,
        samples: StepSamples | None,
        logged: Mapping[str, float],
    ) -> None:
        """A finished step's figures. signals: what a policy sees of it. samples: those it used, if a ledger was asked
        for. logged: the user's own figures.
        """
        if not self.records:
            return
        figures = {name: getattr(context if name in _OF_CONTEXT else stats, name) for name in METRICS}
        if own := {**stats.figures, **logged}:
            figures["figures"] = own
        figures["signals"] = signals.beside_columns()
        records = [("metrics", figures)]
        if stats.skipped:
            self.event(stats.step, "skipped", why="a gradient was not finite")
        mine = None if context.share is None else range(*context.share)
        whose = {} if mine is None else {"worker": context.members[0]}
        if samples is not None:
            for j in range(len(samples.sizes)) if mine is None else mine:
                entry = {"step": stats.step, "micro_batch": j, **whose, "indices": samples.of(j).tolist()}
                records.append(("ledger", entry))
        self.recent.append(records)
        for kind, data in records:
            if kind == "ledger" and mine is not None:  # no other worker knows them
                self.report(kind, data)
            else:
                self._send(kind, data)

    def forget_events(self) -> None:
        """Drops the events that came with a checkpoint: they are recorded, unless a supervisor was killed before."""
        for records in self.recent:
            records[:] = [(kind, data) for kind, data in records if kind != "event"]

    def resend(self) -> None:
        """Sends the newest records again: a lost leader may not have sent them. The supervisor drops those it has."""
        for records in self.recent:
            for kind, data in records:
                self._send(kind, data)

    def summary(self, summary: dict[str, Any]) -> None:
        self._send("summary", summary)
