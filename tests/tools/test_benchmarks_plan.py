"""The simulation of benchmarks/plan.py: each rule by hand, and what holds for all of them."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

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


def test_without_pauses_and_arrivals_the_planner_is_the_forecast(benchmark: ModuleType) -> None:
    trace = [benchmark.Arrival(0.0, each.samples, each.options) for each in benchmark.draw(12, 16, 1.0, 0)]
    outcome = benchmark.simulate(trace, 16, "planner", pause_s=0.0)
    ends, worker_seconds = forecast([each.options for each in trace], [each.samples for each in trace], 16)
    assert outcome.ends == pytest.approx(np.array(ends), rel=1e-9)
    assert outcome.worker_hours * 3600 == pytest.approx(worker_seconds, rel=1e-9)
