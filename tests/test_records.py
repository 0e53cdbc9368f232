"""What workers report, on its way to who keeps it: in batches, in order, each event once, nothing lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console

from kfuse.elastic.job import Elasticity, Job
from kfuse.elastic.records import Records
from kfuse.observe.display import Display
from kfuse.observe.recorder import Recorder
from kfuse.observe.run_dir import RunDirectory
from kfuse.policies.signals import Signals
from kfuse.statistics.figures import FIGURES, METRICS
from kfuse.statistics.step_stats import StepStats


class Kept:
    """Remembers the batches."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[str, dict[str, Any]]]] = []

    def keep(self, records: Sequence[tuple[str, dict[str, Any]]]) -> None:
        self.batches.append(list(records))

    def line(self, text: str) -> None:
        pass


def metrics(*steps: int) -> list[tuple[str, dict[str, Any]]]:
    return [("metrics", {"step": step}) for step in steps]


def test_steps_wait_for_each_other_and_events_do_not_wait() -> None:
    kept, event = Kept(), {"step": 2, "kind": "view"}

    async def report() -> None:
        records = Records(kept, Job(Elasticity(1, 1, 1)))
        for kind, data in metrics(0, 1, 2):
            records.add(kind, data)
        assert kept.batches == []
        records.add("event", event)
        assert kept.batches == [[*metrics(0, 1, 2), ("event", event)]]
        records.add("event", dict(event))  # a new leader's
        assert len(kept.batches) == 1
        for kind, data in metrics(2, 3):
            records.add(kind, data)
        assert (records.furthest, records.progress) == (3, 4), "step 2 was reported before"
        while len(kept.batches) == 1:
            await asyncio.sleep(0.01)
        assert kept.batches[1] == metrics(2, 3)
        records.add(*metrics(4)[0])
        records.flush()
        assert kept.batches[2] == metrics(4)

    asyncio.run(asyncio.wait_for(report(), 60))


def test_an_event_of_the_next_training_is_kept_although_it_is_equal() -> None:
    kept, event = Kept(), ("event", {"step": 4, "kind": "decision", "batch_size": [8, 16]})

    async def report() -> None:
        records = Records(kept, Job(Elasticity(1, 1, 1)))
        for _ in range(2):
            records.begin_training()
            records.add(*event)
            records.add(*event)

    asyncio.run(report())
    assert kept.batches == [[event], [event]]


def test_an_error_of_who_keeps_them_ends_the_job() -> None:
    class Broken(Kept):
        def keep(self, records: Sequence[tuple[str, dict[str, Any]]]) -> None:
            raise OSError("no room")

    async def report() -> None:
        job = Job(Elasticity(1, 1, 1))
        Records(Broken(), job).add(*metrics(0)[0])
        await job.over.wait()
        assert str(job.error) == "no room"

    asyncio.run(asyncio.wait_for(report(), 60))


def test_a_training_that_begins_in_the_middle_of_a_batch_loses_nothing_of_the_one_before(tmp_path: Path) -> None:
    quiet = Display(progress=False, console=Console(quiet=True))
    recorder = Recorder(RunDirectory(tmp_path, tensorboard=False), quiet)
    start = {"samples": None, "steps": None, "step": 0}
    step = {"epoch": 0, "samples": 1, "lr": 0.1, "batch_size": 1, "workers": 1}
    first = [("metrics", {"step": index, **step}) for index in range(3)]
    recorder.keep([("start", {**start, "training": 1}), *first, ("start", {**start, "training": 2}), *first[:1]])
    recorder.close(None)
    lengths = [len((tmp_path / name / "metrics.jsonl").read_text().splitlines()) for name in ("", "2")]
    assert lengths == [3, 1]
    assert json.loads((tmp_path / "summary.json").read_text())["exit_reason"] == "loop_left"


def test_a_training_that_begins_while_the_disk_is_full_is_kept(tmp_path: Path) -> None:
    told: list[str] = []
    recorder = Recorder(RunDirectory(tmp_path, tensorboard=False), Display(progress=False, console=Console(quiet=True)))
    recorder.directory.warn = told.append
    start = {"samples": None, "steps": None, "step": 0}
    step = {"step": 0, "epoch": 0, "samples": 1, "lr": 0.1, "batch_size": 1, "workers": 1}
    recorder.keep([("start", {**start, "training": 1})])
    with open("/dev/full", "ab", buffering=0) as full:
        recorder.directory._metrics._file = full
        recorder.keep([("metrics", step)])
        recorder.keep([("start", {**start, "training": 2}), ("metrics", step)])
    recorder.close(None)
    assert len((tmp_path / "2" / "metrics.jsonl").read_text().splitlines()) == 1
    assert "1 lines could not be written" in told[-1] and len(told) == 2


def test_a_steps_figures_are_the_same_everywhere() -> None:
    assert set(METRICS) <= set(FIGURES)
    assert all(about["help"] for about in FIGURES.values())
    measured = {each.name for each in fields(StepStats)} & {each.name for each in fields(Signals)}
    assert {"loss", "noise_scale", "mean_grad_sq", "grad_variance", "micro_batches"} <= measured
