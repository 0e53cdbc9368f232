"""A job survives the loss of all its workers or of its supervisor, signals and notices, and measures links."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from chaos import Chaos
from elastic_job import (
    DEADLINE_S,
    Job,
    assert_exact,
    assert_none_left,
    assert_same_steps,
    assert_same_training,
    changes,
    chaos,
    command_line,
    events,
    pids,
    reference,
    run_job,
    until,
    wait_until,
    words,
)
from test_jobs import assert_noticed

import kfuse as kf
from kfuse.comm.group import CommError
from kfuse.elastic import rendezvous
from kfuse.elastic.launchers import LocalLauncher
from kfuse.elastic.supervisor import Supervisor

TRAINING = words(
    "comm=reproducible comm.bucket_mb=0.002 train.clip_norm=0.5 lr.base=0.003 workers.max=4 model=mlp data=digits",
    "model.hidden=[24] model.dropout=0.1 batch.size=16 batch.micro=4 batch.max=64 train.epochs=4",
    "train.heldout_every=20",
)
SHARDS = words(
    "comm=reproducible comm.bucket_mb=0.06 train.clip_norm=0.5 lr.base=0.003 workers.max=4 model=mlp data=digits",
    "model.hidden=[200,100] model.dropout=0.1 batch.size=16 batch.micro=4 batch.max=64 train.steps=60",
    "train.heldout_every=20",
)
CHECKPOINTS = ["checkpoint.every_steps=25"]


# -- planned changes ----------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.jobs
def test_a_newcomer_waits_for_slow_steps(tmp_path: Path) -> None:
    """It knows of its view some steps before the others come to it: here three of 1.3 s, with a timeout of 3.5 s."""
    grows = {"phases": changes("2:2"), "gates": changes("10:2")}
    settings = [*TRAINING, *chaos(tmp_path, pace_s=1.3, paced=9, **grows), "comm.timeout_s=3.5", "train.steps=12"]
    job = run_job(tmp_path / "run", settings)
    assert job.error is None, job.told()
    assert [view["reason"] for view in job.views] == ["start", "grow"]
    assert job.summary["loss"] == reference(TRAINING).metrics[11]["loss"]


# -- all workers are lost -----------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_job_that_gives_up_leaves_a_last_checkpoint(tmp_path: Path) -> None:
    """Each leader is killed in the same step. The worker that is left was none, and has the state."""
    kills = events("40 mid_reduction 0")
    settings = [*TRAINING, *CHECKPOINTS, "workers.count=3", "elastic.max_failures=2", "elastic.replace=false"]
    job = run_job(tmp_path / "run", [*settings, *chaos(tmp_path, events=kills, again=True)])
    assert job.error is not None and job.error.startswith("2 workers were lost in a row"), job.told()
    assert [event["step"] for event in job.of_kind("checkpoint")] == [25, 40]
    resumed = run_job(tmp_path / "run", [*TRAINING, *CHECKPOINTS, *chaos(tmp_path), "checkpoint.resume=auto"])
    assert_same_training(resumed, reference(TRAINING))


# -- the supervisor is stopped or lost ----------------------------------------------------------------------------


def assert_resumes(job: Job, step: int, workers: int, settings: list[str]) -> None:
    """The same run directory, on another number of workers, to its end; which is not overwritten."""
    for status in (0, 2):
        with command_line(job.directory, [*settings, f"workers.count={workers}"]) as (process, resumed):
            assert process.wait(DEADLINE_S) == status
        assert_none_left(resumed.pids)
        assert_same_training(resumed, reference(TRAINING))
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
def test_a_killed_supervisor_leaves_a_checkpoint_and_no_worker(tmp_path: Path) -> None:
    """Also where none were asked for."""
    job = without_supervisor(tmp_path)
    [saved] = [int(path.name.removeprefix("step-")) for path in (job.directory / "checkpoints").glob("step-*")]
    assert saved > job.metrics[-1]["step"], "the workers' last act was a checkpoint"
    assert not (job.directory / "summary.json").exists()
    assert_resumes(job, saved, 1, [*TRAINING, *chaos(tmp_path)])


@pytest.mark.full
@pytest.mark.jobs
def test_a_run_is_not_gone_on_with_before_its_last_worker_has_ended(tmp_path: Path) -> None:
    """Its supervisor is killed while the leader is stopped, whose last checkpoint is what the next job begins with."""
    settings = [*TRAINING, *CHECKPOINTS]
    slowly = [*settings, "workers.count=2", *chaos(tmp_path, pace_s=0.05)]
    with command_line(tmp_path / "run", slowly) as (process, job):
        wait_until("40 steps", lambda: len(job.metrics) >= 40)
        leader = pids(job.views[0])[0]
        os.kill(leader, signal.SIGSTOP)
        process.kill()
        process.wait()
        with command_line(job.directory, [*settings, *chaos(tmp_path)]) as (again, resumed):
            log = job.directory.with_suffix(".log")
            wait_until("it to wait", lambda: "waiting until the processes of the run in it" in log.read_text())
            os.kill(leader, signal.SIGCONT)
            assert again.wait(DEADLINE_S) == 0
    assert [event["step"] >= 40 for event in resumed.of_kind("resumed")] == [True]
    assert_same_steps(resumed, reference(TRAINING))


@pytest.mark.full
@pytest.mark.jobs
def test_a_supervisor_that_is_stopped_for_a_while_is_waited_for(tmp_path: Path) -> None:
    """For three times as long as a worker may send nothing, while a new one boots, and a view is to be formed."""
    grows = {"phases": changes("10:3"), "gates": changes("60:3")}
    settings = [*TRAINING, "workers.count=2", "elastic.heartbeat_timeout_s=2", *chaos(tmp_path, pace_s=0.05, **grows)]
    with command_line(tmp_path / "run", settings) as (process, job):
        wait_until("12 steps", lambda: len(job.metrics) >= 12)
        process.send_signal(signal.SIGSTOP)
        time.sleep(6)
        process.send_signal(signal.SIGCONT)
        assert process.wait(DEADLINE_S) == 0
    assert_same_training(job, reference(TRAINING))
    assert [view["reason"] for view in job.views] == ["start", "grow"] and job.of_kind("failure") == []


@pytest.mark.full
def test_a_signal_ends_the_run_in_order(tmp_path: Path) -> None:
    """After it has grown: what the checkpoint says of views and of the signal is of a run that is over."""
    settings = [*TRAINING, "checkpoint.every_steps=1000"]
    grows = {"phases": changes("5:2"), "gates": changes("15:2")}
    with command_line(tmp_path / "run", [*settings, *chaos(tmp_path, pace_s=0.1, **grows)]) as (process, job):
        wait_until("20 steps", lambda: len(job.metrics) >= 20)
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 143
        assert_none_left(job.pids)
    assert len(job.pids) == 2
    assert job.summary["exit_reason"] == "terminated" and job.summary["params_sha256"] is not None
    assert 20 <= job.summary["steps"] == len(job.metrics) < len(reference(TRAINING).metrics)
    assert not any("Traceback" in line for line in job.lines)
    saved = [event["step"] for event in job.of_kind("checkpoint")]
    assert saved == [job.summary["steps"]]
    assert_resumes(job, saved[0], 1, [*settings, *chaos(tmp_path)])


@pytest.mark.full
@pytest.mark.jobs
def test_a_worker_lost_as_the_job_resumes(tmp_path: Path) -> None:
    """The leader has the checkpoint's state, and the other is killed before it has: training has begun all the same."""
    before = without_supervisor(tmp_path).events
    kills = events("0 receiver 1")
    settings = [*TRAINING, "workers.count=2", *chaos(tmp_path, events=kills), "checkpoint.resume=auto"]
    job = run_job(tmp_path / "run", settings)
    assert_same_training(job, reference(TRAINING))
    assert [view["reason"] for view in job.views] == ["start", "failure", "grow"]
    assert job.events[: len(before)] == before and not job.of_kind("clipped")


@pytest.mark.full
@pytest.mark.jobs
def test_a_loss_while_the_job_stops_costs_no_checkpoint(tmp_path: Path) -> None:
    """SIGTERM to every process, as of Slurm and systemd, is the supervisor's to answer."""

    async def preempt(supervisor: Supervisor, job: Job) -> None:
        await until("20 steps", lambda: len(job.metrics) >= 20)
        for rank, pid in enumerate(pids(job.views[-1])):
            os.kill(pid, signal.SIGTERM if rank else signal.SIGKILL)
        supervisor.stop("terminated")

    settings = [*TRAINING, *chaos(tmp_path, pace_s=0.1), "workers.count=3", "checkpoint.every_steps=50"]
    job = run_job(tmp_path / "run", settings, during=preempt)
    assert job.error is None and len(job.of_kind("failure")) == 1, job.told()
    assert job.summary["exit_reason"] == "terminated"
    assert [event["step"] for event in job.of_kind("checkpoint")] == [job.summary["steps"]]
    assert job.summary["steps"] < len(reference(TRAINING).metrics)
    assert_exact(job)
    resumed = run_job(tmp_path / "run", [*TRAINING, *chaos(tmp_path), "checkpoint.resume=auto"])
    assert_same_training(resumed, reference(TRAINING))


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


@pytest.mark.full
@pytest.mark.jobs
@pytest.mark.parametrize("checkpoints", [True, False])
def test_an_error_that_comes_again_at_its_step_ends_the_job(checkpoints: bool, tmp_path: Path) -> None:
    """A mistake at step 9 ends every worker that comes to it."""
    struck = chaos(tmp_path, events=events("9 forward 0 by exception of 1"), again=True)
    settings = [*TRAINING, *struck, "workers.count=2"]
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


# -- notice: machines are about to be taken away ----------------------------------------------------------------------


@pytest.mark.full
def test_where_a_whole_job_gets_it_the_job_stops_with_a_last_checkpoint(tmp_path: Path) -> None:
    settings = [*SHARDS, "workers.count=3", "checkpoint.every_steps=50", "elastic.notice_signals=[SIGUSR1]"]
    with command_line(tmp_path / "run", [*settings, *chaos(tmp_path, pace_s=0.2)]) as (process, job):
        wait_until("10 steps", lambda: len(job.metrics) >= 10)
        for pid in [*pids(job.views[0]), process.pid]:
            os.kill(pid, signal.SIGUSR1)
        assert process.wait(DEADLINE_S) == 143
        assert_none_left(job.pids)
    assert job.summary["exit_reason"] == "terminated" and job.of_kind("failure") == []
    assert [event["step"] for event in job.of_kind("checkpoint")] == [job.summary["steps"]]
    resumed = run_job(tmp_path / "run", [*SHARDS, *chaos(tmp_path), "checkpoint.resume=auto"])
    assert_same_training(resumed, reference(SHARDS))


@pytest.mark.full
@pytest.mark.jobs
@pytest.mark.parametrize("seed", range(2))
def test_notices_at_random_moments(seed: int, tmp_path: Path) -> None:
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
    job = run_job(tmp_path / "run", [*SHARDS, "comm.state=sharded", "workers.count=3", *policy], take_away)
    assert_same_training(job, reference(SHARDS))
    assert len(job.of_kind("notice")) > 5
    assert_noticed(job, len(job.of_kind("notice")))


# -- trees ------------------------------------------------------------------------------------------------------------

TREES = words(
    "comm.bucket_mb=0.002 workers.max=4 model=mlp data=digits model.hidden=[24] batch.size=16 batch.micro=4",
    "batch.max=16 train.epochs=1 comm.tree=latency",
)


class Lists(Chaos):
    """Chaos, a list of parents at step 24, and one that is no tree. Links have been measured."""

    def decide(self, signals: kf.Signals) -> kf.Decision | None:
        decision = super().decide(signals) or kf.Decision()
        if tree := {22: [0, 1, 2], 24: [2, 2, 2]}.get(signals.step):
            assert signals.link_latencies is not None and signals.link_throughputs is not None
            assert (signals.link_latencies[1][1], signals.link_throughputs[1][1]) == (0.0, None)
            decision = decision.merged(kf.Decision(tree=tree))
        return None if decision.is_empty else decision


@pytest.mark.full
def test_each_view_is_measured_and_a_list_is_dropped_when_a_worker_is_lost(tmp_path: Path) -> None:
    """Two workers, three, two. A joiner comes to the same messages as those who are there."""
    arguments = {
        "adaptive": False,
        "topologies": [{"step": 14, "topology": "tree"}],
        "phases": changes("2:3"),
        "gates": changes("12:3"),
        "events": events("40 between_reduction_and_update 1 of 3"),
    }
    policy = [word.replace("chaos.Chaos", "test_elastic.Lists") for word in chaos(tmp_path, **arguments)]
    job = run_job(tmp_path / "run", [*TREES, "workers.count=2", "workers.min=2", *policy])
    assert_exact(job)
    views = [(view["reason"], len(view["workers"])) for view in job.views]
    assert views[0] == ("start", 2) and views[1][1] == 3 and views[2] == ("failure", 2), job.told()
    [note] = [event["note"] for event in job.of_kind("clipped")]
    assert note.startswith("tree [0, 1, 2]: must have one") and note.endswith("; it stays as it is")
    lost = job.views[2]["step"]
    trees = [(event["tree"], event.get("why")) for event in job.of_kind("decision") if "tree" in event]
    assert trees == [([2, 2, 2], None), ("latency", "the workers have changed")]
    [*_, dropped] = [event["step"] for event in job.of_kind("decision") if "tree" in event]
    assert lost - 1 <= dropped <= lost
    measured = job.of_kind("links")
    assert [len(event["latency_s"]) for event in measured] == [len(view["workers"]) for view in job.views]
    for event in measured:
        for a, b in product(range(len(event["latency_s"])), repeat=2):
            known = event["bytes_per_s"][a][b]
            assert (known is None and event["latency_s"][a][b] == 0) if a == b else known > 0
    chosen = job.of_kind("schedule")
    assert [event["workers"] for event in chosen] == [2, 3], "later the tree is decided upon"
    assert all(event["schedule"] in event["predicted_s"] and event["probe_s"] > 0 for event in chosen)
    assert chosen[0]["probe_s"] == chosen[1]["probe_s"], "on the same machine nothing is measured again"
