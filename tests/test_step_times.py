"""The times of a step: what policies see of them, the same on all workers, and the growth that is dropped by them."""

from __future__ import annotations

import os
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import run_workers
from elastic_job import read_lines
from policy_signals import signals as signals_at
from problems import Seen, network, problem
from torch import Tensor

import kfuse as kf
from kfuse.policies import ComposePolicy, SchedulePolicy
from kfuse.tools.replay.run import run
from kfuse.tools.replay.steps import Recorded, RecordedSteps
from kfuse.tools.report.charts import charts
from kfuse.tools.report.recorded import read_runs
from kfuse.train import input_bound
from kfuse.train.decisions import Decisions

ZEROS = os.open("/dev/zero", os.O_RDONLY)


class Slow(list[tuple[Tensor, int]]):
    """A map-style data set that takes a while: it reads 20 KB for each sample, at 20 MB/s."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:  # type: ignore[override]
        time.sleep(len(os.read(ZEROS, 20_000)) / 20e6)
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


def test_what_is_dropped() -> None:
    """Of signals with 64 samples on one worker, at most 1024 and 8; by the waits of steps of a second."""
    gns, plan = kf.GNSPolicy(), SchedulePolicy("0:8 1K:128")
    asked, rest = kf.Decision(batch_size=128, workers=2, lr_scale=0.5), kf.Decision(lr_scale=0.5)

    def granted(waits: list[float], decision: kf.Decision, policy: kf.BasePolicy = gns) -> kf.Decision | None:
        known = signals_at(previous_step_time_s=1.0, previous_data_wait_s=waits[-1])
        return input_bound.without_growth(decision, known, [(wait, 1.0) for wait in waits[:-1]], policy)[0]

    for waits in ([0.3] * 20, [0.0] * 30 + [0.5] * 30):
        assert granted(waits, asked) == rest
        assert granted(waits, kf.Decision(batch_size=128, lr_scale=2.0)) == kf.Decision(), "a rate for that batch"
    for waits in ([0.3] * 19, [0.19] * 20, [1.0, *[0.1] * 19], [1.0] * 20 + [0.0] * 60):
        assert granted(waits, asked) == asked
    for change in (kf.Decision(batch_size=32, workers=1), kf.Decision(batch_size=64, sync="sma")):
        assert granted([0.9] * 20, change) == change
    assert input_bound.without_growth(asked, signals_at(), [(0.9, 1.0)] * 20, gns, reproducible=True)[0] == kf.Decision(
        batch_size=128, lr_scale=0.5
    ), "what is computed depends on no time"
    for policy in (plan, ComposePolicy(plan, gns)):
        assert granted([0.9] * 20, asked, policy) == kf.Decision(batch_size=128, lr_scale=0.5), "a plan of batches"


SIZES: dict[str, Any] = {"batch_size": 16, "micro_batch": 4, "batch_max": 32, "steps": 60}


@pytest.mark.parametrize("most_wait", [input_bound.MOST_WAIT, 1.0])
def test_a_throttled_source(most_wait: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch grows by the noise scale where the rule is off, and only then. A replay decides the same."""
    monkeypatch.setattr(input_bound, "MOST_WAIT", most_wait)
    net, (x, y), policies = network(), problem(), [kf.GNSPolicy(factor=1e6) for _ in range(2)]
    data, given = Slow(zip(x, y.tolist(), strict=True)), SIZES | {"num_workers": 1, "run_dir": tmp_path}
    kf.fit(net, data, kf.FusedAdamW(net.parameters()), policies[0], **given)
    events = read_lines(tmp_path / "events.jsonl")
    grown = [(event["step"], event["batch_size"][1]) for event in events if event["kind"] == "decision"]
    notes = [event["note"] for event in events if event["kind"] == "input_bound"]
    recorded = Recorded([*map(kf.Signals.of_record, read_lines(tmp_path / "metrics.jsonl"))])
    replayed = run(policies[1], RecordedSteps(recorded))
    assert [(change.step, change.after.batch_size) for change in replayed.changes] == grown
    assert (len(grown), len(notes), replayed.input_bound > 1) == ((1, 0, False) if most_wait == 1.0 else (0, 1, True))
    *_, text = [chart.text for chart in charts(read_runs([tmp_path])) if chart.title.startswith("Time of a step")]
    assert all(note in text and 2 < float(note.split()[-2]) < 22 for note in notes), "MB/s"


def test_tensors_in_memory_let_the_batch_grow(tmp_path: Path) -> None:
    net, policy = network(), kf.GNSPolicy(factor=1e6)
    kf.fit(net, problem(), kf.FusedAdamW(net.parameters()), policy, run_dir=tmp_path, **SIZES)
    kinds = [event["kind"] for event in read_lines(tmp_path / "events.jsonl")]
    assert "decision" in kinds and "input_bound" not in kinds
