"""Jobs that train on a stream: the same bits and an exact ledger on any workers, through losses and resizes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from elastic_job import (
    DEADLINE_S,
    Job,
    assert_same_steps,
    changes,
    chaos,
    command_line,
    events,
    reference,
    run_job,
    wait_until,
    words,
)
from torch.utils.data import IterableDataset

from kfuse.data import DataSplit, Source, load_digits

pytestmark = [pytest.mark.full, pytest.mark.jobs]

TRAINING = words(
    "comm=reproducible comm.bucket_mb=0.002 train.clip_norm=0.5 lr.base=0.003 lr.scaling=sqrt workers.max=4",
    "model=mlp model.hidden=[24] model.dropout=0.1 batch.size=16 batch.micro=4 batch.max=64 batch.micro_max=8",
    "train.heldout_every=25 train.epochs=null train.steps=100 data._target_=test_stream_jobs.split",
    "checkpoint.every_steps=10",
)

LENGTHS = (150, 90, 41, 7)


class Digits(Source):
    """The digits as shards."""

    shards, block = len(LENGTHS), 4

    def __init__(self) -> None:
        self.split = load_digits()

    def open(self, shard: int, position: int) -> Iterator[Any]:
        first = sum(LENGTHS[:shard])
        x, y = self.split.train.fetch(np.arange(first, first + LENGTHS[shard]))
        return ((x[p] + 0.1 * torch.randn(x[p].shape), int(y[p])) for p in range(position, LENGTHS[shard]))


class Unseekable(IterableDataset):
    """The same without a way to seek."""

    def __iter__(self) -> Iterator[Any]:
        source = Digits()
        for shard in range(source.shards):
            yield from source.open(shard, 0)


def split(seekable: bool = True) -> DataSplit:
    source = Digits()
    return DataSplit(source if seekable else Unseekable(), source.split.heldout, source.split.spec)


def assert_numbers_in_order(job: Job) -> None:
    """Each number was used once, in the order of the steps and their micro-batches, and recorded so."""
    assert job.error is None, job.told()
    assert job.summary["steps"] == 100 and job.summary["epochs"] == 0
    assert [record["step"] for record in job.metrics] == list(range(100))
    assert [n for entry in job.ledger for n in entry["indices"]] == list(range(job.summary["samples"])), job.told()


SEEKABLE = pytest.mark.parametrize("seekable", ["true", "false"])


def undisturbed(seekable: str) -> Job:
    """On one worker. The batch size follows the noise scale."""
    job = reference([*TRAINING, f"+data.seekable={seekable}"])
    assert_numbers_in_order(job)
    assert len({record["batch_size"] for record in job.metrics}) > 1
    return job


@SEEKABLE
def test_a_loss_and_resizes(seekable: str, tmp_path: Path) -> None:
    """Where the source can seek with two loader processes of each worker, else without."""
    count = 2 if seekable == "true" else 0
    kills = events("28 forward 1 of 3, 85 between_reduction_and_update 0")
    faults = chaos(tmp_path, phases=changes("5:3 40:1 60:2"), gates=changes("20:3 55:1 75:2"), events=kills)
    job = run_job(tmp_path / "run", [*TRAINING, f"+data.seekable={seekable}", f"data.num_workers={count}", *faults])
    assert_numbers_in_order(job)
    assert_same_steps(job, undisturbed(seekable))
    assert [failure["how"] for failure in job.of_kind("failure")] == ["was ended by SIGKILL"] * 2
    assert {len(view["workers"]) for view in job.views} == {1, 2, 3}


@SEEKABLE
def test_a_job_that_was_killed_as_a_whole_resumes_in_the_stream(seekable: str, tmp_path: Path) -> None:
    settings = [*TRAINING, f"+data.seekable={seekable}", "workers.count=2", "data.num_workers=1", *chaos(tmp_path)]
    with command_line(tmp_path / "run", settings) as (process, job):
        wait_until("a checkpoint", lambda: job.metrics and job.metrics[-1]["step"] > 40)
        process.kill()
    with command_line(tmp_path / "run", [*settings, "checkpoint.resume=auto"]) as (process, job):
        assert process.wait(DEADLINE_S) == 0
    assert job.views[-1]["step"] >= 10, "resumed"
    assert_numbers_in_order(job)
    assert_same_steps(job, undisturbed(seekable))
