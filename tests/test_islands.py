"""Averages on two levels (comm.sync=pair:N,M) on islands, of which one is cut off for a while."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from elastic_job import Job, run_job, until, words
from hosts import HostLauncher, let_pass, network, why_not
from test_pair_jobs import assert_each_once, orders, steps_of

from kfuse.elastic.supervisor import Supervisor

pytestmark = pytest.mark.full

CUT_S, ASKED_S, STEP_S, STEPS = 5.0, 11.8, 0.04, 360
TRAINING = words(
    "model._target_=apart.Paced +model.seconds=0.04 data=digits lr.base=0.01 comm.sync='pair:1,4' train.epochs=1",
    "batch.min=4 batch.size=4 batch.micro=1 workers.count=4 workers.max=4 elastic.heartbeat_timeout_s=30",
)
HERE, AWAY = (0, 2), (1, 3)  # each island's workers; the supervisor is on the first one's side of the cut


def test_islands_that_are_cut_apart_go_on_and_average_again(tmp_path: Path) -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    before, after = dict[int, int](), dict[int, int]()

    async def during(supervisor: Supervisor, job: Job) -> None:
        await until("steps of all", lambda: len(made := steps_of(job)) == 4 and min(made.values()) >= 20)
        before.update(steps_of(job))
        let_pass(first, 1, packets=False)
        await asyncio.sleep(CUT_S)
        assert all(steps_of(job)[worker] < before[worker] + 20 for worker in AWAY), "their lines wait"
        let_pass(first, 1, packets=True)
        await until("lines of the other island", lambda: all(steps_of(job)[each] > before[each] + 20 for each in AWAY))
        after.update(steps_of(job))
        await until("the end of the epoch", lambda: steps_of(job)[HERE[0]] > STEPS - 10)
        let_pass(first, 1, packets=False)
        await until("its last step", lambda: steps_of(job)[HERE[0]] == STEPS - 2)  # the line of one waits for the next
        await asyncio.sleep(ASKED_S)  # one island waits for the other one, and the supervisor asks who reaches whom
        let_pass(first, 1, packets=True)

    with network(2) as (first, hosts):
        launcher = HostLauncher(first.address, hosts, tmp_path)
        job = run_job(tmp_path / "run", [*TRAINING, *orders()], during, launcher)
    assert job.error is None, job.told()
    assert len(job.views) == 1 and not job.of_kind("failure") and not job.of_kind("cut")
    assert_each_once(job)
    for worker, step in after.items():
        assert step - before[worker] > 0.5 * CUT_S / STEP_S, "each one's own steps went on"
    near, far, failed = (job.summary[name] for name in ("near_averages", "far_averages", "failed_pulls"))
    assert far > max(before.values()) + 40, "before the cut each of four made one in four steps at most"
    assert near > 2 * far and failed >= 4
