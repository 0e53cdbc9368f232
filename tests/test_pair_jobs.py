"""Jobs that train by pair averaging: real processes, a supervisor, workers that stop and die."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from elastic_job import Job, changes, chaos, events, override, run_job, script_job, until, words

from kfuse.elastic.supervisor import Supervisor

pytestmark = pytest.mark.full

SAMPLES, BATCH = 1437, 96  # of digits' training part; of a step
TRAINING = words(
    "model=mlp model.hidden=[16] data=digits lr.base=0.01 comm.sync=pair batch.size=96 batch.micro=8 workers.count=3",
    "workers.max=3",
)
SLOWLY = words("train.epochs=1 batch.min=3 batch.size=3 batch.micro=1 model._target_=apart.Paced +model.seconds=0.03")


def orders(*given: dict[str, Any], **more: Any) -> list[str]:
    """`apart.Orders` as the policy."""
    fields = {"orders": list(given), **more}
    return ["policy._target_=apart.Orders", *(override(f"+policy.{name}", value) for name, value in fields.items())]


def assert_none_twice(job: Job) -> None:
    """But by a lost worker: what it had used of steps that no other one had reached by then is used again."""
    went_on: dict[int, int] = {}
    for event in job.events:
        if event["kind"] == "failure":
            went_on[event["worker"]] = -1
        elif event["kind"] == "view":
            went_on.update({worker: event["step"] for worker, step in went_on.items() if step < 0})
    used: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for entry in job.ledger:
        if entry["step"] < went_on.get(entry["worker"], 2**60):
            for index in entry["indices"]:
                used.setdefault((entry["step"] // -(-SAMPLES // BATCH), index), []).append({**entry, "indices": None})
    twice = {place: entries for place, entries in used.items() if len(entries) > 1}
    assert not twice, f"{len(twice)} of {len(used)}: {list(twice.items())[:5]}"


def assert_each_once(job: Job) -> None:
    """Each epoch's samples, by all workers' ledger lines."""
    epochs, counts = {record["step"]: record["epoch"] for record in job.metrics}, dict[int, Counter[int]]()
    for entry in job.ledger:
        counts.setdefault(epochs[entry["step"]], Counter()).update(entry["indices"])
    for epoch, of_epoch in counts.items():
        assert set(of_epoch.values()) == {1} and len(of_epoch) == SAMPLES, f"epoch {epoch}\n{job.told()}"


def test_decisions_are_applied_by_all_and_other_modes_come_and_go(tmp_path: Path) -> None:
    """A learning rate at each worker's next step; a batch size and a mode at a meeting. Every sample is used once.

    With pair the gradient is clipped by each worker's own norm.
    """
    given = [
        {"step": 4, "sync": "pair"},
        {"step": 20, "lr_scale": 0.5},
        {"step": 30, "batch_size": 48},
        {"step": 50, "sync": "ssgd"},
        {"step": 70, "sync": "pair"},
        {"step": 80, "sync": "pair:2,4"},
        {"step": 90, "sync": "local:3"},
    ]
    settings = words("train.epochs=5 comm.sync=ssgd train.clip_norm=0.5 comm.bucket_mb=0.01")
    job = run_job(tmp_path / "run", [*TRAINING, *orders(*given), *settings])
    assert job.error is None, job.told()
    [before, after] = next(event["lr"] for event in job.of_kind("decision") if "lr" in event)
    assert after == pytest.approx(before / 2)
    changes = [event for event in job.of_kind("decision") if "sync" in event]
    modes = [event["sync"] for event in changes]
    there_and_back = [["ssgd", "pair"], ["pair", "ssgd"], ["ssgd", "pair"]]
    assert modes == [*there_and_back, ["pair", "pair:2,4"], ["pair:2,4", "local:3"]]
    known = [record["step"] for record in job.metrics if record["grad_norm"] is not None]
    apart, together, apart_again, *_ = (event["step"] + 1 for event in changes)
    assert known == [*range(apart), *range(together, apart_again)]
    assert all(record["loss"] is not None and record["workers"] == 3 for record in job.metrics)
    apart_lines = [entry for entry in job.ledger if "worker" in entry]
    assert {entry["worker"] for entry in apart_lines} == {0, 1, 2} and len(job.of_kind("evaluation")) == 5
    sizes = [record["batch_size"] for record in job.metrics]
    first = sizes.index(48)
    assert 30 < first < 60 and set(sizes[:first]) == {96} and set(sizes[first:]) == {48}
    assert_each_once(job)
    assert job.summary["heldout_accuracy"] > 0.75


def test_workers_join_and_leave_at_meetings(tmp_path: Path) -> None:
    phases, gates = changes("5:2 35:3 65:1 95:2"), changes("20:2 50:3 80:1 110:2")
    policy = chaos(tmp_path, phases=phases, gates=gates, adaptive=False)
    job = run_job(tmp_path / "run", [*TRAINING, *policy, "train.epochs=9", "workers.count=1"])
    assert job.error is None, job.told()
    assert [len(view["workers"]) for view in job.views] == [1, 2, 3, 1, 2]
    assert_each_once(job)
    assert job.summary["heldout_accuracy"] > 0.85


def test_each_worker_may_be_killed_at_any_moment(tmp_path: Path) -> None:
    """The leader too; in an evaluation, where all are together; between two steps."""
    kills = "6 forward 0 of 3, 21 between_reduction_and_update 1 of 3, 36 after_step 0 of 3, 51 evaluation 1 of 3"
    policy = chaos(tmp_path, events=events(f"{kills}, 66 evaluated 0 of 3"), adaptive=False)
    job = run_job(tmp_path / "run", [*TRAINING, *policy, "train.epochs=8", "train.heldout_every=8"])
    assert job.error is None, job.told()
    assert len(job.of_kind("failure")) == 5
    assert_none_twice(job)
    assert job.summary["heldout_accuracy"] > 0.85


def steps_of(job: Job) -> dict[int, int]:
    """The newest step of each worker, by the ledger."""
    newest = Counter[int]()
    for entry in job.ledger:
        newest[entry["worker"]] = max(entry["step"], newest[entry["worker"]])
    return newest


def test_a_stopped_worker_does_not_slow_the_others(tmp_path: Path) -> None:
    """For a second both others go on at their pace; at the end of the epoch they wait, and no sample is left out.

    A step takes many times as long as what it computes: a busy machine makes it little longer.
    """
    # Before, as worker 1 is stopped, when its last messages have arrived, and as it goes on.
    made: list[dict[int, int]] = []

    async def during(supervisor: Supervisor, job: Job) -> None:
        await until("step 10", lambda: len(job.metrics) > 10)
        stopped = supervisor.processes.workers[1].pid or 0
        made.append(steps_of(job))
        await asyncio.sleep(1.0)
        os.kill(stopped, signal.SIGSTOP)
        made.append(steps_of(job))
        for _ in range(2):
            await asyncio.sleep(0.5)
            made.append(steps_of(job))
        os.kill(stopped, signal.SIGCONT)

    settings = [*TRAINING, *orders(), *SLOWLY, "batch.size=6", "model.seconds=0.01"]
    job = run_job(tmp_path / "run", settings, during)
    assert job.error is None, job.told()
    assert not job.of_kind("failure") and len(job.views) == 1
    before, stopped, silent, after = made
    assert after[1] == silent[1]
    for worker in (0, 2):
        free, beside = stopped[worker] - before[worker], after[worker] - stopped[worker]
        assert beside > 15 and beside > 0.5 * free
    assert_each_once(job)


SCRIPT = """
import torch, torch.nn.functional as F
import kfuse as kf
from kfuse.data import load_digits
from kfuse.models import MLP

torch.manual_seed(0)
digits = load_digits()
model = MLP(digits.spec["input_shape"], digits.spec["num_classes"])
opt = kf.FusedAdamW(model.parameters(), lr=1e-2)
loader = kf.DataLoader(model, digits.train, opt, batch_size=48, micro_batch=8, epochs=2, num_workers=1)
for number, step in enumerate(loader):
    if number == 10 and kf.rank() == 0:
        kf.set_sync("pair")
    for x, y in step:
        step.loss = F.cross_entropy(model(x), y)
        step.loss.backward()
    opt.step()
    opt.zero_grad()
assert opt.stats.step == 59
digest = float(sum(p.double().abs().sum() for p in model.parameters()))
assert kf.allreduce(digest, "max") == kf.allreduce(digest, "min")
print(f"rank {kf.rank()} ended with the same model\\n", end="", flush=True)  # one write
"""


def test_a_loop_of_ones_own_with_loader_processes(tmp_path: Path) -> None:
    job = script_job(tmp_path, SCRIPT, 2)
    assert [record["step"] for record in job.metrics] == list(range(60)), job.told()
    assert [event["sync"] for event in job.of_kind("decision")] == [["ssgd", "pair"]]
    assert sum("ended with the same model" in line for line in job.lines) == 2, job.told()


def test_a_worker_that_makes_no_step_is_not_waited_for_without_end(tmp_path: Path) -> None:
    """Its heartbeats go on: as in other modes it is ended once the others have waited for it in vain."""
    settings = words("train.epochs=3 comm.timeout_s=3 elastic.heartbeat_timeout_s=4")
    job = run_job(tmp_path / "run", [*TRAINING, *orders(hang=5), *settings])
    assert job.error is None, job.told()
    [failure] = job.of_kind("failure")
    assert failure["worker"] == 1 and "did not come to view 2" in failure["how"]
    assert [record["step"] for record in job.metrics] == list(range(job.summary["steps"]))
    assert job.views[1]["step"] >= 14, "up to the end of the epoch nobody waits"
    assert_none_twice(job)


def test_a_stopped_job_resumes_with_each_sample_used_once(tmp_path: Path) -> None:
    """All meet before the checkpoint is written; it holds their common model."""
    settings = [*TRAINING, *SLOWLY, "checkpoint.every_steps=50", "checkpoint.resume=auto", "model.seconds=0.004"]

    async def stop(supervisor: Supervisor, job: Job) -> None:
        await until("step 70", lambda: len(job.metrics) > 70)
        supervisor.stop("terminated")

    first = run_job(tmp_path / "run", settings, stop)
    assert first.summary["exit_reason"] == "terminated"
    made = first.summary["steps"]
    assert [record["step"] for record in first.metrics] == list(range(made))
    assert Counter(entry["worker"] for entry in first.ledger) == {0: made, 1: made, 2: made}
    job = run_job(tmp_path / "run", settings)
    assert job.error is None, job.told()
    assert [record["step"] for record in job.metrics] == list(range(SAMPLES // 3))
    assert_each_once(job)


@pytest.mark.jobs
def test_a_stop_does_not_wait_for_one_that_is_far_behind(tmp_path: Path) -> None:
    """Worker 1 would need far longer than a stop may take for its steps up to the others': it takes their state."""
    settings = words("checkpoint.every_steps=400 checkpoint.resume=auto model.seconds=0.01 +model.slow=100")

    async def stop(supervisor: Supervisor, job: Job) -> None:
        await until("step 60", lambda: len(job.metrics) > 60)
        supervisor.stop("terminated")

    job = run_job(tmp_path / "run", [*TRAINING, *SLOWLY, *settings], stop)
    assert job.error is None, job.told()
    made = job.summary["steps"]
    assert job.summary["exit_reason"] == "terminated" and 60 < made < 400, "before the checkpoint that is due"
    assert [event["step"] for event in job.of_kind("checkpoint")] == [made]
    assert [view["reason"] for view in job.views] == ["start", "stop"] and not job.of_kind("failure")
    (left_out,) = job.of_kind("left_out")
    by_worker = Counter(entry["worker"] for entry in job.ledger)
    missing = made - by_worker[1]
    assert missing > 40 and left_out["workers"] == [1]
    assert missing - left_out["steps"][0] in (0, 1), "its last step has no line yet"


def test_a_collective_between_meetings_is_refused(tmp_path: Path) -> None:
    """`after_epoch` may make one: all workers have met. (The last worker that comes there may be alone by then.)"""
    job = run_job(tmp_path / "run", [*TRAINING, *orders(collective=20), "train.epochs=3"])
    assert job.error is not None and "each worker is at a step of its own" in str(job.error), job.told()
    assert "RuntimeError: comm.sync=pair: each worker is at a step of its own" in "\n".join(job.lines)


@pytest.mark.jobs
def test_apart_all_workers_end_at_one_step(tmp_path: Path) -> None:
    """Workers of comm.sync=pair have statistics of their own; what they count of the run is the same."""
    job = run_job(
        tmp_path / "run",
        words(
            *TRAINING,
            "optimizer=sgd lr.scaling=adascale train.epochs=null train.steps=40",
            "policy=schedule policy.phases=[{step:10,batch_size:192}]",
        ),
    )
    assert job.error is None, job.told()
    assert job.summary["exit_reason"] == "steps", job.told()
    assert job.summary["batch_size"] == 192
