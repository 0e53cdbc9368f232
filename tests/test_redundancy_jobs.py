"""Jobs with sharded state lose workers, and go on: with the bits of an undisturbed run where the state has a mirror."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from distributed import run_workers
from elastic_job import Job, assert_exact, assert_same_steps, chaos, run_job, until, words
from hosts import NamedHosts
from test_kfuse_run import run_script

from kfuse.elastic.launchers import Launcher
from kfuse.elastic.processes import State
from kfuse.elastic.supervisor import Supervisor
from kfuse.train.evaluation import params_sha256

pytestmark = [pytest.mark.full, pytest.mark.jobs]

TRAINING = words(
    "model=mlp data=digits model.hidden=[160,96] model.dropout=0.1 batch.size=48 batch.micro=4 train.epochs=10000",
    "policy=none train.clip_norm=0.5 lr.base=0.003 train.eval_every=100000 workers.max=4 elastic.max_failures=20",
    "comm.bucket_mb=0.06",  # four blocks of parameters in each bucket: the shards of up to four workers
)
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


def event(step: int, moment: str, rank: int, how: str = "kill", workers: int = 3) -> dict[str, Any]:
    return {"step": step, "moment": moment, "rank": rank, "how": how, "workers": workers}


def test_each_moment_of_a_step(tmp_path: Path) -> None:
    """Before all know that all gradients are there, and after; while some have updated, and others have not."""
    moments = ("mid_reduction", "point", "updating", "sharing", "updating", "sharing", "point")
    events = [event(6 + 8 * index, moment, index % 3) for index, moment in enumerate(moments)]
    job = with_events(tmp_path, events, ["optimizer=lamb"], 3)
    assert not job.of_kind("went_back")


def test_while_shards_move_and_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    """Losses one after the other, of which no two are a worker and its mirror."""
    events = [
        event(10, "forward", 1, workers=4),
        event(11, "resharding", 2),  # the last one of four before; its mirror is rank 0
        event(25, "checkpoint_write", 0, workers=4),
        event(40, "sharing", 3, workers=4),
        event(41, "resharded", 1),  # shards and mirrors are where they belong: all is as before a first loss
    ]
    job = with_events(tmp_path, events, ["checkpoint.every_steps=12"], 4)
    assert not job.of_kind("went_back")


def test_owner_and_mirror_together_go_back_to_the_checkpoint(tmp_path: Path) -> None:
    events = [event(31, "updating", 1, workers=4), event(31, "updating", 2, workers=4)]
    job = with_events(tmp_path, events, ["checkpoint.every_steps=12"], 4)
    (back,) = job.of_kind("went_back")
    assert back["step"] == 24 and back["steps"] in (7, 8), back
    assert "no worker has this optimizer state any more" in back["why"]


@pytest.mark.parametrize(("hosts", "rank", "left", "beside"), [("aabb", 1, 2, []), ("aaab", 3, 3, [2])])
def test_a_lost_host_takes_no_state_with_it_whose_copy_is_on_another(
    hosts: str, rank: int, left: int, beside: list[int], tmp_path: Path
) -> None:
    """All its workers are lost in the midst of an update. Where not all copies can be on another host, an event says of
    how many workers.
    """
    strikes = [event(20, "updating", rank, "kill_host", 4)]
    launcher = NamedHosts(hosts, tmp_path / "run.log")
    job = with_events(tmp_path, strikes, ["elastic.replace=false"], 4, launcher)
    assert not job.of_kind("went_back") and len(job.views[-1]["workers"]) == left
    assert [len(told["workers"]) for told in job.of_kind("copy_beside")] == beside


def test_none_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    events = [event(20, "updating", 1), event(45, "forward", 0)]
    job = with_events(tmp_path, events, ["elastic.redundancy=none", "checkpoint.every_steps=12"], 3)
    assert [(back["step"], back["steps"]) for back in job.of_kind("went_back")] == [(12, 8), (36, 9)]


def test_none_without_a_checkpoint_ends_the_job(tmp_path: Path) -> None:
    settings = [*TRAINING, *SHARDED, *REPRODUCIBLE, *chaos(tmp_path, events=[event(20, "forward", 1)])]
    job = run_job(tmp_path / "run", [*settings, "elastic.redundancy=none", "workers.count=3"])
    assert job.error is not None and "there is no checkpoint to go on from" in job.error, job.told()


def with_events(
    tmp_path: Path, events: list[dict[str, Any]], settings: list[str], workers: int, launcher: Launcher | None = None
) -> Job:
    """A job with these events, all of which strike: with the bits of an undisturbed one."""
    more = [*settings, *REPRODUCIBLE, "train.steps=80"]
    faults: dict[str, Any] = {"events": events, "adaptive": False}
    if "checkpoint.every_steps=12" in settings and not any(each["moment"] == "checkpoint_write" for each in events):
        faults["checkpoints"] = {"directory": str(tmp_path / "run" / "checkpoints"), "every": 12}
    job = run_job(
        tmp_path / "run",
        [*TRAINING, *SHARDED, *more, f"workers.count={workers}", *chaos(tmp_path, **faults)],
        launcher=launcher,
    )
    assert job.error is None, job.told()
    marks = {path.name for path in (tmp_path / "events").glob("event-*")}
    assert marks == {f"event-{index}" for index in range(len(events))}, job.told()
    assert_exact(job)
    assert_same_steps(job, undisturbed(tmp_path, job, more))
    return job


def undisturbed(directory: Path, job: Job, settings: list[str]) -> Job:
    """The same steps on one worker, with replicated state."""
    steps = f"train.steps={job.summary['steps']}"
    return run_job(directory / "alone", [*TRAINING, *settings, steps, "workers.count=1", "checkpoint.every_steps=null"])


HEAD = """
import os, signal, torch, torch.nn.functional as F, kfuse as kf
from kfuse.comm.gloo import GlooGroup
from kfuse.comm.group import CommError
from kfuse.comm.executor import Executor
"""
MAKE = """
kf.init(comm_state="sharded", comm_reproducible=True, comm_bucket_mb=0.06)
torch.manual_seed(0)
x, y = torch.randn(240, 64), torch.randint(0, 3, (240,))
model = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.Tanh(), torch.nn.Linear(300, 3))
opt = kf.FusedAdamW(model.parameters(), lr=0.01, clip_norm=0.5)
"""
LOOP = (
    HEAD
    + """
number, calls = int(os.environ.get("KFUSE_WORKER", -1)), {"updates": 0, "share": 0}

def dies(kind, what, worker, at):
    original = getattr(kind, what)
    def patched(*args, **kwargs):
        calls[what] += 1
        if number == worker and calls[what] == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)
    setattr(kind, what, patched)

dies(Executor, "updates", 1, 12)
dies(GlooGroup, "share", 2, 81)  # the first of three in step 27
"""
    + MAKE
    + """
for step in kf.DataLoader((x, y), model, opt, batch_size=24, batch_micro=4, train_epochs=4):
    for a, b in step:
        step.loss = F.cross_entropy(model(a), b)
        step.loss.backward()
    opt.step()
    opt.zero_grad()
"""
)


def alone(script: str) -> str:
    names: dict[str, Any] = {}
    exec(script, names)
    return params_sha256(names["model"])


def assert_alone(script: str, tmp_path: Path, failures: int) -> None:
    """The script on three workers, of which some are lost: all steps, and the bits of one worker."""
    ended = run_script(tmp_path, script, "--elastic-replace=false", "--observe-progress=false", workers=3)
    assert ended.steps == list(range(40))
    assert len(ended.of_kind("failure")) == failures and not ended.of_kind("went_back"), ended.said
    assert run_workers(1, alone, script) == [ended.summary["params_sha256"]]


def test_a_loop_of_ones_own_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """Where its step's update was begun the body does not run again."""
    assert_alone(LOOP, tmp_path, failures=2)


BEHIND = (
    HEAD
    + """
number, calls, original = int(os.environ.get("KFUSE_WORKER", -1)), 0, Executor.updates

def updates(*args):
    global calls
    calls += 1
    yield from original(*args)
    if calls == 12 and number == 0:
        raise CommError("the last message of the update was lost here")
    if calls == 12 and number == 2:
        os.kill(os.getpid(), signal.SIGKILL)

Executor.updates = updates
"""
    + MAKE
    + """
kf.fit(model, (x, y), opt, loss_fn=F.cross_entropy, batch_size=24, batch_micro=4, train_epochs=4)
"""
)


def test_a_worker_whose_update_failed_takes_the_state_of_one_that_ended_it(tmp_path: Path) -> None:
    """One worker has ended the step's update as another is lost, and the third's has failed in the last message.

    The third takes the first one's state, and still has gradients of the step: the next step's are not added to them.
    """
    assert_alone(BEHIND, tmp_path, failures=1)
