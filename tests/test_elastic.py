"""Workers join and leave as planned, and a job survives the loss of all workers, of its supervisor, and signals."""

from __future__ import annotations

import os
import signal
import socket
import time
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
from elastic_job import (
    DEADLINE_S,
    Job,
    assert_exact,
    assert_none_left,
    assert_same_steps,
    assert_same_training,
    chaos,
    command_line,
    run_job,
    undisturbed_job,
    until,
    wait_until,
    words,
)

from kfuse.comm.group import CommError
from kfuse.elastic import rendezvous
from kfuse.elastic.supervisor import Supervisor

TRAINING = words(
    "comm=reproducible comm.bucket_mb=0.002 train.clip_norm=0.5 lr.base=0.003 workers.max=4 model=mlp data=digits",
    "model.hidden=[24] model.dropout=0.1 batch.size=16 batch.micro=4 batch.max=64 train.epochs=4 train.eval_every=20",
)
CHECKPOINTS = ["checkpoint.every_steps=25"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return undisturbed_job(tmp_path_factory.mktemp("undisturbed"), TRAINING)


def ranks(view: dict[str, Any]) -> list[int]:
    """The view's processes, by rank."""
    assert [worker["rank"] for worker in view["workers"]] == list(range(len(view["workers"])))
    return [worker["pid"] for worker in view["workers"]]


# -- planned changes ----------------------------------------------------------------------------------------------


def test_growth_and_shrinkage_by_schedule(undisturbed: Job, tmp_path: Path) -> None:
    """The last one while workers are on their way out. Another transport than reproducible sums need is refused."""
    phases = [{"step": s, "workers": n} for s, n in ((5, 2), (25, 3), (45, 1), (47, 4))]
    gates = [{"step": s, "workers": n} for s, n in ((20, 2), (40, 3), (65, 4))]
    asked = [{"step": 10, "topology": "allreduce"}]
    job = run_job(tmp_path / "run", [*TRAINING, *chaos(tmp_path, phases=phases, gates=gates, topologies=asked)])
    assert_same_training(job, undisturbed)
    [clipped] = job.of_kind("clipped")
    assert "allreduce" in clipped["note"] and "comm_reproducible" in clipped["note"]
    views = job.views
    sizes = [(1, "start"), (2, "grow"), (3, "grow"), (1, "shrink"), (4, "grow")]
    assert [(len(view["workers"]), view["reason"]) for view in views] == sizes
    for view in views:
        assert view["pause_s"] == pytest.approx(view["regroup_s"] + view["transfer_s"])
    assert all(view["regroup_s"] > 0 and view["transfer_s"] > 0 for view in views[1:])
    for before, after in pairwise(views):
        staying = min(len(before["workers"]), len(after["workers"]))
        assert ranks(after)[:staying] == ranks(before)[:staying]  # nobody was restarted
    assert len(job.statuses) == 6 and set(job.statuses.values()) == {0}
    assert job.of_kind("failure") == []
    assert [n for n, _ in groupby(record["workers"] for record in job.metrics)] == [1, 2, 3, 1, 4]


@pytest.mark.full
def test_more_workers_than_micro_batches(tmp_path: Path) -> None:
    """Those without one wait, lose the only worker that had one, and take over."""
    few = [*TRAINING, "batch.micro=16", "batch.max=16", "train.epochs=1"]
    alone = run_job(tmp_path / "alone", [*few, *chaos(tmp_path, adaptive=False)])
    events = [{"step": 20 + 10 * rank, "moment": "mid_reduction", "rank": rank, "how": "kill"} for rank in (0, 1)]
    settings = [*few, "workers.count=3", *chaos(tmp_path, adaptive=False, events=events)]
    job = run_job(tmp_path / "run", settings)
    assert_same_training(job, alone)
    assert {record["micro_batches"] for record in job.metrics} == {1}
    assert len(job.of_kind("failure")) == 2


@pytest.mark.full
@pytest.mark.jobs
def test_a_newcomer_waits_for_slow_steps(undisturbed: Job, tmp_path: Path) -> None:
    """It knows of its view some steps before the others come to it: here three of 1.3 s, with a timeout of 3.5 s."""
    grows = {"phases": [{"step": 2, "workers": 2}], "gates": [{"step": 10, "workers": 2}]}
    settings = [*TRAINING, *chaos(tmp_path, pace_s=1.3, paced=9, **grows), "comm.timeout_s=3.5", "train.steps=12"]
    job = run_job(tmp_path / "run", settings)
    assert job.error is None, job.told()
    assert [view["reason"] for view in job.views] == ["start", "grow"]
    assert job.summary["loss"] == undisturbed.metrics[11]["loss"]


# -- all workers are lost -----------------------------------------------------------------------------------------


@pytest.mark.full
def test_all_killed_with_checkpoints_restarts_from_the_last(undisturbed: Job, tmp_path: Path) -> None:
    # By one of them: if each killed itself, a slow one might learn of the others' end before, and recover from it.
    all_at_once = [{"step": 60, "moment": "forward", "rank": 0, "how": "kill_all", "workers": 3}]
    written = {"directory": str(tmp_path / "run" / "checkpoints"), "every": 25}
    policy = chaos(tmp_path, events=all_at_once, checkpoints=written)
    job = run_job(tmp_path / "run", [*TRAINING, *CHECKPOINTS, "workers.count=3", *policy])
    assert_same_training(job, undisturbed)
    assert len(job.of_kind("failure")) == 3
    assert [view["reason"] for view in (job.views[0], job.views[-1])] == ["start", "restart"]
    assert [event["step"] for event in job.of_kind("resumed")] == [50]
    assert job.of_kind("checkpoint")[-1]["step"] == job.summary["steps"], "the end of a run is in a checkpoint"
    assert len(job.pids) == 6


@pytest.mark.full
def test_a_job_that_gives_up_leaves_a_last_checkpoint(undisturbed: Job, tmp_path: Path) -> None:
    """Each leader is killed in the same step. The worker that is left was none, and has the state."""
    kills = [{"step": 40, "moment": "mid_reduction", "rank": 0, "how": "kill"}]
    settings = [*TRAINING, *CHECKPOINTS, "workers.count=3", "elastic.max_failures=2", "elastic.replace=false"]
    job = run_job(tmp_path / "run", [*settings, *chaos(tmp_path, events=kills, again=True)])
    assert job.error is not None and job.error.startswith("2 workers were lost in a row"), job.told()
    assert [event["step"] for event in job.of_kind("checkpoint")] == [25, 40]
    resumed = run_job(tmp_path / "run", [*TRAINING, *CHECKPOINTS, *chaos(tmp_path), "checkpoint.resume=auto"])
    assert_same_training(resumed, undisturbed)


# -- the supervisor is stopped or lost ----------------------------------------------------------------------------


def assert_resumes(job: Job, step: int, workers: int, settings: list[str], undisturbed: Job) -> None:
    """The same run directory, on another number of workers, to its end; which is not overwritten."""
    for status in (0, 2):
        with command_line(job.directory, [*settings, f"workers.count={workers}"]) as (process, resumed):
            assert process.wait(DEADLINE_S) == status
        assert_none_left(resumed.pids)
        assert_same_training(resumed, undisturbed)
        assert [event["step"] for event in resumed.of_kind("resumed")] == [step]
    assert "must be a new one: the run in it has ended (epochs)" in resumed.lines[-1]


def without_supervisor(tmp_path: Path) -> Job:
    """A job of two workers, which have ended since their supervisor was killed."""
    slowly = [*TRAINING, "workers.count=2", *chaos(tmp_path, pace_s=0.05)]
    with command_line(tmp_path / "run", slowly) as (process, job):
        wait_until("40 steps", lambda: len(job.metrics) >= 40)
        process.kill()
        process.wait()
        assert_none_left(job.pids)
        assert len(job.pids) == 2
    return job


@pytest.mark.full
def test_a_killed_supervisor_leaves_a_checkpoint_and_no_worker(undisturbed: Job, tmp_path: Path) -> None:
    """Also where none were asked for."""
    job = without_supervisor(tmp_path)
    [saved] = [int(path.name.removeprefix("step-")) for path in (job.directory / "checkpoints").glob("step-*")]
    assert saved > job.metrics[-1]["step"], "the workers' last act was a checkpoint"
    assert not (job.directory / "summary.json").exists()
    assert_resumes(job, saved, 1, [*TRAINING, *chaos(tmp_path)], undisturbed)


@pytest.mark.full
@pytest.mark.jobs
def test_a_run_is_not_gone_on_with_before_its_last_worker_has_ended(undisturbed: Job, tmp_path: Path) -> None:
    """Its supervisor is killed while the leader is stopped, whose last checkpoint is what the next job begins with."""
    settings = [*TRAINING, *CHECKPOINTS]
    slowly = [*settings, "workers.count=2", *chaos(tmp_path, pace_s=0.05)]
    with command_line(tmp_path / "run", slowly) as (process, job):
        wait_until("40 steps", lambda: len(job.metrics) >= 40)
        leader = ranks(job.views[0])[0]
        os.kill(leader, signal.SIGSTOP)
        process.kill()
        process.wait()
        with command_line(job.directory, [*settings, *chaos(tmp_path)]) as (again, resumed):
            log = job.directory.with_suffix(".log")
            wait_until("it to wait", lambda: "waiting until the processes of the run in it" in log.read_text())
            os.kill(leader, signal.SIGCONT)
            assert again.wait(DEADLINE_S) == 0
    assert [event["step"] >= 40 for event in resumed.of_kind("resumed")] == [True]
    assert_same_steps(resumed, undisturbed)


@pytest.mark.full
@pytest.mark.jobs
def test_a_supervisor_that_is_stopped_for_a_while_is_waited_for(undisturbed: Job, tmp_path: Path) -> None:
    """For three times as long as a worker may send nothing, while a new one boots, and a view is to be formed."""
    grows = {"phases": [{"step": 10, "workers": 3}], "gates": [{"step": 60, "workers": 3}]}
    settings = [*TRAINING, "workers.count=2", "elastic.heartbeat_timeout_s=2", *chaos(tmp_path, pace_s=0.05, **grows)]
    with command_line(tmp_path / "run", settings) as (process, job):
        wait_until("12 steps", lambda: len(job.metrics) >= 12)
        process.send_signal(signal.SIGSTOP)
        time.sleep(6)
        process.send_signal(signal.SIGCONT)
        assert process.wait(DEADLINE_S) == 0
    assert_same_training(job, undisturbed)
    assert [view["reason"] for view in job.views] == ["start", "grow"] and job.of_kind("failure") == []


@pytest.mark.full
def test_a_signal_ends_the_run_in_order(undisturbed: Job, tmp_path: Path) -> None:
    """After it has grown: what the checkpoint says of views and of the signal is of a run that is over."""
    settings = [*TRAINING, "checkpoint.every_steps=1000"]
    grows = {"phases": [{"step": 5, "workers": 2}], "gates": [{"step": 15, "workers": 2}]}
    with command_line(tmp_path / "run", [*settings, *chaos(tmp_path, pace_s=0.1, **grows)]) as (process, job):
        wait_until("20 steps", lambda: len(job.metrics) >= 20)
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 143
        assert_none_left(job.pids)
    assert len(job.pids) == 2
    assert job.summary["exit_reason"] == "terminated" and job.summary["params_sha256"] is not None
    assert 20 <= job.summary["steps"] == len(job.metrics) < len(undisturbed.metrics)
    assert not any("Traceback" in line for line in job.lines)
    saved = [event["step"] for event in job.of_kind("checkpoint")]
    assert saved == [job.summary["steps"]]
    assert_resumes(job, saved[0], 1, [*settings, *chaos(tmp_path)], undisturbed)


@pytest.mark.full
@pytest.mark.jobs
def test_a_worker_lost_as_the_job_resumes(undisturbed: Job, tmp_path: Path) -> None:
    """The leader has the checkpoint's state, and the other is killed before it has: training has begun all the same."""
    events = without_supervisor(tmp_path).events
    kills = [{"step": 0, "moment": "receiver", "rank": 1, "how": "kill"}]
    settings = [*TRAINING, "workers.count=2", *chaos(tmp_path, events=kills), "checkpoint.resume=auto"]
    job = run_job(tmp_path / "run", settings)
    assert_same_training(job, undisturbed)
    assert [view["reason"] for view in job.views] == ["start", "failure", "grow"]
    assert job.events[: len(events)] == events and not job.of_kind("clipped")


@pytest.mark.full
@pytest.mark.jobs
def test_a_loss_while_the_job_stops_costs_no_checkpoint(undisturbed: Job, tmp_path: Path) -> None:
    """SIGTERM to every process, as of Slurm and systemd, is the supervisor's to answer."""

    async def preempt(supervisor: Supervisor, job: Job) -> None:
        await until("20 steps", lambda: len(job.metrics) >= 20)
        for rank, pid in enumerate(ranks(job.views[-1])):
            os.kill(pid, signal.SIGTERM if rank else signal.SIGKILL)
        supervisor.stop("terminated")

    settings = [*TRAINING, *chaos(tmp_path, pace_s=0.1), "workers.count=3", "checkpoint.every_steps=50"]
    job = run_job(tmp_path / "run", settings, during=preempt)
    assert job.error is None and len(job.of_kind("failure")) == 1, job.told()
    assert job.summary["exit_reason"] == "terminated"
    assert [event["step"] for event in job.of_kind("checkpoint")] == [job.summary["steps"]]
    assert job.summary["steps"] < len(undisturbed.metrics)
    assert_exact(job)
    resumed = run_job(tmp_path / "run", [*TRAINING, *chaos(tmp_path), "checkpoint.resume=auto"])
    assert_same_training(resumed, undisturbed)


def test_a_store_that_is_closed_already_is_not_waited_for(capfd: pytest.CaptureFixture[str]) -> None:
    """As that of a view whose worker was lost before the others had come to it; torch would wait, and print a trace."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    checks = iter((False, True))

    def check() -> None:
        if next(checks):
            raise CommError("a worker was lost")

    with pytest.raises(CommError):
        rendezvous.connect_store("127.0.0.1", port, 10_000.0, check)
    assert capfd.readouterr().err == ""
