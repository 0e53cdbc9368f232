"""Workers whose machines are about to be taken away get SIGTERM, and leave as planned: to the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from elastic_job import Job, assert_same_training, chaos, run_job, undisturbed_job, words

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
    assert all(event["host"] for event in job.of_kind("notice"))
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
    settings = [*settings, "elastic.replace=false", *chaos(tmp_path, events=events)]
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
