"""What workers report, on its way to who keeps it: in batches, in order, each event once, nothing lost."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from elastic_job import read_lines
from limits import limits
from rich.console import Console

from kfuse.elastic.job import Job, Records
from kfuse.observe.recorder import Display, Recorder
from kfuse.observe.run_dir import RunDirectory
from kfuse.train.reporter import Reporter


class Kept:
    """Remembers the records. Takes none before it `goes_on`, as a file system that hangs."""

    def __init__(self) -> None:
        self.records: list[tuple[str, dict[str, Any]]] = []
        self.goes_on = threading.Event()
        self.goes_on.set()

    def keep(self, records: Sequence[tuple[str, dict[str, Any]]]) -> None:
        self.goes_on.wait()
        self.records += records


def metrics(*steps: int) -> list[tuple[str, dict[str, Any]]]:
    return [("metrics", {"step": step}) for step in steps]


def run(report: Callable[[Records, Job], Awaitable[None]], recorder: Any) -> None:
    async def go() -> None:
        job = Job(**limits(1, 1, 1))
        records = Records(recorder, job)
        records.open()
        await report(records, job)
        await records.close()

    asyncio.run(asyncio.wait_for(go(), 60))


def test_records_keep_their_order_and_events_come_once() -> None:
    kept, event = Kept(), {"step": 2, "kind": "view"}

    async def report(records: Records, _: Job) -> None:
        for kind, data in [*metrics(0, 1, 2), ("event", event), ("event", dict(event)), *metrics(2, 3)]:
            records.add(kind, data)
        records.line("said")
        assert records.furthest == 3, "step 2 was reported before"
        for kind, data in metrics(1):  # training goes back
            records.add(kind, data)
        records.event("clipped")
        assert records.furthest == 3

    run(report, kept)
    said = [("line", {"text": "said"}), *metrics(1), ("event", {"step": 1, "kind": "clipped"})]
    assert kept.records == [*metrics(0, 1, 2), ("event", event), *metrics(2, 3), *said]


def test_a_new_leader_sends_the_last_ones_events_but_none_of_before_a_checkpoint() -> None:
    sent: list[str] = []
    session = Mock(group=Mock(rank=0))
    first, second = (Reporter(session, Mock(), None, lambda kind, data: sent.append(data["kind"])) for _ in range(2))
    first.event(3, "before")
    second.load_state_dict(first.state_dict())
    second.forget_events()
    second.event(4, "after")
    second.resend()
    assert sent == ["before", "after", "after"]


def test_a_file_system_that_hangs_holds_nothing_up_and_what_is_lost_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kfuse.elastic.job._MOST_WAITING", 5)
    kept = Kept()
    kept.goes_on.clear()

    async def report(records: Records, _: Job) -> None:
        records.event("view")
        await asyncio.sleep(0.2)  # the thread hangs from now on, and not this loop
        for kind, data in metrics(*range(7)):
            records.add(kind, data)
        records.event("failure")
        kept.goes_on.set()

    run(report, kept)
    first, *rest = kept.records
    assert first[1]["kind"] == "view" and rest[:5] == metrics(0, 1, 2, 3, 4)
    assert rest[5][1]["kind"] == "failure", "an event is never lost"
    assert (rest[6][1]["kind"], rest[6][1]["steps"], rest[6][1]["lines"]) == ("records_lost", [5, 6], 2)


def test_an_error_of_who_keeps_them_ends_the_job() -> None:
    broken = Mock(keep=Mock(side_effect=OSError("no room")))

    async def report(records: Records, job: Job) -> None:
        records.add(*metrics(0)[0])
        await job.over.wait()
        assert str(job.error) == "no room"

    run(report, broken)


def quiet(folder: Path) -> Recorder:
    return Recorder(RunDirectory(folder, sinks=()), Display(False, Console(quiet=True)))


def start(at: int = 0) -> tuple[str, dict[str, Any]]:
    return "start", {"samples": None, "steps": None, "step": at}


def step(index: int) -> tuple[str, dict[str, Any]]:
    return "metrics", {"step": index, "epoch": 0, "samples": 1, "lr": 0.1, "batch_size": 1, "workers": 1}


def test_a_gap_in_the_steps_is_said_in_an_event_and_in_the_summary(tmp_path: Path) -> None:
    """The leader was lost, with more steps that had not reached the supervisor than the next one sends again."""
    recorder, records = quiet(tmp_path), [step(index) for index in (4, 5, 9, 8, 9, 10, 13)]
    known = ("event", {"step": 12, "kind": "records_lost", "steps": [11, 12], "lines": 5, "why": "said already"})
    evaluated = ("event", {"step": 8, "kind": "evaluation", "loss": 0.5, "accuracy": 0.75, "metrics": {}})
    recorder.keep([start(at=4), *records[:-1], known, *records[-1:], evaluated])
    recorder.close(None)
    found = [(event["kind"], event["steps"]) for event in read_lines(tmp_path / "events.jsonl")[:-1]]
    assert found == [("records_lost", [6, 8]), ("records_lost", [11, 12])]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["lines_lost"], summary["heldout_accuracy"]) == (8, 0.75)
    recorder = quiet(tmp_path)  # another process, to which the leader sends the newest steps of before again
    recorder.keep([start(at=17), step(12), step(13), step(15), step(16), step(17)])
    recorder.close(None)
    assert [event["steps"] for event in read_lines(tmp_path / "events.jsonl")[3:]] == [[14, 14]]


def test_what_is_missing_is_counted_over_all_processes_of_a_run(tmp_path: Path) -> None:
    for steps in ([3, 4], [10]):
        recorder = quiet(tmp_path)
        recorder.keep([start(), ("event", {"step": 4, "kind": "left_out", "workers": [*steps], "steps": steps})])
        recorder.close(None)
    assert json.loads((tmp_path / "summary.json").read_text())["steps_left_out"] == 17
