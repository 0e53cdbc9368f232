"""Workers whose machines are about to be taken away get SIGTERM, and leave as planned: to the same bits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from elastic_job import (
    DEADLINE_S,
    Job,
    assert_none_left,
    assert_same_training,
    chaos,
    command_line,
    run_job,
    undisturbed_job,
    until,
    wait_until,
    words,
)

from kfuse.elastic.supervisor import Supervisor

TRAINING = words(
    "comm=reproducible comm.bucket_mb=0.06 train.clip_norm=0.5 lr.base=0.003 workers.max=4 model=mlp data=digits",
    "model.hidden=[200,100] model.dropout=0.1 batch.size=16 batch.micro=4 batch.max=64 train.steps=60",
    "train.eval_every=20 workers.count=3",
)
SHARDED = "comm.state=sharded"
SLOW = [pytest.mark.full, pytest.mark.jobs]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return undisturbed_job(tmp_path_factory.mktemp("undisturbed"), [*TRAINING, "workers.count=1"])


def notice(step: int, moment: str, rank: int, how: str = "notice", **more: Any) -> dict[str, Any]:
    return {"step": step, "moment": moment, "rank": rank, "how": how, "workers": 3, **more}


def noticed(job: Job) -> list[int]:
    """The numbers of workers that were given notice. Each has a place, and none was lost or made a step be repeated."""
    assert job.of_kind("failure") == [] and set(job.statuses.values()) <= {0, -9, -15}
    assert not {"failure", "restart"} & {view["reason"] for view in job.views}
    assert all(event["host"] for event in job.of_kind("notice") if event["pid"])  # else it booted
    return [event["worker"] for event in job.of_kind("notice")]


def pids(view: dict[str, Any]) -> list[int]:
    return [worker["pid"] for worker in view["workers"]]


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        ((1,), [SHARDED]),
        pytest.param((0,), [], marks=SLOW),
        pytest.param((0,), [SHARDED], marks=SLOW),
        pytest.param((1, 2), [SHARDED], marks=SLOW),
        pytest.param((0, 1), [SHARDED], marks=SLOW),
    ],
)
def test_in_mid_step_the_others_take_its_share(
    ranks: tuple[int, ...], settings: list[str], undisturbed: Job, tmp_path: Path
) -> None:
    events = [notice(20, "mid_reduction", rank) for rank in ranks]
    gates = [{"step": 50, "workers": 3 - len(ranks)}]
    settings = [*settings, "elastic.replace=false", *chaos(tmp_path, events=events, gates=gates)]
    job = run_job(tmp_path / "run", [*TRAINING, *settings])
    assert_same_training(job, undisturbed)
    before = pids(job.views[0])
    assert sorted(noticed(job)) == [*ranks]
    assert pids(job.views[-1]) == [pid for rank, pid in enumerate(before) if rank not in ranks]
    assert {view["reason"] for view in job.views[1:]} == {"notice"}
    assert set(job.statuses.values()) == {0}


@pytest.mark.full
@pytest.mark.jobs
@pytest.mark.parametrize("moment", ["evaluation", "checkpoint_write", "boot", "joining", "handing over", "sending"])
def test_at_any_moment_it_is_neither_lost_nor_fatal(moment: str, undisturbed: Job, tmp_path: Path) -> None:
    """Also as a view is formed, or a worker joins. Another one takes its place, and may be given notice too."""
    events = [notice(10, "forward", 2), notice(20, moment, 0)]
    gates = [{"step": 59, "workers": 3}]
    settings = [SHARDED, "checkpoint.every_steps=25", *chaos(tmp_path, events=events, gates=gates)]
    job = run_job(tmp_path / "run", [*TRAINING, *settings])
    assert_same_training(job, undisturbed)
    assert len(noticed(job)) == 2
    assert len(job.views[-1]["workers"]) == 3


@pytest.mark.full
@pytest.mark.jobs
def test_where_all_get_notice_others_take_over_first(undisturbed: Job, tmp_path: Path) -> None:
    gates = [{"step": 59, "workers": 3}]
    policy = chaos(tmp_path, events=[notice(20, "forward", 0, "notice_all")], gates=gates)
    job = run_job(tmp_path / "run", [*TRAINING, SHARDED, *policy])
    assert_same_training(job, undisturbed)
    assert sorted(noticed(job)) == [0, 1, 2]
    assert not {*pids(job.views[0])} & {*pids(job.views[-1])}


@pytest.mark.full
@pytest.mark.jobs
def test_one_that_is_stuck_is_lost_after_the_grace(undisturbed: Job, tmp_path: Path) -> None:
    policy = chaos(tmp_path, events=[notice(20, "forward", 1, "notice_stuck")])
    job = run_job(tmp_path / "run", [*TRAINING, SHARDED, "elastic.grace_s=2", "elastic.replace=false", *policy])
    assert_same_training(job, undisturbed)
    [failure] = job.of_kind("failure")
    assert failure["worker"] == job.of_kind("notice")[0]["worker"] == 1
    assert failure["how"] == "did not leave within 2 s of its notice and was killed"


@pytest.mark.full
def test_where_a_whole_job_gets_it_the_job_stops_with_a_last_checkpoint(undisturbed: Job, tmp_path: Path) -> None:
    settings = [*TRAINING, "checkpoint.every_steps=50", "elastic.notice_signals=[SIGUSR1]"]
    with command_line(tmp_path / "run", [*settings, *chaos(tmp_path, pace_s=0.2)]) as (process, job):
        wait_until("10 steps", lambda: len(job.metrics) >= 10)
        for pid in [*pids(job.views[0]), process.pid]:
            os.kill(pid, signal.SIGUSR1)
        assert process.wait(DEADLINE_S) == 143
        assert_none_left(job.pids)
    assert job.summary["exit_reason"] == "terminated" and job.of_kind("failure") == []
    assert [event["step"] for event in job.of_kind("checkpoint")] == [job.summary["steps"]]
    resumed = run_job(tmp_path / "run", [*TRAINING, *chaos(tmp_path), "checkpoint.resume=auto"])
    assert_same_training(resumed, undisturbed)


@pytest.mark.full
@pytest.mark.jobs
@pytest.mark.parametrize("seed", range(2))
def test_notices_at_random_moments(seed: int, undisturbed: Job, tmp_path: Path) -> None:
    """To whatever worker: one that boots, is about to join, trains, or leaves already."""
    draw = random.Random(seed)

    async def take_away(supervisor: Supervisor, job: Job) -> None:
        await until("5 steps", lambda: len(job.metrics) >= 5)
        while len(job.metrics) < 50:
            process: Any = draw.choice(supervisor.processes.alive()).process
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)
            await asyncio.sleep(draw.choice([0.0, 0.05, 0.3]))

    policy = chaos(tmp_path, pace_s=0.05)
    job = run_job(tmp_path / "run", [*TRAINING, SHARDED, *policy], take_away)
    assert_same_training(job, undisturbed)
    assert len(noticed(job)) > 5
