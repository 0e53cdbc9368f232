"""Jobs with sharded state lose workers at random instants, and in loops of one's own, and move shards.

With the bits of an undisturbed run where the state has a mirror; test_jobs has more.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from distributed import run_workers
from elastic_job import (
    Job,
    assert_exact,
    assert_same_steps,
    assert_same_training,
    chaos,
    events,
    pids,
    reference,
    run_job,
    script_job,
    until,
    words,
)

from kfuse.elastic.processes import State
from kfuse.elastic.supervisor import Supervisor
from kfuse.train.evaluation import params_sha256

pytestmark = [pytest.mark.full, pytest.mark.jobs]

TRAINING = words(
    "model=mlp data=digits model.hidden=[160,96] model.dropout=0.1 batch.size=48 batch.micro=4 train.epochs=10000",
    "policy=none train.clip_norm=0.5 lr.base=0.003 train.heldout_every=100000 workers.max=4 elastic.max_failures=20",
    "comm.bucket_mb=0.06",  # four blocks of parameters in each bucket: the shards of up to four workers
)
WIDE = words(
    "comm=reproducible comm.bucket_mb=0.06 train.clip_norm=0.5 lr.base=0.003 workers.max=4 model=mlp data=digits",
    "model.hidden=[200,100] model.dropout=0.1 batch.size=16 batch.micro=4 batch.max=64 train.heldout_every=20",
)
LAMB = [*WIDE, *words("train.epochs=2 optimizer=lamb train.precision=bf16-true")]
SIXTY = [*WIDE, "train.steps=60"]
REPRODUCIBLE = ["comm=reproducible"]
SHARDED = ["comm.state=sharded"]
KILLS = int(os.environ.get("KFUSE_KILLS", "3"))
"""In each job."""


class Strikes:
    """Signals that a job's workers get at random instants: `during` of `run_job`. Then the job is told to stop."""

    def __init__(self, signals: Sequence[int], seed: int, workers: int, at_once: int = 1) -> None:
        """signals: one after the other, each to `at_once` workers, once all `workers` are back. seed: of instants and
        victims.
        """
        self._signals, self._chance, self._workers, self._at_once = signals, random.Random(seed), workers, at_once
        self.struck: list[int] = []

    async def __call__(self, supervisor: Supervisor, job: Job) -> None:
        for sent in self._signals:
            await self._steps(supervisor)
            await asyncio.sleep(self._chance.uniform(0, 0.15))
            members = supervisor.processes.members()
            for victim in self._chance.sample(members, min(self._at_once, len(members))):
                assert victim.pid is not None
                os.kill(victim.pid, sent)
                self.struck.append(victim.pid)
            gone = self.struck[-1]
            await until(
                "the loss to be known",
                lambda gone=gone: gone not in [w.pid for w in supervisor.processes.members()],  # type: ignore[misc]
            )
        await self._steps(supervisor)
        supervisor.stop("interrupted")

    async def _steps(self, supervisor: Supervisor) -> None:
        """All workers are back, and have made some steps."""
        await until("all workers to be back", lambda: self._settled(supervisor))
        goal = supervisor.records.furthest + 3
        await until("some steps", lambda: supervisor.records.furthest > goal)

    def _settled(self, supervisor: Supervisor) -> bool:
        members = supervisor.processes.members()
        return len(members) == self._workers and all(worker.state is State.MEMBER for worker in members)


def struck(directory: Path, settings: Sequence[str], strikes: Strikes, workers: int) -> Job:
    """The job after all strikes, with an exact ledger."""
    job = run_job(directory / "run", [*TRAINING, *SHARDED, *settings, f"workers.count={workers}"], strikes)
    assert job.error is None, job.told()
    lost = {failure["pid"] for failure in job.of_kind("failure")}
    assert set(strikes.struck) <= lost, job.told()
    assert_exact(job)
    return job


@pytest.mark.parametrize(
    ("signals", "workers", "more"),
    [
        ([signal.SIGKILL] * KILLS, 2, "optimizer=lamb"),
        ([signal.SIGSTOP, *[signal.SIGKILL] * KILLS], 3, "train.precision=bf16-true elastic.heartbeat_timeout_s=3"),
    ],
)
def test_random_kills_leave_the_bits(signals: list[int], workers: int, more: str, tmp_path: Path) -> None:
    """A worker that hangs is killed after a while. The masters of bf16 parameters are sharded, and mirrored."""
    settings = [*REPRODUCIBLE, *words(more)]
    job = struck(tmp_path, settings, Strikes(signals, workers, workers), workers)
    assert_same_steps(job, undisturbed(tmp_path, job, settings))
    assert not job.of_kind("went_back")


def test_without_reproducible_sums_no_state_is_torn(tmp_path: Path) -> None:
    """All workers' parameters are compared every second step, and the ledger is exact."""
    job = struck(tmp_path, ["comm.check_every=2"], Strikes([signal.SIGKILL] * KILLS, 7, 3), 3)
    assert not job.of_kind("went_back")
    alone = undisturbed(tmp_path, job, [])
    for record, other in zip(job.metrics[:20], alone.metrics, strict=False):
        assert record["loss"] == pytest.approx(other["loss"], rel=1e-3)


def test_none_without_a_checkpoint_ends_the_job(tmp_path: Path) -> None:
    settings = [*TRAINING, *SHARDED, *REPRODUCIBLE, *chaos(tmp_path, events=events("20 forward 1 of 3"))]
    job = run_job(tmp_path / "run", [*settings, "elastic.redundancy=none", "workers.count=3"])
    assert job.error is not None and "there is no checkpoint to go on from" in job.error, job.told()


def undisturbed(directory: Path, job: Job, settings: list[str]) -> Job:
    """The same steps on one worker, with replicated state."""
    steps = f"train.steps={job.summary['steps']}"
    return run_job(directory / "alone", [*TRAINING, *settings, steps, "workers.count=1", "checkpoint.every_steps=null"])


# -- shards move ------------------------------------------------------------------------------------------------------


def test_saved_on_three_workers_and_resumed_on_others(tmp_path: Path) -> None:
    """Also with replicated state: a checkpoint does not depend on where the state lies."""
    plain = chaos(tmp_path)
    saving = chaos(tmp_path, checkpoints={"directory": str(tmp_path / "first" / "checkpoints"), "every": 15})
    first = run_job(
        tmp_path / "first",
        [*LAMB, *saving, *SHARDED, "workers.count=3", "checkpoint.every_steps=15", "train.steps=40"],
    )
    assert first.error is None, first.told()
    saved = sorted(path.name for path in (first.directory / "checkpoints").iterdir())
    assert saved == ["step-00000015", "step-00000030", "step-00000040"]
    for workers, state in ((4, SHARDED), (1, [])):
        resume = f"checkpoint.resume={first.directory / 'checkpoints' / saved[1]}"
        job = run_job(tmp_path / f"on {workers}", [*LAMB, *plain, *state, f"workers.count={workers}", resume])
        assert job.error is None, job.told()
        assert [event["step"] for event in job.of_kind("resumed")] == [30]
        assert job.summary["params_sha256"] == reference(LAMB).summary["params_sha256"], workers


def test_one_that_is_replaced_stays_until_a_loss_is_recovered_from(tmp_path: Path) -> None:
    """Worker 1 is lost as worker 0 hands over, whose shards it mirrors. Then worker 0 leaves after all."""
    end = tmp_path / "end"

    async def replace(supervisor: Supervisor, job: Job) -> None:
        await until("10 steps", lambda: len(job.metrics) >= 10)
        supervisor.roster.replace(0)
        await until("it to be replaced", lambda: len(job.views) > 2 and 0 not in members(supervisor))
        await until("three workers", lambda: len(job.views[-1]["workers"]) == 3)
        end.touch()

    settings = [*SHARDED, "workers.count=3"]
    policy = chaos(tmp_path, events=events("10 handing over 1 of 3"), until=str(end))
    job = run_job(tmp_path / "run", [*SIXTY, *settings, *policy], replace)
    assert_same_training(job, reference(SIXTY))
    assert [event["worker"] for event in job.of_kind("failure")] == [1]
    assert not job.of_kind("went_back")
    replaced = pids(job.views[0])[0]
    assert job.views[1]["reason"] == "failure" and replaced in pids(job.views[1])
    assert replaced not in pids(job.views[-1]) and job.statuses[replaced] == 0


def members(supervisor: Supervisor) -> list[int]:
    return [worker.number for worker in supervisor.processes.members()]


# -- loops of one's own ----------------------------------------------------------------------------------------------


HEAD = """
import sys, torch, torch.nn.functional as F, kfuse as kf
from chaos import Chaos

policy = Chaos(sys.argv[1], eval(sys.argv[2]), adaptive=False)
kf.init(comm_state="sharded", comm_reproducible=True, comm_bucket_mb=0.06)
torch.manual_seed(0)
x, y = torch.randn(240, 64), torch.randint(0, 3, (240,))
model = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.Tanh(), torch.nn.Linear(300, 3))
opt = kf.FusedAdamW(model.parameters(), lr=0.01, clip_norm=0.5)
settings = {"batch_size": 24, "micro_batch": 4, "epochs": 4}
"""
LOOP = """
for step in kf.DataLoader(model, (x, y), opt, policy=policy, **settings):
    for a, b in step:
        step.loss = F.cross_entropy(model(a), b)
        step.loss.backward()
    opt.step()
    opt.zero_grad()
"""
FIT = "kf.fit(model, (x, y), opt, policy, loss_fn=F.cross_entropy, **settings)"


def alone(script: str, folder: str) -> str:
    names: dict[str, Any] = {}
    with patch.object(sys, "argv", ["script.py", folder, "[]"]):
        exec(script, names)
    return params_sha256(names["model"])


@pytest.mark.parametrize(
    ("body", "happens", "failures"),
    [
        # Where its step's update was begun the body does not run again.
        (LOOP, "12 updating 1 of 3, 27 sharing 1 of 2", 2),
        # One worker has ended the step's update as another is lost, and the third's has failed in the last message.
        # The third takes the first one's state, and still has gradients of the step: the next step's are not added to
        # them.
        (FIT, "12 updated 0 by lose_contact of 3, 12 updated 2 of 3", 1),
    ],
)
def test_a_script_goes_on_with_the_same_bits(body: str, happens: str, failures: int, tmp_path: Path) -> None:
    """All steps on three workers, of which some are lost."""
    job = script_job(tmp_path, HEAD + body, 3, str(tmp_path / "events"), repr(events(happens)))
    assert job.error is None, job.told()
    assert [record["step"] for record in job.metrics] == list(range(40))
    assert len(job.of_kind("failure")) == failures and not job.of_kind("went_back"), job.told()
    assert run_workers(1, alone, HEAD + body, str(tmp_path)) == [job.summary["params_sha256"]]
