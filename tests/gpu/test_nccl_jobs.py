"""Whole training runs over the NCCL double: workers join, leave and die; fixed jobs end in order after a loss."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nccl_double
import pytest
import torch
from distributed import WorkersFailed, run_workers
from elastic_job import assert_same_training, changes, chaos, events, reference, run_job, words
from nccl_double import Faults, installed, messages, record, records
from torch import nn

import kfuse as kf
from kfuse.comm.group import CommError
from kfuse.comm.settings import CommOptions

pytestmark = pytest.mark.full

TRAINING = words(
    "comm=reproducible comm.bucket_mb=0.002 comm.timeout_s=60 train.clip_norm=0.5 lr.base=0.003 workers.max=3",
    "model._target_=nccl_double.Classifier data=digits batch.size=16 batch.micro=4 batch.max=64 train.steps=60",
    "train.heldout_every=20",
)


@pytest.fixture(autouse=True)
def ends_with_the_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Settings are checked in this process, by making the model: so the double is installed here too."""
    monkeypatch.setenv(nccl_double.LOG, "")
    with installed():
        yield


def assert_one_order(log: Path) -> None:
    """In each group all ranks have enqueued the same, but for what a lost one, or those that it held up, did not."""
    for ranks in messages(log).values():
        longest = max(ranks.values(), key=len)
        for enqueued in ranks.values():
            assert enqueued == longest[: len(enqueued)]
    assert not records(log, "wrong order")
    assert not records(log, "unhandled error") and not records(log, "two threads")


def test_workers_join_and_leave_by_shutdown_with_the_same_bits(tmp_path: Path) -> None:
    log = tmp_path / "double"
    planned = chaos(tmp_path, phases=changes("5:2 20:3 35:2"), gates=changes("15:2 30:3 45:2"))
    settings = [*TRAINING, f"+model.log={log}", *planned]
    job = run_job(tmp_path / "run", settings)
    assert_same_training(job, reference(TRAINING))
    assert [len(view["workers"]) for view in job.views] == [1, 2, 3, 2]
    assert_one_order(log)
    healthy = [line for line in records(log, "abort") if line["healthy"]]
    groups = {line["group"] for line in records(log, "ended")}
    assert not [line for line in healthy if line["group"] not in list(messages(log))[-1:]], healthy
    assert len(groups) >= 2, "both changed groups were shut down"
    assert not records(log, "bytes lost")


def test_a_killed_worker_is_replaced_with_the_same_bits(tmp_path: Path) -> None:
    log = tmp_path / "double"
    killed = events("25 mid_reduction 1 of 3")
    policy = chaos(tmp_path, phases=changes("3:3"), gates=changes("22:3"), events=killed)
    job = run_job(tmp_path / "run", [*TRAINING, f"+model.log={log}", *policy])
    assert_same_training(job, reference(TRAINING))
    assert any(view["reason"] not in ("start", "grow", "replace", "shrink") for view in job.views), job.views
    assert_one_order(log)
    assert any(not line["healthy"] for line in records(log, "abort")), "survivors abort the group of the lost worker"


STEPS = 30
BRIEF_S = 3.0  # of those that wait until the timeout


def fit(directory: Path, timeout_s: float = 60.0) -> list[float]:
    """kf.fit on this worker and the others, from the newest checkpoint; the parameters."""
    kf.init(**CommOptions(bucket_mb=1e-3, reproducible=True).named(), comm_timeout_s=timeout_s)
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    opt = kf.FusedAdamW(net.parameters(), lr=0.01)
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(2))
    given: dict[str, Any] = {"checkpoint_dir": directory, "checkpoint_every_steps": 1000, "checkpoint_resume": "auto"}
    given |= {"steps": STEPS, "batch_size": 12, "micro_batch": 4}
    kf.fit(net, (x, x[:, :3].argmax(1)), opt, observe_progress=False, **given)
    parameters: list[float] = torch.cat([p.detach().flatten() for p in net.parameters()]).tolist()
    return parameters


def fit_until_a_loss(log: Path, directory: Path) -> None:
    with installed(log, Faults(lost_in=(2, 60))):
        began = time.monotonic()
        try:
            fit(directory, timeout_s=BRIEF_S)
        except CommError as error:
            record("survived", error=str(error), seconds=time.monotonic() - began)


def test_a_loss_ends_a_fixed_job_in_commerror_with_a_last_checkpoint_that_is_right(tmp_path: Path) -> None:
    log, directory = tmp_path / "double", tmp_path / "checkpoints"
    with pytest.raises(WorkersFailed, match="1 of 3 workers"):
        run_workers(3, fit_until_a_loss, log, directory)
    reports = records(log, "survived")
    assert len(reports) == 2 and all("rank 2" in r["error"] or "the other" in r["error"] for r in reports), reports
    assert max(report["seconds"] for report in reports) < 10 * BRIEF_S
    assert list(directory.iterdir()), "the last checkpoint"
    assert_one_order(log)
    resumed = run_workers(3, fit, directory)
    whole = run_workers(1, fit, tmp_path / "other")  # on any number of workers, as if nothing had happened
    assert resumed == [whole[0]] * 3
