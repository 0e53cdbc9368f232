"""Workers die or hang at every moment of training, and the job ends with the same bits as an undisturbed one."""

from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from elastic_job import Job, assert_same_training, chaos, run_job, undisturbed_job, words

from kfuse.elastic.launchers import LocalLauncher

pytestmark = [pytest.mark.full, pytest.mark.jobs]

# The model has BatchNorm and dropout.
TRAINING = words(
    "model._target_=faulty.Faulty data=digits batch.size=16 batch.micro=4 batch.max=64 train.epochs=4",
    "train.eval_every=20 comm=reproducible comm.bucket_mb=0.002 train.clip_norm=0.5 lr.base=0.003 lr.scaling=adascale",
    "workers.max=4 elastic.max_failures=8",
)
SEEN_AS = {
    "kill": "was ended by SIGKILL",
    "exception": "ended with exit status 1",
    "exit": "ended with exit status 3",
    "stop": "sent no heartbeat",
    "stuck_gil": "sent no heartbeat",
}
HANGS = ["elastic.heartbeat_timeout_s=1.2"]


def event(step: int, moment: str, rank: int = 0, how: str = "kill", workers: int = 2) -> dict[str, Any]:
    return {"step": step, "moment": moment, "rank": rank, "how": how, "workers": workers}


def run(directory: Path, settings: list[str], workers: int, events: list[dict[str, Any]]) -> Job:
    """A job with these faults, all of which have struck by its end, and were seen for what they were."""
    job = run_job(
        directory, [*TRAINING, *settings, *chaos(directory.parent, events=events), f"workers.count={workers}"]
    )
    marks = directory.parent / "events"
    struck = {path.name: json.loads(path.read_text())["pid"] for path in marks.glob("event-*")}
    assert set(struck) == {f"event-{i}" for i in range(len(events))}, job.told()
    seen = {failure["pid"]: failure["how"] for failure in job.of_kind("failure")}
    for index, fault in enumerate(events):
        assert SEEN_AS[fault["how"]] in seen.get(struck[f"event-{index}"], "nothing"), (fault, job.told())
    return job


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The same training on one worker to which nothing happens."""
    return undisturbed_job(tmp_path_factory.mktemp("undisturbed"), TRAINING)


def test_the_undisturbed_run_adapts(undisturbed: Job) -> None:
    """Otherwise equal bits would say little: batch size and learning rate follow what was measured."""
    metrics = undisturbed.metrics
    assert len({record["batch_size"] for record in metrics}) >= 3
    assert len({record["lr"] for record in metrics}) > 20
    assert max(record["grad_norm"] for record in metrics) > 0.5  # clipping acts


def test_killed_around_the_step(undisturbed: Job, tmp_path: Path) -> None:
    """Where no gradient is under way: after a step, in an evaluation, after one that nobody was told of."""
    events = [
        event(40, "after_step", 0, workers=3),
        event(59, "evaluation", 1, workers=3),
        event(79, "evaluated", 0),
        event(90, "after_step", 3, workers=4),
    ]
    assert_same_training(run(tmp_path / "run", [], 4, events), undisturbed)


def every_moment(hows: tuple[str, ...], workers: int) -> list[dict[str, Any]]:
    """These kinds of end, in turn, at each moment of a job that has so many workers, each rank in turn."""
    last, how = workers - 1, cycle(hows)
    events = [
        event(6, "forward", 0, next(how), workers),
        event(12, "mid_reduction", 1 % workers, next(how), workers),
        event(18, "between_reduction_and_update", 2 % workers, next(how), workers),
    ]
    if "exception" not in hows:  # in the thread that writes it is a failed write, and no worker's end
        events.append(event(45, "checkpoint_write", 0, next(how), workers))
    # Newcomers: while they boot, connect and receive; and, where another has the state, its source.
    events += [
        event(52, "forward", last, workers=workers),
        event(53, "boot"),
        event(54, "joining", last, next(how)),
        event(55, "receiver", last, next(how)),
    ]
    if workers > 2:
        events.append(event(56, "source", 0, next(how)))
        # A second end in the recovery from a first one.
        events += [event(70, "mid_reduction", last, workers=workers), event(71, "recovery", 0, next(how))]
        events += [event(80, "forward", 0, workers=workers), event(81, "recovery", 1, next(how))]
    return events


ENDS = [("kill", "exit"), ("exception",), ("stuck_gil", "stop", "kill")]


@pytest.mark.parametrize(
    ("hows", "workers"),
    [(("kill",), 2), *((hows, 3) for hows in ENDS), *(pytest.param(hows, 4, marks=pytest.mark.long) for hows in ENDS)],
)
def test_every_end_at_every_moment(hows: tuple[str, ...], workers: int, undisturbed: Job, tmp_path: Path) -> None:
    settings = [*HANGS, "checkpoint.every_steps=15"]
    job = run(tmp_path / "run", settings, workers, every_moment(hows, workers))
    assert_same_training(job, undisturbed)


def test_several_at_once_and_all_but_one(undisturbed: Job, tmp_path: Path) -> None:
    events = [
        event(12, "mid_reduction", 1, workers=4),
        event(12, "mid_reduction", 2, workers=4),
        event(50, "forward", 0, workers=4),
        event(50, "mid_reduction", 1, workers=4),
        event(50, "forward", 3, workers=4),
        event(80, "mid_reduction", 0, "stop", workers=4),
        event(80, "forward", 2, "exception", workers=4),
    ]
    assert_same_training(run(tmp_path / "run", HANGS, 4, events), undisturbed)


@pytest.mark.parametrize("checkpoints", [True, False])
def test_an_error_that_comes_again_at_its_step_ends_the_job(checkpoints: bool, tmp_path: Path) -> None:
    """A mistake at step 9 ends every worker that comes to it."""
    events = [event(9, "forward", 0, "exception", workers=1)]
    settings = [*TRAINING, *chaos(tmp_path, events=events, again=True), "workers.count=2"]
    given = [*settings, *(["checkpoint.every_steps=5"] if checkpoints else [])]
    job = run_job(tmp_path / "run", given, launcher=LocalLauncher())  # which hands on what workers print
    cause = "RuntimeError: struck by chaos"
    assert job.error is not None
    assert job.error.endswith(f"at step 9, as another did at that step: it would do so again: {cause}")
    failures = [failure["how"] for failure in job.of_kind("failure")]
    assert set(failures) == {f"ended with exit status 1: {cause}"} and len(failures) == 2
    assert sum("Traceback" in line for line in job.lines) == len(failures), "each worker's traceback once"
    assert [record["step"] for record in job.metrics] == list(range(len(job.metrics)))
    assert len(job.metrics) <= 9
