"""Loader processes in real jobs: the same bits through lost workers, lost loader processes, resizes and resumes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from elastic_job import (
    Job,
    assert_same_training,
    chaos,
    command_line,
    is_alive,
    reference,
    run_job,
    until,
    wait_until,
    words,
)
from torch import Tensor

from kfuse.data import DataSplit, EpochSampler
from kfuse.elastic.supervisor import Supervisor

pytestmark = [pytest.mark.full, pytest.mark.jobs]

TRAINING = words(
    "comm=reproducible comm.bucket_mb=0.002 train.clip_norm=0.5 lr.base=0.003 workers.max=3 model=mlp",
    "model.hidden=[16] model.dropout=0.1 batch.size=16 batch.micro=4 batch.max=32 train.epochs=3",
    "train.heldout_every=30",
    "data._target_=test_feeder_jobs.noisy_split",
)
FIRST = int(EpochSampler(400, 0).indices(0, 0, 1)[0])
"""The sample that is used first."""


class Noisy(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Points with noise from the global generators; `broken`: a sample that raises, or ends its process (`dies`)."""

    def __init__(self, length: int, broken: int = -1, dies: bool = False) -> None:
        generator = torch.Generator().manual_seed(length)
        self.x = torch.randn(length, 6, generator=generator)
        self.broken, self.dies = broken, dies

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        if i == self.broken:
            if self.dies:
                os._exit(5)
            raise ValueError(f"sample {i} is damaged")
        noise = torch.rand(6) + np.random.rand()
        return self.x[i] + 0.3 * noise, int(self.x[i].argmax()) % 3


class Still(Noisy):
    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.x[i], int(self.x[i].argmax()) % 3


def noisy_split(broken: int = -1, dies: bool = False) -> DataSplit:
    return DataSplit(Noisy(400, broken, dies), Still(80), {"input_shape": (6,), "num_classes": 3})


def loaders(pid: int) -> list[int]:
    """The pids of a training worker's loader processes."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, file.read_text().split())
    return [each for each in found if is_alive(each)]


def test_a_worker_and_a_loader_process_are_killed_and_the_job_is_resized(tmp_path: Path) -> None:
    seen: set[int] = set()

    async def disturb(supervisor: Supervisor, job: Job) -> None:
        def of_rank(rank: int) -> list[int]:
            view = supervisor.job.view
            return [] if view is None or len(view.members) <= rank else loaders(view.members[rank].pid)

        await until("loader processes", lambda: len(job.metrics) > 5 and len(of_rank(0)) == 3)
        os.kill(of_rank(0)[0], signal.SIGKILL)
        await until("a second view's loader processes", lambda: len(of_rank(1)) == 3)
        while True:
            seen.update(of_rank(0), of_rank(1))
            await asyncio.sleep(0.05)

    events = [{"step": 30, "moment": "mid_reduction", "rank": 1, "how": "kill", "workers": 2}]
    phases = [{"step": 12, "workers": 2}, {"step": 50, "workers": 1}, {"step": 60, "workers": 3}]
    policy = chaos(tmp_path, phases=phases, events=events, gates=[{"step": 70, "workers": 3}], pace_s=0.02)
    job = run_job(tmp_path / "run", [*TRAINING, "data.num_workers=3", *policy], disturb)
    assert_same_training(job, reference(TRAINING))
    [lost] = job.of_kind("loader_lost")
    assert lost["how"].startswith("was ended by SIGKILL") and lost["worker"] == 0
    assert [view["reason"] for view in job.views][:2] == ["start", "grow"]
    assert len(job.of_kind("failure")) == 1 and job.metrics[-1]["data_bytes_per_s"] > 0
    wait_until("the loader processes' end", lambda: not any(map(is_alive, seen)))
    assert seen


def test_a_lost_workers_loader_processes_do_not_delay_the_others(tmp_path: Path) -> None:
    """They have its connections open. The others notice its end by those, long before the job's timeouts."""
    held: list[int] = []

    async def kill(supervisor: Supervisor, job: Job) -> None:
        await until("steps", lambda: len(job.metrics) > 10)
        assert supervisor.job.view is not None
        pid = supervisor.job.view.members[1].pid
        held.extend(loaders(pid))
        os.kill(pid, signal.SIGKILL)
        await until("the loader processes' end", lambda: not any(map(is_alive, held)))

    settings = [*TRAINING, "workers.count=2", "comm.timeout_s=600", "elastic.heartbeat_timeout_s=600"]
    job = run_job(tmp_path / "run", [*settings, "data.num_workers=3", *chaos(tmp_path, pace_s=0.02)], kill)
    assert_same_training(job, reference(TRAINING))
    assert len(held) == 3
    [view] = [view for view in job.views if view["reason"] == "failure"]
    assert view["time"] - job.of_kind("failure")[0]["time"] < 60


def test_a_stopped_job_ends_in_order(tmp_path: Path) -> None:
    """SIGTERM goes to every process, as from a cluster's scheduler."""
    settings = [*TRAINING, "checkpoint.every_steps=1000", "workers.count=2", "data.num_workers=2"]
    with command_line(tmp_path / "run", [*settings, *chaos(tmp_path, pace_s=0.2)]) as (process, job):
        wait_until("steps", lambda: len(job.metrics) > 5)
        workers = [worker["pid"] for view in job.views for worker in view["workers"]]
        held = [pid for worker in workers for pid in loaders(worker)]
        for pid in [*held, *workers, process.pid]:
            os.kill(pid, signal.SIGTERM)
        status = process.wait()
    assert len(held) == 4 and status == 143
    assert job.of_kind("loader_lost") == [] and job.of_kind("failure") == []
    assert list((tmp_path / "run" / "checkpoints").iterdir())
    assert not any("Traceback" in line or "loader" in line for line in job.lines), job.lines
    wait_until("all to end", lambda: not any(map(is_alive, held)))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["workers.count=2", "data.num_workers=2"], f"ValueError: sample {FIRST} is damaged"),
        (["data.num_workers=1", "+data.dies=true", "elastic.max_failures=1"], "the second one lost"),
    ],
)
def test_a_sample_that_cannot_be_had_ends_the_job_and_says_why(settings: list[str], said: str, tmp_path: Path) -> None:
    broken = [*TRAINING, f"+data.broken={FIRST}", *settings, *chaos(tmp_path)]
    with command_line(tmp_path / "run", broken) as (process, job):
        assert process.wait() == 1
    assert said in job.lines[-1], job.lines[-5:]
    in_the_data_set = any('File "' in line and "__getitem__" in line for line in job.lines)
    assert in_the_data_set == ("damaged" in said)
