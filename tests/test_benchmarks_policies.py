"""The benchmarks of statistics, policies and the planner run, and their figures agree where two must."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kfuse.tools.plan.jobs import forecast

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def run(out: Path, script: str, *arguments: str) -> dict[str, Any]:
    """What the script writes with --json."""
    # Where PYTHONSAFEPATH is set Python does not look for modules beside the script.
    paths = [str(BENCHMARKS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    command = [sys.executable, str(BENCHMARKS / script), *arguments, "--json", str(out / "out.json")]
    subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL, timeout=300)
    found: dict[str, Any] = json.loads((out / "out.json").read_text())
    return found


@pytest.mark.full
def test_time_to_accuracy_trains_kfuse_and_ddp_alike_at_the_small_batch(tmp_path: Path) -> None:
    systems = ["fixed", "ddp-small", "gns", "goodput", "seesaw", "adascale", "linear"]
    arguments = ["--problems", "quadratic", "--systems", *systems, "--seeds", "1", "--part", "0.03"]
    record = run(tmp_path, "time_to_accuracy.py", *arguments)
    curves = {run["system"]: run["curve"] for run in record["runs"]}
    assert set(curves) == {*systems, "ddp-best"}
    assert len({curve[-1][0] for curve in curves.values()}) == 1  # all use the same samples
    rows = [[row[:2] + row[3:] for row in curves[name]] for name in ("fixed", "ddp-small")]
    assert np.array(rows[0]) == pytest.approx(np.array(rows[1]), rel=1e-4)
    assert curves["adascale"][-1][1] < curves["fixed"][-1][1] / 4  # steps
    assert record["figures"]["quadratic"]["fixed"]["steps / fixed"]["median"] == 1.0


@pytest.mark.full
def test_noise_quality_has_the_optimizers_estimate_of_the_same_gradients(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What kfuse's engine measured agrees with the estimator that got the products of samples' gradients."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import noise_quality
    import torch

    from kfuse.models import MLP

    x = torch.randn(300, 6, generator=torch.Generator().manual_seed(2))
    tiny = noise_quality.Problem("tiny", "rows", lambda: MLP((6,), 3, (8,)), x, x[:, :3].argmax(1), batch=64, runs=1)
    found = noise_quality.train(tiny, seed=0, steps=76, every=4)
    pairs = zip(found.course["kfuse"], found.course["kfuse, M = 8"], strict=True)
    shown = [(a, b) for a, b in pairs if a.low is not None]
    assert shown
    for ours, same in shown:
        assert (ours.noise_scale, ours.low, ours.high) == pytest.approx(
            (same.noise_scale, same.low, same.high), rel=1e-3
        )
    record = run(tmp_path, "noise_quality.py", "--problems", "digits", "--runs", "1", "--steps", "41", "--every", "20")
    assert record


def test_seesaw_runs(tmp_path: Path) -> None:
    assert run(tmp_path, "seesaw.py", "--samples", "65536", "--batch-sizes", "64")


def test_the_planner_without_pauses_and_arrivals_is_the_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import plan

    trace = [plan.Arrival(0.0, each.samples, each.options) for each in plan.draw(12, 16, 1.0, 0)]
    outcome = plan.simulate(trace, 16, "planner", pause_s=0.0)
    ends, worker_seconds = forecast([each.options for each in trace], [each.samples for each in trace], 16)
    assert outcome.ends == pytest.approx(np.array(ends), rel=1e-9)
    assert outcome.worker_hours * 3600 == pytest.approx(worker_seconds, rel=1e-9)
    for rule in ("static", "fifo"):
        assert (plan.simulate(plan.draw(40, 16, 1.2, 3), 16, rule).completion > 0).all()
