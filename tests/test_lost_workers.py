"""A job goes on when workers are lost several at once, while it stops, or before another one has the state."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from elastic_job import Job, assert_exact, assert_same_training, chaos, run_job, until, words
from warm import WarmLauncher, WarmProcess

from kfuse.elastic.supervisor import Supervisor

pytestmark = [pytest.mark.full, pytest.mark.jobs]

TRAINING = words(
    "comm=reproducible comm.bucket_mb=0.002 lr.base=0.003 workers.max=4 model=mlp data=digits model.hidden=[24]",
    "model.dropout=0.1 batch.size=16 batch.micro=4 batch.max=64 train.steps=60 train.eval_every=20",
)


def kill(view: dict[str, Any], *ranks: int) -> None:
    for worker in view["workers"]:
        if worker["rank"] in ranks:
            os.kill(worker["pid"], signal.SIGKILL)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Job:
    directory = tmp_path_factory.mktemp("undisturbed")
    return run_job(directory / "run", [*TRAINING, *chaos(directory)])


def test_workers_lost_together_are_one_loss(undisturbed: Job, tmp_path: Path) -> None:
    """As with the host they were on: otherwise these three would end the job."""

    async def three_at_once(_: Supervisor, job: Job) -> None:
        await until("20 steps", lambda: len(job.metrics) >= 20)
        kill(job.views[-1], 0, 1, 3)

    settings = [*TRAINING, *chaos(tmp_path, pace_s=0.02), "workers.count=4", "elastic.max_failures=3"]
    job = run_job(tmp_path / "run", settings, during=three_at_once)
    assert_same_training(job, undisturbed)
    assert len(job.of_kind("failure")) == 3


def test_a_loss_while_the_job_stops_costs_no_checkpoint(undisturbed: Job, tmp_path: Path) -> None:
    async def preempt(supervisor: Supervisor, job: Job) -> None:
        await until("20 steps", lambda: len(job.metrics) >= 20)
        kill(job.views[-1], 0)
        supervisor.stop("terminated")

    settings = [*TRAINING, *chaos(tmp_path, pace_s=0.1), "workers.count=3", "checkpoint.every_steps=50"]
    job = run_job(tmp_path / "run", settings, during=preempt)
    assert job.error is None, job.told()
    assert job.summary["exit_reason"] == "terminated"
    assert [event["step"] for event in job.of_kind("checkpoint")] == [job.summary["steps"]]
    assert job.summary["steps"] < 60
    assert_exact(job)
    resumed = run_job(tmp_path / "run", [*TRAINING, *chaos(tmp_path), "checkpoint.resume=auto"])
    assert_same_training(resumed, undisturbed)


def test_sigterm_to_every_process_is_the_supervisors_to_answer(tmp_path: Path) -> None:
    """As Slurm and systemd send it."""

    async def preempt(supervisor: Supervisor, job: Job) -> None:
        await until("20 steps", lambda: len(job.metrics) >= 20)
        for worker in job.views[-1]["workers"]:
            os.kill(worker["pid"], signal.SIGTERM)
        supervisor.stop("terminated")

    settings = [*TRAINING, *chaos(tmp_path, pace_s=0.05), "workers.count=2", "checkpoint.every_steps=50"]
    job = run_job(tmp_path / "run", settings, during=preempt)
    assert job.error is None and not job.of_kind("failure"), job.told()
    assert [event["step"] for event in job.of_kind("checkpoint")] == [job.summary["steps"]]


def test_the_end_of_a_run_is_in_a_checkpoint(tmp_path: Path) -> None:
    settings = [*TRAINING, *chaos(tmp_path), "train.steps=12", "checkpoint.every_steps=5"]
    job = run_job(tmp_path / "run", settings)
    assert [event["step"] for event in job.of_kind("checkpoint")][-1] == 12
    again = run_job(tmp_path / "run", [*settings, "train.steps=20", "checkpoint.resume=auto"])
    assert [event["step"] for event in again.of_kind("resumed")] == [12]
    assert again.summary["steps"] == 20


def test_newcomers_alone_have_nothing_to_go_on_with(tmp_path: Path) -> None:
    """The only worker with the state is lost as it hands it over, and there are no checkpoints."""
    events = [{"step": 20, "moment": "source", "rank": 0, "how": "kill"}]
    phases = [{"step": 5, "workers": 2}]
    job = run_job(tmp_path / "run", [*TRAINING, *chaos(tmp_path, events=events, phases=phases)])
    assert job.error == "the workers that had the training's state are lost; with checkpoints, training would go on"
    assert job.metrics, "what was recorded stays"


def test_a_newcomer_waits_for_slow_steps(undisturbed: Job, tmp_path: Path) -> None:
    """It knows of its view some steps before the others come to it: here three of 2.4 s, with a timeout of 6 s."""
    grows = {"phases": [{"step": 2, "workers": 2}], "gates": [{"step": 10, "workers": 2}]}
    settings = [*TRAINING, *chaos(tmp_path, pace_s=2.4, **grows), "comm.timeout_s=6", "train.steps=12"]
    job = run_job(tmp_path / "run", settings)
    assert job.error is None, job.told()
    assert [view["reason"] for view in job.views] == ["start", "grow"]
    assert job.summary["loss"] == undisturbed.metrics[11]["loss"]


def test_a_newcomer_that_comes_too_late_is_sent_away(undisturbed: Job, tmp_path: Path) -> None:
    """Its view is proposed at the last step: the others never come to it, and their end is its end."""

    async def grow(supervisor: Supervisor, job: Job) -> None:
        await until("58 steps", lambda: len(job.metrics) >= 58)
        await supervisor.views.resize(2)

    last = chaos(tmp_path, gates=[{"step": 67, "workers": 2}])  # from 8 steps before, so the last one waits
    job = run_job(tmp_path / "run", [*TRAINING, *last], during=grow)
    assert_same_training(job, undisturbed)
    assert len(job.of_kind("ready")) == 1 and len(job.views) == 1
    assert job.of_kind("failure") == []


def test_a_newcomer_that_is_being_started_as_training_ends_is_sent_away(undisturbed: Job, tmp_path: Path) -> None:
    class Slow(WarmLauncher):
        async def start(self, env: Mapping[str, str]) -> WarmProcess:
            while self.started and self.started[0].status is None:
                await asyncio.sleep(0.01)
            return await super().start(env)

    async def grow(supervisor: Supervisor, job: Job) -> None:
        await until("a step", lambda: len(job.metrics) > 0)
        resizing = asyncio.create_task(supervisor.views.resize(2))
        await until("it to be asked for", lambda: any("workers" in event for event in job.of_kind("decision")))
        asked.touch()
        await resizing

    asked, launcher = tmp_path / "asked", Slow(tmp_path / "run.log")
    settings = [*TRAINING, *chaos(tmp_path, until=str(asked))]
    job = run_job(tmp_path / "run", settings, launcher=launcher, during=grow)
    assert_same_training(job, undisturbed)
    assert len(launcher.started) == 2 and job.of_kind("ready") == job.of_kind("failure") == []


def test_newcomers_that_nobody_wants_any_more_do_not_block_a_restart(undisturbed: Job, tmp_path: Path) -> None:
    async def change_of_mind(supervisor: Supervisor, job: Job) -> None:
        await until("20 steps", lambda: len(job.metrics) >= 20)
        await asyncio.gather(supervisor.views.resize(3), supervisor.views.resize(1))
        await until("two newcomers", lambda: len(job.of_kind("ready")) == 2)
        kill(job.views[-1], 0)
        struck.touch()

    struck = tmp_path / "struck"
    settings = [*TRAINING, *chaos(tmp_path, until=str(struck)), "checkpoint.every_steps=10"]
    job = run_job(tmp_path / "run", settings, during=change_of_mind)
    assert_same_training(job, undisturbed)
    assert [len(view["workers"]) for view in job.views] == [1, 1]


def test_a_replacement_that_dies_as_it_boots_is_tried_again(undisturbed: Job, tmp_path: Path) -> None:
    async def replace(supervisor: Supervisor, job: Job) -> None:
        await until("20 steps", lambda: len(job.metrics) >= 20)
        await supervisor.views.replace(1)
        supervisor.processes.workers[max(supervisor.processes.workers)].process.kill()
        await until("the second view", lambda: len(job.views) == 2)
        replaced.touch()

    replaced = tmp_path / "replaced"
    settings = [*TRAINING, *chaos(tmp_path, until=str(replaced)), "workers.count=2"]
    job = run_job(tmp_path / "run", settings, during=replace)
    assert_same_training(job, undisturbed)
    assert [view["reason"] for view in job.views] == ["start", "replace"]
    assert len(job.of_kind("failure")) == 1
    first, second = ([worker["pid"] for worker in view["workers"]] for view in job.views)
    assert first[0] == second[0] and first[1] != second[1]


class Crowded(WarmLauncher):
    """Has room for so many workers."""

    def __init__(self, log: Path, room: int) -> None:
        super().__init__(log)
        self.room = room

    async def start(self, env: Mapping[str, str]) -> WarmProcess:
        if len(self.started) >= self.room:
            raise OSError("no room for another")
        return await super().start(env)


def test_where_a_worker_cannot_be_started_the_others_go_on(undisturbed: Job, tmp_path: Path) -> None:
    settings = [*TRAINING, *chaos(tmp_path, phases=[{"step": 5, "workers": 3}])]
    job = run_job(tmp_path / "run", settings, launcher=Crowded(tmp_path / "run.log", 1))
    assert_same_training(job, undisturbed)
    [clipped] = job.of_kind("clipped")
    assert clipped["note"] == "workers 3 clipped to 1: the launcher cannot start another: no room for another"


def test_where_no_worker_can_be_started_the_job_ends_in_one_line(tmp_path: Path) -> None:
    job = run_job(tmp_path / "run", TRAINING, launcher=Crowded(tmp_path / "run.log", 0))
    assert job.error == "the launcher cannot start workers: no room for another"


def test_newcomers_that_cannot_boot_do_not_end_the_training(undisturbed: Job, tmp_path: Path) -> None:
    class Newcomers(WarmLauncher):
        async def start(self, env: Mapping[str, str]) -> WarmProcess:
            process = await super().start(env)
            if len(self.started) > 1:
                process.kill()
            return process

    async def go_on(supervisor: Supervisor, job: Job) -> None:
        await until("no other to be started", lambda: job.of_kind("quit"))
        given_up.touch()

    given_up, launcher = tmp_path / "given up", Newcomers(tmp_path / "run.log")
    policy = chaos(tmp_path, phases=[{"step": 5, "workers": 2}], until=str(given_up))
    job = run_job(tmp_path / "run", [*TRAINING, *policy, "elastic.max_failures=3"], go_on, launcher)
    assert_same_training(job, undisturbed)
    assert len(launcher.started) == 4 and len(job.of_kind("failure")) == 3
    [left] = job.of_kind("quit")
    assert left["how"].endswith("as others did before they could join: no other is started")
