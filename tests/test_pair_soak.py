"""Workers of a job with pair averaging are killed, stopped and hung at random instants: nothing hangs."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from pathlib import Path

import pytest
from elastic_job import Job, run_job, until, words
from test_pair_jobs import TRAINING, assert_none_twice, orders

from kfuse.elastic.processes import State
from kfuse.elastic.supervisor import Supervisor

pytestmark = pytest.mark.full

STRIKES = 6


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_losses_at_random_instants(tmp_path: Path, seed: int) -> None:
    order, struck = random.Random(seed), Counter[str]()

    async def strike(supervisor: Supervisor, job: Job) -> None:
        views = 0
        while sum(struck.values()) < STRIKES:
            # Three that have the training's state, and none that is lost yet: where all are the job rightly ends.
            def whole(views: int = views) -> bool:
                return len(job.views) > views and len(job.views[-1]["workers"]) == 3

            await until("three workers", whole)
            seen = len(job.metrics)
            await until("a step", lambda seen=seen: len(job.metrics) > seen)  # type: ignore[misc]
            await asyncio.sleep(order.random() * 0.6)
            worker = order.choice(supervisor.processes.members())
            how = order.choice(["kill", "kill", "stop", "pause"])
            struck[how] += 1
            pid, views = worker.pid or 0, 0 if how == "pause" else len(job.views)
            os.kill(pid, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
            if how == "pause":
                await asyncio.sleep(0.5)
                os.kill(pid, signal.SIGCONT)
            else:  # "stop": until its heartbeats have been missing for too long
                await until("its end", lambda worker=worker: worker.state is State.ENDED)  # type: ignore[misc]

    settings = words(
        "train.epochs=1000 train.steps=900 train.eval_every=40 batch.size=24 batch.micro=4 comm.timeout_s=10",
        "model._target_=apart.Paced +model.seconds=0.01 elastic.max_failures=50 elastic.heartbeat_timeout_s=2",
    )
    job = run_job(tmp_path / "run", [*TRAINING, *orders(), *settings], strike)
    assert job.error is None, job.told()
    assert sum(struck.values()) == STRIKES
    assert job.summary["steps"] == 900
    assert_none_twice(job, -(-1437 // 24))
    assert job.summary["eval_accuracy"] > 0.8
