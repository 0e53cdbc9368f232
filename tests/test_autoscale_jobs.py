"""Real jobs whose worker count is found by trial, and one that is not grown since it waits for data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from elastic_job import DEADLINE_S, Job, command_line, wait_until

from kfuse.policies import AutoscalePolicy
from kfuse.policies.signals import Bounds, Signals

pytestmark = pytest.mark.full


def replayed(job: Job, micro_batch: int, bounds: Bounds) -> Iterator[Signals]:
    """The signals of a job's steps, as far as a worker count depends on them, from its metrics."""
    before: dict[str, Any] = {"samples": 0}
    full = False  # the step before had its whole batch
    for line in job.metrics:
        same = full and all(before[name] == line[name] for name in ("batch_size", "workers"))
        names = ("step", "epoch", "samples", "lr", "batch_size", "micro_batches", "workers")
        yield Signals(
            **{name: line[name] for name in names},
            lr_scale=1.0,
            micro_batch=micro_batch,
            bounds=bounds,
            previous_step_time_s=before["step_time_s"] if same else None,
            previous_data_wait_s=before["data_wait_s"] if same else None,
        )
        full = line["samples"] - before["samples"] == line["batch_size"]
        before = line


def test_a_fourth_worker_that_does_not_pay_is_tried_and_given_back(tmp_path: Path) -> None:
    """Three micro-batches: the fourth worker has nothing to do, and it holds the others up for a second a step.

    The job goes on until the fourth worker has come and gone, however long it takes to boot.
    """
    model = ["model._target_=crowded.Crowded", "+model.most=3", "+model.seconds=1"]
    size = ["batch.size=24", "batch.micro=8", "batch.max=24", "train.steps=1000000", "train.eval_every=1000000"]
    workers = ["workers.count=3", "workers.min=3", "workers.max=4", "elastic.boot_timeout_s=300"]
    scaling = ["policy=autoscale", "policy.settle=2", "policy.window=7", "policy.patience_s=300"]
    settings = [*scaling, *model, *size, *workers, "comm.schedule=allreduce"]
    with command_line(tmp_path / "run", settings) as (process, job):
        wait_until("a third view", lambda: len(job.views) > 2)
        back = job.views[2]["step"]
        wait_until("steps without the fourth worker", lambda: job.metrics[-1]["step"] > back + 100)
        process.terminate()
        assert process.wait(DEADLINE_S) == 143, job.told()
    views = [(len(view["workers"]), view["reason"]) for view in job.views]
    assert views == [(3, "start"), (4, "grow"), (3, "shrink")], job.told()
    assert job.summary["workers"] == 3
    # What it saw is in metrics.jsonl: the same policy decides the same by that.
    policy = AutoscalePolicy(settle=2, window=7)
    goals: list[int] = []
    for signals in replayed(job, 8, Bounds(8, 24, 3, 4)):
        policy.decide(signals)
        goals.append(policy.goal)
    assert [goal for goal, _ in itertools.groupby(goals)] == [3, 4, 3] and policy.direction == 0
    assert set(policy.rates) == {"3", "4"}
    assert 3 * (policy.rates["4"] / policy.rates["3"] - 1) <= policy.threshold
