"""A real job whose worker count is found by trial."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from elastic_job import Job, run_job, until, words
from torch import Tensor

import kfuse as kf
from kfuse.elastic.supervisor import Supervisor
from kfuse.models import MLP

pytestmark = pytest.mark.full


class Crowded(MLP):
    """With more than three workers each forward of a training step takes a second longer.

    That is many times as long as the step itself takes also on a busy machine: so how the throughput depends on the
    number of workers is no matter of how processes are scheduled.
    """

    def __init__(self, input_shape: Sequence[int], num_classes: int) -> None:
        super().__init__(input_shape, num_classes, hidden=[24])

    def forward(self, x: Tensor) -> Tensor:
        if self.training and kf.size() > 3:
            time.sleep(1)
        return super().forward(x)


def test_a_fourth_worker_that_does_not_pay_is_tried_and_given_back(tmp_path: Path) -> None:
    """Three micro-batches: the fourth worker has nothing to do, and it holds the others up for a second a step.

    The job goes on until the fourth worker has come and gone, and is not tried again for a while.
    """

    async def end(supervisor: Supervisor, job: Job) -> None:
        await until("a third view", lambda: len(job.views) > 2)
        back = job.views[2]["step"]
        await until("steps without the fourth worker", lambda: job.metrics[-1]["step"] > back + 100)
        supervisor.stop("terminated")

    settings = words(
        "policy=autoscale policy.settle=2 policy.window=7 policy.patience_s=300 comm.schedule=allreduce",
        "model._target_=test_autoscale_jobs.Crowded batch.size=24 batch.micro=8 batch.max=24",
        "train.steps=1000000 train.eval_every=1000000 workers.count=3 workers.min=3 workers.max=4",
    )
    job = run_job(tmp_path / "run", settings, end)
    views = [(len(view["workers"]), view["reason"]) for view in job.views]
    assert views == [(3, "start"), (4, "grow"), (3, "shrink")], job.told()
    assert job.summary["workers"] == 3 and job.summary["exit_reason"] == "terminated"
