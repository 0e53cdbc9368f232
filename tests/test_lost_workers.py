"""A job goes on when workers are lost several at once, while it stops, or before another one has the state."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from elastic_job import Job, assert_exact, assert_same_training, chaos, run_job, undisturbed_job, until, words

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
    return undisturbed_job(tmp_path_factory.mktemp("undisturbed"), TRAINING)


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


def test_a_newcomer_waits_for_slow_steps(undisturbed: Job, tmp_path: Path) -> None:
    """It knows of its view some steps before the others come to it: here three of 1.3 s, with a timeout of 3.5 s."""
    grows = {"phases": [{"step": 2, "workers": 2}], "gates": [{"step": 10, "workers": 2}]}
    settings = [*TRAINING, *chaos(tmp_path, pace_s=1.3, paced=9, **grows), "comm.timeout_s=3.5", "train.steps=12"]
    job = run_job(tmp_path / "run", settings)
    assert job.error is None, job.told()
    assert [view["reason"] for view in job.views] == ["start", "grow"]
    assert job.summary["loss"] == undisturbed.metrics[11]["loss"]
