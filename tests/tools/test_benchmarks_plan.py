"""The simulation of benchmarks/plan.py: each rule by hand, and what holds for all of them."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kfuse.tools.plan.allocate import forecast
from kfuse.tools.plan.jobs import Option

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import plan

    return plan


def fixed(workers: int) -> list[Option]:
    """A job that takes so many workers and no other number, with goodput 1."""
    return [Option(workers, 64, 1.0, 1.0, 1.0)]


def test_fifo_and_static_by_hand(benchmark: ModuleType) -> None:
    """Four workers. At 0 s come jobs of 3 workers (10 s), 4 workers (20 s), 1 worker (5 s); at 1 s one of 1 (2 s).

    fifo: the second waits for all four, the third and fourth for the second. static: the shortest service first, so
    the third (5), the first (30); the fourth (2) as the third ends; the second (80) last.
    """
    jobs = [(0.0, 10.0, 3), (0.0, 20.0, 4), (0.0, 5.0, 1), (1.0, 2.0, 1)]
    trace = [benchmark.Arrival(at, samples, fixed(workers)) for at, samples, workers in jobs]
    fifo = benchmark.simulate(trace, 4, "fifo")
    assert fifo.ends.tolist() == [10, 30, 35, 32]
    assert fifo.completion.tolist() == [10, 30, 35, 31]
    static = benchmark.simulate(trace, 4, "static")
    assert static.ends.tolist() == [10, 30, 5, 7]
    for outcome, end in ((fifo, 35), (static, 30)):
        assert outcome.worker_hours * 3600 == pytest.approx(30 + 80 + 5 + 2)
        assert outcome.idle_hours * 3600 == pytest.approx(4 * end - 117)


def test_a_job_asks_for_half_of_linear_scaling_and_a_quarter_of_the_workers(benchmark: ModuleType) -> None:
    options = [Option(n, 64, g, g, g) for n, g in ((1, 1.0), (2, 1.8), (4, 2.2), (8, 3.0))]
    assert benchmark.asked(options, 64).workers == 4
    assert benchmark.asked(options, 8).workers == 2
    assert benchmark.asked(options, 2).workers == 1


def test_the_planner_pauses_a_job_whose_workers_change(benchmark: ModuleType) -> None:
    """The second worker brings 0.8. The second job comes at 100 s and takes one of the first job's two, for 100 s."""
    two = [Option(1, 64, 1.0, 1.0, 1.0), Option(2, 64, 1.8, 1.8, 1.8)]
    trace = [benchmark.Arrival(0.0, 2000.0, two), benchmark.Arrival(100.0, 100.0, fixed(1))]
    outcome = benchmark.simulate(trace, 2, "planner", pause_s=30.0)
    # 180 samples by 100 s, none for 30 s, 70 by 200 s; then two workers again, after another pause.
    assert outcome.ends == pytest.approx(np.array([230 + 1750 / 1.8, 200]))
    assert outcome.worker_hours * 3600 == pytest.approx(2 * outcome.ends[0])
    assert benchmark.simulate(trace, 2, "planner", pause_s=0.0).ends == pytest.approx(np.array([200 + 1720 / 1.8, 200]))


@pytest.mark.parametrize("seed", range(5))
def test_without_pauses_and_arrivals_the_planner_is_the_forecast(benchmark: ModuleType, seed: int) -> None:
    trace = [benchmark.Arrival(0.0, each.samples, each.options) for each in benchmark.draw(12, 16, 1.0, seed)]
    outcome = benchmark.simulate(trace, 16, "planner", pause_s=0.0)
    ends, worker_seconds = forecast([each.options for each in trace], [each.samples for each in trace], 16)
    assert outcome.ends == pytest.approx(np.array(ends), rel=1e-9)
    assert outcome.worker_hours * 3600 == pytest.approx(worker_seconds, rel=1e-9)


@pytest.mark.parametrize("interval_s", [0.0, 600.0])
@pytest.mark.parametrize("rule", ["planner", "static", "fifo"])
def test_no_rule_has_more_workers_than_there_are(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, rule: str, interval_s: float
) -> None:
    advance = benchmark.Cluster.advance

    def checked(cluster: Any, interval_s: float) -> None:
        assert 0 <= cluster.counts.sum() <= cluster.workers
        assert all(cluster.left[j] > 0 for j in cluster.active)
        advance(cluster, interval_s)

    monkeypatch.setattr(benchmark.Cluster, "advance", checked)
    trace = benchmark.draw(100, 32, 1.2, 3)
    outcome = benchmark.simulate(trace, 32, rule, interval_s)
    fastest = np.array([each.samples / each.options[-1].goodput for each in trace])
    assert (outcome.completion >= fastest * (1 - 1e-9)).all()
    assert outcome.idle_hours >= 0
    repeated = benchmark.simulate(benchmark.draw(100, 32, 1.2, 3), 32, rule, interval_s)
    assert (repeated.ends == outcome.ends).all()
