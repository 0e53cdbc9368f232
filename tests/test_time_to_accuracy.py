"""`benchmarks/time_to_accuracy.py`: its exact recursion, targets, ratios and intervals; and a short run of it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def a_run(system: str, seed: int, curve: list[tuple[float, ...]], **more: Any) -> dict[str, Any]:
    """A record with what the report reads. curve: rows of samples, steps, seconds, quality."""
    there = {"problem": "text", "system": system, "seed": seed, "workers": 2, "lr": 0.1, "curve": curve}
    return {**there, "batch_sizes": [(0, 8)], **more}


# -- the quadratic model ----------------------------------------------------------------------------------------------


def test_the_recursion_by_hand() -> None:
    from tta_problems import Recursion

    exact = Recursion()
    exact.step(lr=0.5, batch_size=4)
    first = exact.mean[0] ** 2 + exact.variance[0]  # h = c = 1: (1 - 0.5)^2 * 1 + 0.5^2 * 1 / 4
    second = exact.mean[1] ** 2 + exact.variance[1]  # h = c = 1/2: (1 - 0.25)^2 * 1 + 0.25 * 0.5 / 4
    assert (first, second) == (0.3125, 0.59375)
    exact.step(lr=1.0, batch_size=2)
    assert exact.mean[0] ** 2 + exact.variance[0] == 0.5  # 0^2 * 0.3125 + 1 * 1 / 2


def test_simulated_runs_have_the_recursions_losses() -> None:
    from tta_problems import Recursion

    generator, copies = np.random.default_rng(0), 4000
    exact = Recursion()
    x = np.ones((copies, len(exact.h)))
    for lr, batch_size in [(0.5, 8)] * 30 + [(0.3, 2)] * 30:
        x -= lr * (exact.h * x + np.sqrt(exact.h / batch_size) * generator.standard_normal(x.shape))
        exact.step(lr, batch_size)
    losses = (exact.h * x**2).sum(1) / 2
    assert abs(losses.mean() - exact.loss) < 5 * exact.deviation / math.sqrt(copies)
    assert losses.std() == pytest.approx(exact.deviation, rel=0.1)


def test_the_quadratic_problem_trains_as_its_recursion_says() -> None:
    from tta_problems import Quadratic, deviations

    problem = Quadratic(0.02)
    data, model = problem.data(seed=3), problem.model(seed=3)
    opt = torch.optim.SGD(model.parameters(), lr=0.4)
    found, steps, batch_size = [], problem.samples // 16, 16
    for step in range(steps):
        x, y = data.fetch(np.arange(step * batch_size, (step + 1) * batch_size))
        opt.zero_grad()
        problem.loss(model(x), y).backward()
        opt.step()
        found.append((step + 1, problem.measure(model)))
    right = deviations([(batch_size, 0.4)] * steps, found)
    wrong = deviations([(batch_size, 0.1)] * steps, found)
    assert len(right) == steps
    assert max(map(abs, right)) < 8
    assert max(map(abs, wrong)) > 8


def test_losses_far_from_the_recursion_are_an_error() -> None:
    from tta_report import disagreement

    def runs(deviations: list[float], system: str = "fixed") -> list[dict[str, Any]]:
        return [a_run(system, seed, [], deviations=deviations) for seed in range(4)]

    assert disagreement(runs([0.0, 7.0, 1.0])) == ""
    assert "8.5 standard deviations" in disagreement(runs([0.0, 8.5, 1.0]))
    assert "5.0 standard deviations" in disagreement(runs([0.0, 2.5]))  # 4 seeds: 2.5 * sqrt(4)
    assert disagreement(runs([0.0, 99.0], "gns")) == ""  # there the batch sizes depend on the gradients


# -- targets, ratios, intervals ---------------------------------------------------------------------------------------

CURVE = [(0, 0, 0.0, 4.0), (100, 10, 1.0, 3.0), (200, 20, 3.0, 2.0), (300, 25, 4.0, 1.0), (400, 30, 5.0, 0.5)]


def test_a_single_lucky_measurement_does_not_count() -> None:
    from tta_report import reached, smooth

    values = [4.0, 1.0, 3.0, 2.0, None, 1.5, 1.0]
    curve = [(100 * k, 10 * k, float(k), value) for k, value in enumerate(values)]
    assert [row[-1] for row in smooth(curve)] == [4.0, 3.0, 2.0, 3.0, 2.0, 1.5, 1.0]
    found = reached(curve, 1.75)  # not 1.0 at 100 samples
    assert found == {"samples": 450.0, "steps": 45.0, "seconds": 4.5}


def test_the_target_is_the_median_over_seeds_of_the_base_at_a_part_of_its_samples() -> None:
    from tta_report import at_samples, target_of

    assert at_samples(CURVE, 0.25) == 3.0
    assert at_samples(CURVE, 0.8) == pytest.approx(0.9)  # at 320 samples, between 1.0 and 0.5
    runs = [a_run("fixed", seed, [(0, 0, 0.0, 9.0), (10, 1, 1.0, last)]) for seed, last in enumerate((1.0, 5.0, 2.0))]
    assert target_of([*runs, a_run("gns", 0, CURVE)], "text", 1.0) == 2.0


def test_a_target_is_reached_where_the_curve_first_comes_to_it() -> None:
    from tta_report import reached

    assert reached(CURVE, 2.5) == {"samples": 150.0, "steps": 15.0, "seconds": 2.0}
    assert reached(CURVE, 3.0) == {"samples": 100.0, "steps": 10.0, "seconds": 1.0}
    assert reached(CURVE, 5.0) == {"samples": 0.0, "steps": 0.0, "seconds": 0.0}
    assert reached(CURVE, 0.4) is None
    unknown = [(0, 0, 0.0, None), (100, 10, 1.0, None), (200, 20, 3.0, 1.0)]
    assert reached(unknown, 2.0) == {"samples": 200.0, "steps": 20.0, "seconds": 3.0}


def test_the_final_quality_is_the_median_of_the_last_three() -> None:
    from tta_report import final

    assert final(CURVE) == 1.0
    assert final([*CURVE, (500, 35, 6.0, None)]) == 1.0
    assert final([*CURVE, (500, 35, 6.0, None), (600, 40, 7.0, None)]) is None


def test_ratios_of_what_was_not_reached() -> None:
    from tta_report import ratio

    assert (ratio(1.0, 2.0), ratio(None, 2.0), ratio(None, None), ratio(1.0, None)) == (0.5, math.inf, math.inf, 0.0)


def test_intervals_are_of_the_median_and_may_be_infinite() -> None:
    from tta_report import interval

    assert interval([3.0, 1.0, 2.0]) == {"median": 2.0, "low": 1.0, "high": 3.0}
    assert interval([2.0]) == {"median": 2.0, "low": 2.0, "high": 2.0}
    assert interval([1.0, 2.0, 3.0, 4.0, math.inf]) == {"median": 3.0, "low": 1.0, "high": None}
    assert interval([math.inf, math.inf, 1.0])["median"] is None
    values = list(np.random.default_rng(1).normal(10, 1, 101))
    found = interval(values)
    assert found["low"] is not None and found["high"] is not None
    # The median of n normal values has the standard deviation 1.2533 / sqrt(n).
    assert found["high"] - found["low"] == pytest.approx(2 * 1.96 * 1.2533 / math.sqrt(101), rel=0.35)


def test_a_summary_has_ratios_within_seeds_and_the_verdict() -> None:
    from tta_report import holds, summarize

    def line(steps: int, seconds: float) -> list[tuple[float, ...]]:
        return [(0, 0, 0.0, 2.0), (100, steps, seconds, 0.0)]

    runs = []
    for seed, slow in enumerate((1.0, 1.5, 2.0)):  # the machine's speed; it cancels within a seed
        runs += [a_run("gns", seed, line(40, 4.2 * slow)), a_run("goodput", seed, line(60, 3.0 * slow))]
        runs += [a_run("fixed", seed, line(100, 10.0 * slow)), a_run("ddp-best", seed, line(50, 4.0 * slow))]
    found = summarize(runs, "text", target=1.0)
    assert list(found) == ["ddp-best", "fixed", "gns", "goodput"]
    assert found["gns"]["steps"] == {"median": 20.0, "low": 20.0, "high": 20.0}
    assert found["gns"]["steps / fixed"] == {"median": 0.4, "low": 0.4, "high": 0.4}
    assert found["gns"]["seconds / fixed"]["median"] == 0.42
    assert found["gns"]["seconds / ddp-best"] == {"median": 1.05, "low": 1.05, "high": 1.05}
    assert found["gns"]["worker_seconds"]["median"] == 2 * found["gns"]["seconds"]["median"] == 6.3
    assert found["gns"]["best_fixed"] == "ddp-best"
    assert holds(found["gns"])
    assert not holds(found["goodput"])  # sooner, but in 0.6 times the steps
    never = summarize([*runs[1:], a_run("gns", 0, [(0, 0, 0.0, 2.0), (100, 9, 1.0, 1.5)])], "text", target=1.0)["gns"]
    assert (never["reached"], never["steps / fixed"]["high"]) == (2, None)
    assert not holds(never)


def test_the_sweep_chooses_the_small_batchs_rate_and_the_quickest_setting() -> None:
    from time_to_accuracy import choose, rates_beyond

    def record(batch_size: int, lr: float, seconds: float, last: float | None) -> dict[str, Any]:
        curve = [(0, 0, 0.0, 4.0), *((n, n // 10, n / 100 * seconds, last) for n in (40, 60, 100))]
        return {"batch_size": batch_size, "lr": lr, "curve": curve}

    records = [record(8, lr, 10.0, last) for lr, last in ((0.1, 2.0), (0.2, 1.0), (0.4, None))]
    records += [record(16, 0.1, 1.0, 1.5), record(16, 0.2, 5.0, 0.9), record(16, 0.4, 6.0, 0.8)]
    chosen = choose(records, small=8)
    assert chosen.pop("sweep")[1]["quality"] == 1.0
    assert chosen == {"lr": 0.2, "sweep_target": 1.0, "best_batch_size": 16, "best_lr": 0.2}
    assert rates_beyond(records, 8) == []
    assert rates_beyond([*records, record(16, 0.8, 4.0, 0.9)], 8) == [(16, 1.6)]
    assert rates_beyond(records[1:], 8) == [(8, 0.1)]
    assert rates_beyond([*records, record(32, 0.4, 4.0, 1.2), record(32, 0.8, 4.0, 1.1)], 8) == [(32, 1.6)]


def test_quality_is_measured_at_equal_intervals_of_samples() -> None:
    from tta_problems import Quadratic
    from tta_systems import EVALUATIONS, Course

    problem = Quadratic(0.1)
    course = Course(problem, problem.model(0), barrier=lambda: None)
    course.start()
    used, sizes = 0, [32] * 40 + [96] * 100
    for step, size in enumerate(sizes):
        size = min(size, problem.samples - used)
        if size == 0:
            break
        used += size
        course.end_step()
        course.steps[step] = (used, size, 0.1)
        course.evaluate_when_due(used)
    record = course.record()
    every = problem.samples / EVALUATIONS
    samples = [row[0] for row in record["curve"]]
    assert samples[0] == 0 and samples[-1] == problem.samples and len(samples) == EVALUATIONS + 1
    assert all(k * every <= at < k * every + 96 for k, at in enumerate(samples))
    assert record["batch_sizes"][:2] == [(0, 32), (40, 96)]


# -- the script -------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_kfuse_and_ddp_train_alike_at_the_small_batch(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    systems = ["fixed", "ddp-small", "gns", "goodput", "seesaw", "adascale", "linear"]
    arguments = ["--problems", "quadratic", "--systems", *systems, "--seeds", "1", "--part", "0.03"]
    # Where PYTHONSAFEPATH is set Python does not look for modules beside the script.
    paths = [str(BENCHMARKS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    script = str(BENCHMARKS / "time_to_accuracy.py")
    subprocess.run([sys.executable, script, *arguments, "--json", str(out)], env=env, check=True)
    record = json.loads(out.read_text())
    curves = {run["system"]: run["curve"] for run in record["runs"]}
    assert set(curves) == {*systems, "ddp-best"}
    assert len({curve[-1][0] for curve in curves.values()}) == 1  # all use the same samples
    rows = [[row[:2] + row[3:] for row in curves[name]] for name in ("fixed", "ddp-small")]
    assert np.array(rows[0]) == pytest.approx(np.array(rows[1]), rel=1e-4)
    assert curves["adascale"][-1][1] < curves["fixed"][-1][1] / 4  # steps
    assert record["figures"]["quadratic"]["fixed"]["steps / fixed"]["median"] == 1.0
