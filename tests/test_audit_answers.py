"""What follows where an audit finds wrong gradients: the worker is replaced, or the job stops before the wrong update.

A worker's fault begins in an audited step that finds it: a wrong gradient that got into parameters before stays there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import faulty
import pytest
import torch
from elastic_job import assert_same_training, changes, chaos, events, reference, run_job, words

import kfuse as kf

EVERY, STEPS, GATE = 2, 40, 36
TRAINING = words(
    "comm=reproducible comm.bucket_mb=0.002 train.clip_norm=0.5 lr.base=0.003 data=digits",
    f"model._target_=faulty.Faulty batch.size=24 batch.micro=4 batch.max=64 train.steps={STEPS}",
)
AUDITED = [f"comm.audit_every={EVERY}", "comm.audit_on_corruption=replace"]
SHARDED = ["comm.state=sharded"]


def owner(step: int, workers: int = 3) -> int:
    """The rank whose micro-batch is audited in the step; the next one runs it again."""
    return step // EVERY % workers


def assert_replaced(
    folder: Path,
    rank: int,
    step: int,
    moment: str,
    *more: str,
    also: Sequence[dict[str, Any]] = (),
    grows: bool = False,
) -> None:
    """The worker of this rank of three, whose gradients are wrong from that moment of the step on, is replaced.

    also: further events. grows: a fourth worker is asked for as it happens.
    """
    arguments: dict[str, Any] = {"events": [*events(f"{step} {moment} {rank} by wrong of 3"), *also]}
    arguments["gates"] = changes(f"{GATE}:{3 + grows}")
    arguments["phases"] = changes(f"{step + 5}:4" if grows else "")  # it is asked for some steps before
    settings = [*TRAINING, *AUDITED, "workers.count=3", f"workers.max={3 + grows}", *more, *chaos(folder, **arguments)]
    job = run_job(folder / "run", settings)
    assert_same_training(job, reference(TRAINING))
    mark = json.loads((folder / "events" / "event-0").read_text())
    assert mark["step"] == step, "the fault began in another step"
    [event] = job.of_kind("corruption")
    assert (event["step"], event["worker"], event["rank"]) == (step, rank, rank)
    assert mark["pid"] == next(run["pid"] for run in event["runs"] if run["rank"] == rank)
    [failure] = [each for each in job.of_kind("failure") if each["pid"] == mark["pid"]]
    assert failure["how"] == f"computed a wrong gradient at step {step} and was killed"
    assert len(job.of_kind("failure")) == 1 + len(also)
    assert all(mark["pid"] != worker["pid"] for view in job.views[1:] for worker in view["workers"])
    assert len(job.views[-1]["workers"]) == 3 + grows, "by then another one has come"


@pytest.mark.full
@pytest.mark.jobs
def test_a_leader_that_computes_wrongly_is_replaced(tmp_path: Path) -> None:
    """Its own gradients are in the sum. With sharded state others have copies of what it had."""
    step = 12
    assert owner(step) == 0
    assert_replaced(tmp_path, 0, step, "forward", *SHARDED)


@pytest.mark.full
@pytest.mark.jobs
def test_of_two_workers_none_is_named_and_only_a_fault_that_lasts_ends_the_job(tmp_path: Path) -> None:
    once, lasting = 10, 22
    assert owner(once, 2) == owner(lasting, 2) == 1
    wrong = events(f"{once} reduced 0 by wrong_once, {lasting} reduced 0 by wrong")
    saves = ["workers.count=2", "workers.max=3", "checkpoint.every_steps=1000", "checkpoint.resume=auto", *AUDITED]
    job = run_job(tmp_path / "run", [*TRAINING, *saves, *chaos(tmp_path, events=wrong)])
    assert [event["step"] for event in job.of_kind("corruption")] == [once, lasting]
    assert job.of_kind("failure") == [], "a step that is made again is no loss"
    assert re.fullmatch(
        rf"step {lasting}: audit: worker 1 \(rank 1, pid \d+, host \S+\), worker 0 \(rank 0, pid \d+, host \S+\) "
        r"computed different gradients of micro-batch \d+: one of them computes wrongly",
        job.error or "",
    ), job.told()
    resumed = run_job(tmp_path / "run", [*TRAINING, *saves, *chaos(tmp_path / "resumed")])
    assert [event["step"] for event in resumed.of_kind("resumed")] == [lasting]
    assert_same_training(resumed, reference(TRAINING))


@pytest.mark.full
@pytest.mark.jobs
def test_a_job_stops_before_the_update_with_a_wrong_gradient(tmp_path: Path) -> None:
    step, rank = 14, 2
    assert owner(step) == rank - 1
    saves = [*SHARDED, *words("workers.count=3 workers.max=3 checkpoint.every_steps=1000 checkpoint.resume=auto")]
    saves += [AUDITED[0], "comm.audit_on_corruption=stop"]
    wrong = events(f"{step} forward {rank} by wrong of 3")
    job = run_job(tmp_path / "run", [*TRAINING, *saves, *chaos(tmp_path, events=wrong)])
    named = rf"step {step}: audit: worker {rank} \(rank {rank}, pid \d+, host \S+\) computes wrongly: "
    assert re.match(named, job.error or ""), job.told()
    assert [event["worker"] for event in job.of_kind("corruption")] == [rank]
    assert job.of_kind("failure") == []
    resumed = run_job(tmp_path / "run", [*TRAINING, *saves, *chaos(tmp_path / "resumed")])
    assert [event["step"] for event in resumed.of_kind("resumed")] == [step]
    assert_same_training(resumed, reference(TRAINING))


@pytest.mark.long
@pytest.mark.jobs
@pytest.mark.parametrize("run", range(20))
def test_each_worker_is_replaced_at_any_moment(tmp_path: Path, run: int) -> None:
    """Each rank as the owner and as the one that runs it again, whose own gradients are right or wrong; alone, with
    checkpoints of all steps, as one more is asked for, and with another worker lost in the recovery.
    """
    rank, step = run % 3, 10 + 2 * (run % 7)
    as_owner = owner(step) == rank
    while not as_owner and owner(step) != (rank - 1) % 3:
        step += EVERY
        as_owner = owner(step) == rank
    moment = "forward" if as_owner or run % 4 < 2 else "reduced"
    more, also = SHARDED if run % 2 else [], events("")
    if run % 5 == 1:
        more = [*more, "checkpoint.every_steps=1"]
    elif run % 5 == 3 and not run % 2:
        also = events(f"{step} recovery {run // 5 % 2}")
    assert_replaced(tmp_path, rank, step, moment, *more, also=also, grows=run % 5 == 2)


class WrongInStep(kf.BasePolicy):
    """All micro-batches of a step have wrong gradients; where one is run again it has not."""

    def __init__(self, step: int) -> None:
        self._coming, self._wrong = 0, step

    def before_step(self) -> None:
        faulty.wrong_backwards = 3 if self._coming == self._wrong else 0
        self._coming += 1


def test_training_stops_with_a_checkpoint_of_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On one worker, which runs each audited micro-batch twice."""
    x = torch.randn(36, 5, generator=torch.Generator().manual_seed(0))
    kf.init(comm_reproducible=True, comm_audit_every=1, comm_audit_on_corruption="stop")

    def train(folder: Path, wrong_step: int = -1) -> list[Any]:
        torch.manual_seed(3)
        net = faulty.Faulty((5,), 4)
        opt, saved = kf.FusedAdamW(net.parameters(), lr=0.02), {"checkpoint_dir": folder, "checkpoint_resume": "auto"}
        given: dict[str, Any] = {"epochs": 2, "batch_size": 12, "micro_batch": 4, **saved}
        summary = kf.fit(net, (x, (x[:, 0] > 0).long()), opt, WrongInStep(wrong_step), **given)
        assert summary is not None
        return [summary["params_sha256"], *(buffer.tolist() for buffer in net.buffers())]

    with pytest.raises(
        kf.ConsistencyError, match=r"^step 4: audit: worker 0 \(rank 0, pid \d+, host \S+\) computed diff"
    ):
        train(tmp_path / "stopped", 4)
    assert (tmp_path / "stopped" / "step-00000004").is_dir()
    assert train(tmp_path / "stopped") == train(tmp_path / "undisturbed")
    assert "audit" not in caplog.text, "the error says it"
