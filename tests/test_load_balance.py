"""A slow worker is measured, reported, given fewer micro-batches or replaced, and the bits stay the same."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from elastic_job import Job, assert_same_training, override, run_job, words
from hypothesis import given
from hypothesis import strategies as st

from kfuse.data import worker_range
from kfuse.train.step import SLOW, WARM, Throughput, measured, relative_throughput, shares, stragglers

pytestmark = pytest.mark.full


TRAINING = words(
    "comm=reproducible model._target_=uneven.Uneven data=digits batch.size=64 batch.micro=4",
    "train.epochs=4 workers.max=3 policy._target_=uneven.ReplaceStragglers",
)
speeds = st.floats(0.1, 1000.0)


def after(steps: int, seconds: list[float], known: Throughput | None = None) -> Throughput:
    for _ in range(steps):
        known = measured(known or {}, range(len(seconds)), seconds)
    return known or {}


@given(st.lists(speeds, min_size=2, max_size=9))
def test_steady_workers_are_known_exactly_once_warm(throughput: list[float]) -> None:
    seconds = [1 / value for value in throughput]
    assert relative_throughput(after(WARM - 1, seconds), range(len(seconds))) == [None] * len(seconds)
    relative = relative_throughput(after(WARM, seconds), range(len(seconds)))
    upper_median = sorted(throughput)[len(throughput) // 2]
    assert relative == pytest.approx([value / upper_median for value in throughput], rel=1e-9)


@given(st.lists(speeds, min_size=2, max_size=9))
def test_shares_follow_speed_where_someone_is_slow(throughput: list[float]) -> None:
    workers = range(len(throughput))
    relative = relative_throughput(after(WARM, [1 / value for value in throughput]), workers)
    weights = shares(relative)
    if min(ratio for ratio in relative if ratio is not None) >= SLOW:
        assert weights is None
        return
    assert weights is not None
    for (a, x), (b, y) in itertools.permutations(zip(relative, weights, strict=True), 2):
        assert a is not None and b is not None
        assert x <= y or a > b
    ranges = [worker_range(16 * len(workers), len(workers), rank, weights) for rank in workers]
    slowest = min(workers, key=lambda rank: relative[rank] or 0.0)
    assert len(ranges[slowest]) < 16


def test_a_change_of_speed_is_followed() -> None:
    known = after(100, [0.1, 0.1])
    assert shares(relative_throughput(known, [0, 1])) is None
    known = after(250, [0.1, 0.4], known)
    _, slow = relative_throughput(known, [0, 1])
    assert slow == pytest.approx(0.25, abs=0.05)
    assert shares([1.0, slow]) == (16, 4)


def test_who_is_lost_is_forgotten_and_who_is_new_waited_for() -> None:
    known = measured(after(20, [0.1, 0.1]), [0, 7], [0.1, 0.2])
    assert set(known) == {0, 7}
    assert relative_throughput(known, [0, 7]) == [None, None]


def test_a_worker_without_work_is_tried_again() -> None:
    known = after(20, [0.1, 1.0])
    before = relative_throughput(known, [0, 1])[1]
    known = after(50, [0.1, 0.0], known)
    later = relative_throughput(known, [0, 1])[1]
    assert before is not None and later is not None
    assert before == pytest.approx(0.1) and 0.5 < later < 1.0


def test_a_straggler_is_one_until_it_is_well() -> None:
    assert stragglers([4, 5], [1.0, 0.79], {}, 0.5) == {5: 0.5}
    assert stragglers([4, 5], [1.0, 0.85], {}, 0.5) == {}
    assert stragglers([4, 5], [1.0, 0.85], {5: 9.5}, 0.5) == {5: 10.0}
    assert stragglers([4, 5], [1.0, 0.95], {5: 9.5}, 0.5) == {}
    assert stragglers([4, 5], [None, None], {5: 9.5}, 0.5) == {}


def run(directory: Path, *settings: str) -> Job:
    directory.mkdir()
    job = run_job(directory / "run", [*TRAINING, override("+model.directory", str(directory)), *settings])
    assert job.error is None, job.told()
    return job


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run(tmp_path_factory.mktemp("alone") / "job", "workers.count=1", "+policy.active=false")


def given_to(directory: Path, worker: int) -> int:
    return (directory / f"worker-{worker}").stat().st_size


def test_a_slow_worker_is_given_less(alone: Job, tmp_path: Path) -> None:
    job = run(tmp_path / "job", "workers.count=2", "+policy.active=false")
    assert_same_training(job, alone)
    assert given_to(tmp_path / "job", 1) < 0.6 * given_to(tmp_path / "job", 0)


def test_a_slow_worker_is_replaced(alone: Job, tmp_path: Path) -> None:
    job = run(tmp_path / "job", "workers.count=2", "workers.balance=false")
    assert_same_training(job, alone)
    assert {"replace": 1} in [{k: v for k, v in event.items() if k == "replace"} for event in job.of_kind("decision")]
    assert [view["reason"] for view in job.views][:2] == ["start", "replace"]
    assert all(len(view["workers"]) == 2 for view in job.views)
    pids = [[worker["pid"] for worker in view["workers"]] for view in job.views]
    assert pids[1][0] == pids[0][0] and pids[1][1] not in pids[0]
    assert job.statuses[pids[0][1]] == 0
    assert not job.of_kind("failure")
