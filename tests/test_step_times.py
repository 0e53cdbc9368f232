"""The times of a step: what policies see of them, the same on all workers."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from distributed import run_workers
from elastic_job import read_lines
from problems import Seen, network, problem
from torch import Tensor

import kfuse as kf
from kfuse.train.decisions import Decisions


class Slow(list[tuple[Tensor, int]]):
    """A map-style data set that takes a while."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:  # type: ignore[override]
        time.sleep(0.0002)
        return super().__getitem__(index)


def trained(sync: str, run_dir: Path) -> list[kf.Signals]:
    kf.init(comm_sync=sync)
    net, policy = network(), Seen({8: kf.Decision(batch_size=32)})
    x, y = problem(72)  # the last step of an epoch is shorter
    data = Slow(zip(x, y.tolist(), strict=True))
    kf.fit(net, data, kf.FusedAdamW(net.parameters()), policy, batch_size=16, epochs=6, run_dir=run_dir)
    return policy.signals


@pytest.mark.parametrize("sync", ["ssgd", "local:3"])
def test_all_workers_see_the_leaders_times_of_the_step_before(sync: str, tmp_path: Path) -> None:
    seen, others = run_workers(2, trained, sync, tmp_path)
    assert repr(seen) == repr(others)
    assert [signals.step for signals in seen] == list(range(len(seen)))
    records = {record["step"]: record for record in read_lines(tmp_path / "metrics.jsonl")}
    known = 0
    for before, signals in pairwise(seen):
        time_s, wait_s = (records[before.step][name] for name in ("step_time_s", "data_wait_s"))
        is_full = before.samples - (seen[before.step - 1].samples if before.step else 0) == before.batch_size
        if is_full and (before.batch_size, before.workers) == (signals.batch_size, signals.workers):
            assert signals.previous_step_time_s == time_s == float(np.float32(time_s)) > 0
            assert signals.previous_data_wait_s == wait_s and 0 < wait_s < time_s
            known += 1
        else:
            assert signals.previous_step_time_s is None and signals.previous_data_wait_s is None
    assert seen[0].previous_step_time_s is None
    assert {signals.batch_size for signals in seen} == {16, 32}
    # A part of the steps: not the first one, the last of an epoch, and the last one before the batch size changed.
    assert 0 < known < len(seen) - 5


def test_the_hosts_wait_for_the_device_is_a_part_of_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ahead of a GPU, and reads the statistics of the step before once they have arrived."""
    plain, net = Decisions.receive, network()
    monkeypatch.setattr(Decisions, "receive", lambda self, lag: [time.sleep(0.02), plain(self, lag)])
    kf.fit(net, problem(), kf.FusedAdamW(net.parameters()), batch_size=16, epochs=2, run_dir=tmp_path)
    times = [record["step_time_s"] for record in read_lines(tmp_path / "metrics.jsonl")]
    assert min(times[1:]) > 0.02, times
