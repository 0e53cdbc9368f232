"""Jobs whose batch changes as workers come and are lost: rates and lengths are those of an undisturbed run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from elastic_job import Job, assert_same_training, chaos, run_job, words

pytestmark = [pytest.mark.full, pytest.mark.jobs]

TRAINING = words(
    "model=mlp data=digits model.hidden=[24] batch.size=16 batch.micro=4 batch.max=64 train.eval_every=1000",
    "comm=reproducible comm.bucket_mb=0.002 lr.base=0.003 workers.max=4 workers.min=2",
    "elastic.max_failures=8",
)
PHASES: list[dict[str, Any]] = [
    {"step": 8, "batch_size": 64, "workers": 2},
    {"step": 30, "batch_size": 32, "workers": 3},
    {"step": 45, "batch_size": 8},
]


def run(directory: Path, settings: list[str], workers: int, events: list[dict[str, Any]]) -> Job:
    policy = chaos(directory, phases=PHASES, events=events, adaptive=False)
    job = run_job(directory / "run", [*TRAINING, *settings, *policy, f"workers.count={workers}"])
    assert len(job.of_kind("failure")) == len(events), job.told()
    return job


def kill(step: int, moment: str, rank: int = 0) -> dict[str, Any]:
    return {"step": step, "moment": moment, "rank": rank, "how": "kill", "workers": 2}


def test_losses_leave_the_bits(tmp_path: Path) -> None:
    settings = words("lr.scaling=adascale lr.decay=linear train.epochs=null train.steps=120 optimizer=sgd")
    reference = run(tmp_path / "alone", [*settings, "workers.min=1"], 1, [])
    job = run(tmp_path / "struck", settings, 2, [kill(12, "forward"), kill(35, "after_step", 1)])
    assert_same_training(job, reference)
    assert {record["batch_size"] for record in job.metrics} == {8, 16, 32, 64}
    assert job.summary["exit_reason"] == "steps" and job.summary["steps"] < 120
    assert job.metrics[-1]["lr"] < 0.003 / 120 * 4


def test_apart_all_workers_end_at_one_step(tmp_path: Path) -> None:
    """Workers of comm.sync=pair have statistics of their own; what they count of the run is the same."""
    job = run_job(
        tmp_path / "run",
        words(
            "model=mlp model.hidden=[16] data=digits lr.base=0.01 comm.sync=pair batch.size=96 batch.micro=8",
            "workers.count=3 workers.max=3 optimizer=sgd lr.scaling=adascale train.epochs=null train.steps=40",
            "policy=schedule policy.phases=[{step:10,batch_size:192}]",
        ),
    )
    assert job.error is None, job.told()
    assert job.summary["exit_reason"] == "steps", job.told()
    assert job.summary["batch_size"] == 192
