"""Jobs with elastic.keep_sums lose workers: the bits are those of an undisturbed run, and little is run again."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import test_redundancy_jobs as random_kills
from distributed import run_workers
from elastic_job import Job, assert_exact, assert_same_steps, chaos, run_job, words
from keep_policy import begun
from test_kfuse_run import run_script

from kfuse.train.evaluation import params_sha256

pytestmark = [pytest.mark.full, pytest.mark.jobs]

M = 12
TRAINING = words(
    f"model=mlp data=digits model.hidden=[24] model.dropout=0.1 batch.size={4 * M} batch.micro=4 train.steps=70",
    "train.clip_norm=0.5 lr.base=0.003 train.eval_every=100000 workers.max=4 elastic.max_failures=20 train.epochs=100",
    "comm.bucket_mb=0.002 comm.check_every=2 workers.balance=false",
)
KEEPS = ["elastic.keep_sums=true"]
REPRODUCIBLE = ["comm=reproducible"]


def event(step: int, moment: str, rank: int, workers: int = 3, **more: Any) -> dict[str, Any]:
    return {"step": step, "moment": moment, "rank": rank, "how": "kill", "workers": workers, **more}


def job_with(directory: Path, events: list[dict[str, Any]], settings: list[str], workers: int = 3) -> Job:
    """A job of `Counting` workers that these events befall, with an exact ledger."""
    policy = chaos(directory, events=events, adaptive=False)
    policy[0] = "policy._target_=keep_policy.Counting"
    job = run_job(directory / "run", [*TRAINING, *settings, *policy, f"workers.count={workers}"])
    assert job.error is None, job.told()
    assert len(job.of_kind("failure")) == len(events), job.told()
    assert_exact(job)
    return job


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return job_with(tmp_path_factory.mktemp("undisturbed"), [], REPRODUCIBLE, 1)


def again(job: Job, directory: Path) -> dict[int, int]:
    """By step, how many micro-batches were begun once more; steps without any are left out."""
    found = begun(directory / "events")
    extra = {record["step"]: found[record["step"]] - record["micro_batches"] for record in job.metrics}
    return {step: count for step, count in extra.items() if count}


def test_only_the_lost_workers_micro_batches_are_run_again(undisturbed: Job, tmp_path: Path) -> None:
    """Of the leader, and of others: in the reduction, when all that are lost had been run, and before."""
    events = [event(12, "mid_reduction", 0), event(28, "mid_reduction", 1), event(44, "forward", 2)]
    events = [{**each, "others": 8} for each in events]
    job = job_with(tmp_path, events, [*REPRODUCIBLE, *KEEPS])
    assert_same_steps(job, undisturbed)
    found = [(told["step"], told["kept"], told["run_again"]) for told in job.of_kind("kept_sums")]
    assert [told[1:] for told in found] == [(8, 4)] * 3
    extra = again(job, tmp_path)
    assert list(extra) == [told[0] for told in found]
    assert list(extra.values()) == [4, 4, 1], "the last one was lost as it began its first micro-batch"


def test_without_the_option_all_are_run_again(undisturbed: Job, tmp_path: Path) -> None:
    job = job_with(tmp_path, [event(12, "mid_reduction", 0, others=8)], REPRODUCIBLE)
    assert_same_steps(job, undisturbed)
    assert list(again(job, tmp_path).values()) == [M] and not job.of_kind("kept_sums")


def test_two_losses_in_one_step(undisturbed: Job, tmp_path: Path) -> None:
    """The second one as the step is made again, as the others recover, and at the same time."""
    events = [
        event(10, "mid_reduction", 0, 4, others=9),
        event(10, "mid_reduction", 1, 4, attempt=1),
        event(30, "mid_reduction", 3, 4, others=9),
        event(30, "recovery", 0, 4, attempt=0),
        event(50, "mid_reduction", 1, 4, attempt=0, others=8, together=2),  # each ends two of its three
        event(50, "mid_reduction", 2, 4, attempt=0, others=8, together=2),
    ]
    job = job_with(tmp_path, events, [*REPRODUCIBLE, *KEEPS], 4)
    assert_same_steps(job, undisturbed)
    extra = again(job, tmp_path)
    assert len(extra) == 3 and max(extra.values()) <= 3 + 4, extra


def test_down_to_one_worker(undisturbed: Job, tmp_path: Path) -> None:
    """What it kept and what it runs is all of the step. Each of the two lost has ended three of its four."""
    settings = [*REPRODUCIBLE, *KEEPS, "elastic.replace=false", "workers.min=1"]
    events = [event(12, "mid_reduction", rank, others=7, together=2) for rank in (0, 1)]
    job = job_with(tmp_path, events, settings)
    assert_same_steps(job, undisturbed)
    assert list(again(job, tmp_path).values()) == [8]
    assert job.metrics[-1]["workers"] == 1


MOMENTS = ("forward", "mid_reduction", "point", "reduced", "between_reduction_and_update", "after_step")


@pytest.mark.parametrize("settings", [[], ["comm.schedule=all_to_all"], ["comm.dtype=bf16"], REPRODUCIBLE])
def test_each_moment_of_a_step(settings: list[str], undisturbed: Job, tmp_path: Path) -> None:
    events = [event(6 + 10 * index, moment, index % 3) for index, moment in enumerate(MOMENTS)]
    job = job_with(tmp_path, events, [*settings, *KEEPS])
    if settings == REPRODUCIBLE:
        assert_same_steps(job, undisturbed)
    for ours, theirs in zip(job.metrics[:20], undisturbed.metrics, strict=False):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-2 if "comm.dtype=bf16" in settings else 1e-3)
    assert job.of_kind("kept_sums")


def with_random_kills(directory: Path, settings: list[str], workers: int, at_once: int = 1) -> Job:
    """A job whose workers are killed at random instants, with an exact ledger, in which sums were kept."""
    strikes = random_kills.Strikes([signal.SIGKILL] * random_kills.KILLS, 30 + workers, workers, at_once)
    more = [*settings, *KEEPS, f"workers.count={workers}"]
    job = run_job(directory / "run", [*random_kills.TRAINING, *more], strikes)
    assert job.error is None, job.told()
    assert_exact(job)
    assert job.of_kind("kept_sums")
    return job


@pytest.mark.parametrize(("workers", "at_once"), [(2, 1), (3, 1), (4, 1), (4, 2)])
def test_random_kills_leave_the_bits(workers: int, at_once: int, tmp_path: Path) -> None:
    job = with_random_kills(tmp_path, REPRODUCIBLE, workers, at_once)
    assert_same_steps(job, random_kills.undisturbed(tmp_path, job, REPRODUCIBLE))


@pytest.mark.parametrize("schedule", ["allreduce", "all_to_all", "tree"])
def test_random_kills_leave_one_model_on_all_workers(schedule: str, tmp_path: Path) -> None:
    """All workers' parameters are compared in each step. Sums differ from an undisturbed run's by rounding alone."""
    settings = [f"comm.schedule={schedule}", "comm.check_every=1"]
    job = with_random_kills(tmp_path, settings, 3)
    alone = random_kills.undisturbed(tmp_path, job, [])
    for record, other in zip(job.metrics[:20], alone.metrics, strict=False):
        assert record["loss"] == pytest.approx(other["loss"], rel=1e-3)


def test_with_loader_processes_audits_and_batch_norm(tmp_path: Path) -> None:
    """What audited steps lose is run again as a whole."""
    settings = [*REPRODUCIBLE, "data.workers=1", "comm.audit_every=5"]
    events = [event(11, "mid_reduction", 1), event(25, "mid_reduction", 0), event(35, "audit", 1)]
    job = job_with(tmp_path / "lost", events, [*settings, *KEEPS])
    assert_same_steps(job, job_with(tmp_path / "undisturbed", [], settings, 1))
    assert not job.of_kind("corruption")


LOOP = """
import os, signal, time
import torch
from torch import nn
import kfuse as kf

kf.init(kf.CommOptions(reproducible=True, keep_sums=DIES))  # one process alone: refused
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
opt = kf.FusedAdamW(model.parameters(), lr=0.01)
x = torch.randn(240, 8)
ran = 0
for step in kf.DataLoader((x, x.sum(1, keepdim=True)), model, opt, batch_size=40, micro_batch=4, epochs=5):
    for features, target in step:
        if DIES and step.number == 10 and kf.size() == 3 and kf.rank() == 1 and len(step) > 1 and ran:
            while not (os.path.exists("ended 0") and os.path.exists("ended 2")):  # the others have run theirs
                time.sleep(0.002)
            os.kill(os.getpid(), signal.SIGKILL)
        ran += step.number == 10
        loss = nn.functional.mse_loss(model(features), target)
        loss.backward()
        step.loss = loss
        if DIES and step.number == 10 and ran == len(step):
            open(f"ended {kf.rank()}", "w").close()
    opt.step()
    opt.zero_grad()
if DIES and kf.rank() == 0:
    open("ran", "w").write(str(ran))
"""


def alone() -> str:
    names: dict[str, Any] = {"DIES": False}
    exec(LOOP, names)
    return params_sha256(names["model"])


def test_a_loop_of_ones_own_runs_what_is_missing(tmp_path: Path) -> None:
    ended = run_script(tmp_path, "DIES = True\n" + LOOP, "--no-replace", "--quiet", workers=3)
    assert ended.status == 0, ended.said
    assert ended.steps == list(range(30)) and len(ended.of_kind("failure")) == 1
    assert [(told["step"], told["kept"] + told["run_again"]) for told in ended.of_kind("kept_sums")] == [(10, 10)]
    assert int((tmp_path / "ran").read_text()) <= 4 + 2, "its own, and half of what was lost"
    assert run_workers(1, alone) == [ended.summary["params_sha256"]]
